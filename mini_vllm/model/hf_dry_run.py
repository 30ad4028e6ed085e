"""Looking at a model of the transformers library before it runs: is it a stack of attention layers and nothing else?

Where it stands: called by `hf_backend.py` at load, the weights in place. Four tokens go through the model a few times:

    probe           which layers attend, with which heads, scale and window; which part of the model is its body
    check_halves    body and head apart give the logits of the whole model
    check_rows      in another order, at positions far apart, every token has the same hidden state as before: tokens
                    meet in attention alone, and their places come from `position_ids`. A convolution, a recurrent
                    state or a count of rows would show here.

In all of them a stand-in takes the place of attention that lets each token see itself alone.

What always holds: a model that does not fit is refused here, by what it did, whatever its name.

In vLLM: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mini_vllm.errors import UnsupportedModelError
from mini_vllm.model.hf_attention import AttentionPort, LayerCall, LayerProbe, attend_to_self
from mini_vllm.model.language_model import LanguageModel

_TOKENS = (1, 5, 3, 4)
_OTHER_ORDER = (3, 1, 0, 2)
# How far two runs may differ, as a share of the largest number: rounding, which differs with the row of a product.
_TOLERANCES = {torch.float32: 1e-4}
_TOLERANCE_16_BIT = 0.05


@dataclass(frozen=True)
class Probed:
    """What was seen of a model.

    Args:
        body: the module that gives the hidden states.
        calls: its attention layers, in order.
        logits: [4, vocab_size] of the four tokens at positions 0 to 3.
    """

    body: nn.Module
    calls: Sequence[LayerCall]
    logits: Tensor


@torch.inference_mode()
def probe(causal_lm: Any, port: AttentionPort, dtype: torch.dtype) -> Probed:
    """Run the model once and look.

    Raises:
        UnsupportedModelError: it fails on tokens without a mask, or does not attend once in every layer.
    """
    name, device = type(causal_lm).__name__, causal_lm.device
    bodies: list[nn.Module] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, _: bodies.append(module))
        for module in causal_lm.modules()
        if module is not causal_lm
    ]
    port.handler = layers = LayerProbe(dtype)
    try:
        output = causal_lm(
            input_ids=torch.tensor([_TOKENS], device=device),
            position_ids=torch.arange(len(_TOKENS), device=device)[None],
            use_cache=False,
        )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: {error}") from error
    except Exception as error:  # what a class raises when it is called in a way it does not know can be anything
        raise UnsupportedModelError(
            f"{name} does not run on flat tokens with position_ids ({type(error).__name__}: {error})."
        ) from error
    finally:
        port.handler = None
        for hook in hooks:
            hook.remove()
    _check_layers(name, causal_lm.config, layers.calls)
    return Probed(bodies[0], layers.calls, output.logits[0].float())


def _check_layers(name: str, config: Any, calls: Sequence[LayerCall]) -> None:
    if not calls:
        raise UnsupportedModelError(
            f"{name} does not attend through the attention interface of the transformers library, so its attention "
            "cannot be replaced (state-space and recurrent models, and classes from before that interface)."
        )
    if len({call.module for call in calls}) != len(calls):
        raise UnsupportedModelError(f"{name} calls an attention layer more than once in a forward.")
    num_layers = getattr(config, "num_hidden_layers", None)
    if len(calls) != num_layers:
        raise UnsupportedModelError(
            f"{name} has {num_layers} layers, of which {len(calls)} attend over keys and values; models "
            "with other layers (state-space, linear attention ...) do not run here."
        )


@torch.inference_mode()
def check_halves(name: str, model: LanguageModel, probed: Probed, dtype: torch.dtype) -> None:
    """Raises: UnsupportedModelError: body, then head, do not give what the whole model gave."""
    device = probed.logits.device
    hidden = _run(name, model, torch.tensor(_TOKENS, device=device), torch.arange(len(_TOKENS), device=device))
    reason = "the logits differ"
    try:
        if _are_close(model.logits(hidden), probed.logits, dtype):
            return
    except Exception as error:  # as in `probe`
        reason = f"{type(error).__name__}: {error}"
    raise UnsupportedModelError(f"{name} cannot be taken apart into body and head ({reason}).")


@torch.inference_mode()
def check_rows(name: str, model: LanguageModel, max_position: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raises: UnsupportedModelError: a token's hidden state depends on its row, or on the tokens beside it."""
    tokens = torch.tensor(_TOKENS, device=device)
    positions = torch.tensor([0, 1, max_position // 2, max_position - 1], device=device)
    order = torch.tensor(_OTHER_ORDER, device=device)
    before = _run(name, model, tokens, positions)
    after = _run(name, model, tokens[order], positions[order])
    if not _are_close(after, before[order], dtype):
        raise UnsupportedModelError(
            f"{name} lets tokens meet outside of attention (a convolution, a recurrent state ...), or does not take "
            "their places from position_ids. It cannot run on the tokens of several sequences at once."
        )


def _run(name: str, model: LanguageModel, tokens: Tensor, positions: Tensor) -> Tensor:
    try:
        return model(tokens, positions, lambda layer, query, key, value: attend_to_self(query, key, value))
    except Exception as error:  # as in `probe`
        raise UnsupportedModelError(
            f"{name} does not run on tokens of several sequences ({type(error).__name__}: {error})."
        ) from error


def _are_close(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    if one.shape != other.shape or not bool(other.isfinite().all()):
        return False
    allowed = _TOLERANCES.get(dtype, _TOLERANCE_16_BIT) * float(other.abs().max())
    return float((one - other).abs().max()) <= allowed
