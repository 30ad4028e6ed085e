"""Loading a model of one's own: a class marked with `register_model`, filled from the checkpoint.

Where it stands: beside `hf_backend.py`; the loader takes it for `model_impl="module:Class"` and for classes that
installed packages bring.

What always holds: every parameter comes from the checkpoint, as for native models, and nothing is in memory twice.

In vLLM: `load_weights` of each model, and `AutoWeightsLoader` in `vllm/model_executor/models/utils.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from mini_vllm.config import LoadFormat
from mini_vllm.errors import ModelLoadError
from mini_vllm.model.hf_config import HFConfig
from mini_vllm.model.language_model import LanguageModel, ModelSummary
from mini_vllm.model.registry import RegisteredModel
from mini_vllm.model.safetensors_source import SafetensorsSource
from mini_vllm.model.transformer import init_random_weights
from mini_vllm.model.weight_map import WeightSpec
from mini_vllm.model.weight_source import check_fit, read_parameters


def load_registered_model(
    model_class: type[RegisteredModel],
    directory: Path,
    raw: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: str,
    load_format: LoadFormat,
) -> tuple[LanguageModel, ModelSummary]:
    """Build the class from `config.json` and fill it.

    Args:
        model_class: marked with `register_model`.
        directory: of the checkpoint: config.json and safetensors.
        raw: the parsed config.json.
        dtype, device: of the model.
        load_format: "auto" reads the weights, "dummy" draws them.

    Raises:
        ModelLoadError: a tensor is missing or of the wrong shape, or a table of the class is on no device.
    """
    config = HFConfig(raw)
    summary = ModelSummary(
        architecture=model_class.__name__,
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=config.integer("max_position_embeddings"),
        eos_token_ids=config.token_ids("eos_token_id"),
    )
    is_dummy = load_format == "dummy"
    model = model_class(raw, dtype=dtype, device=device if is_dummy else "meta")
    module = cast(nn.Module, model)
    if is_dummy:
        with torch.no_grad():
            init_random_weights(module)
    else:
        specs = _weight_specs(module)
        with closing(SafetensorsSource(directory)) as source:
            check_fit(source, specs, ignored=lambda name: False)
            state = {name: parameter.to(device) for name, parameter in read_parameters(source, specs, dtype)}
        module.load_state_dict(state, strict=False, assign=True)
    _check_complete(module)
    module.to(device).eval().requires_grad_(False)
    return model, summary


def _weight_specs(module: nn.Module) -> list[WeightSpec]:
    """Where every parameter comes from: what the class says, else the tensor of the same name."""
    own_map: Callable[[], list[WeightSpec]] | None = getattr(module, "weight_map", None)
    if own_map is not None:
        return own_map()
    return [WeightSpec(name, (name,), (tuple(parameter.shape),)) for name, parameter in module.named_parameters()]


def _check_complete(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type == "meta":
            raise ModelLoadError(
                f"{name} of {type(module).__name__} was not filled from the checkpoint: a parameter needs an entry in "
                'weight_map, and a table that is computed must be made with device="cpu".'
            )
