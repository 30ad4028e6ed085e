"""`register_model`: models of your own, which the engine runs without a change to it.

Where it stands: the loader asks here which class is meant by `model_impl="module:Class"`, and whether an installed
package brings one for the architecture that a checkpoint names.

    @register_model("OPTForCausalLM")                  says of a class which checkpoints it runs
    class OPT(nn.Module): ...

    LLM(model=..., model_impl="my_models:OPT")         the engine is told of it: as an option, like a policy,
    [project.entry-points."mini_vllm.models"]          or by an installed package: then it is found by itself
    OPTForCausalLM = "my_models:OPT"

What always holds: there is no table that registration changes. What a class runs is written on the class, so two
engines in one process can run one architecture by two classes, and importing a module changes nothing for anybody.

In vLLM: `ModelRegistry.register_model` in `vllm/model_executor/models/registry.py`, which is a table of the process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar

import torch

from mini_vllm.errors import InvalidConfigError
from mini_vllm.model.language_model import LanguageModel

ENTRY_POINTS = "mini_vllm.models"
_MARK = "mini_vllm_architectures"
_METHODS = ("forward", "logits", "layer_specs")


class RegisteredModel(LanguageModel, Protocol):
    """A `torch.nn.Module` that is a `LanguageModel` and can be made from a parsed `config.json`.

    Its parameters are filled from the checkpoint's tensors of the same names. A method `weight_map(self) ->
    list[WeightSpec]` says otherwise: other names, or several tensors joined into one parameter. `settle_context` may be
    left out.
    """

    def __init__(self, config: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device | str) -> None:
        """Build the layers.

        Args:
            config: the parsed config.json.
            dtype, device: for every parameter. The device is "meta" while a checkpoint is loaded, so that nothing is
                in memory twice; tables that are computed, and are no parameters, belong on the CPU.
        """


ModelClass = TypeVar("ModelClass", bound=type[Any])


def register_model(*architectures: str) -> Callable[[ModelClass], ModelClass]:
    """Say of a class which checkpoints it runs. `examples/add_a_model.py` is a whole one.

    Args:
        architectures: names as `architectures` of `config.json` has them.

    Raises:
        TypeError: no name, or the class lacks what a `RegisteredModel` has.
    """
    if not architectures or not all(isinstance(name, str) for name in architectures):
        raise TypeError('register_model needs names of architectures: @register_model("OPTForCausalLM")')

    def mark(model_class: ModelClass) -> ModelClass:
        lacking = [name for name in _METHODS if not hasattr(model_class, name)]
        if not issubclass(model_class, torch.nn.Module) or lacking:
            raise TypeError(
                f"{model_class.__name__} must be a torch.nn.Module with {', '.join(_METHODS)}"
                + (f"; it lacks {', '.join(lacking)}" if lacking else "")
            )
        if not hasattr(model_class, "settle_context"):
            model_class.settle_context = _nothing_to_settle  # type: ignore[attr-defined]
        setattr(model_class, _MARK, architectures)
        return model_class

    return mark


def _nothing_to_settle(model: Any, max_model_len: int) -> None:
    """The longest context changes nothing in most models."""


def named_model_class(reference: str, architectures: Sequence[str]) -> type[RegisteredModel]:
    """The class that `module:Class` leads to.

    Args:
        reference: as the user wrote it.
        architectures: what the checkpoint says that it is.

    Raises:
        InvalidConfigError: there is no such class, it is not registered, or it does not run this checkpoint.
    """
    module_name, _, class_name = reference.partition(":")
    try:
        model_class: type[RegisteredModel] = getattr(importlib.import_module(module_name), class_name)
        runs: tuple[str, ...] = getattr(model_class, _MARK)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidConfigError(
            f"model_impl {reference!r} cannot be loaded: {error}. It must be module:Class, the class marked with "
            "@register_model.",
            field="model_impl",
        ) from error
    if not set(runs) & set(architectures):
        raise InvalidConfigError(
            f"model_impl {reference!r} is registered for {', '.join(runs)}, but this checkpoint says "
            f"architectures={list(architectures)!r}",
            field="model_impl",
        )
    return model_class


def installed_model_class(architectures: Sequence[str]) -> type[RegisteredModel] | None:
    """The class that an installed package brings for one of these architectures, or None."""
    for architecture in architectures:
        for entry_point in entry_points(group=ENTRY_POINTS, name=architecture):
            return named_model_class(entry_point.value, architectures)
    return None
