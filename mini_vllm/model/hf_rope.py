"""Rotary embeddings of the transformers library that depend on the length of the text, settled at load.

Where it stands: beside `hf_backend.py`. Two kinds choose their frequencies at each forward by the longest text in it,
and keys that lie in a cache cannot follow. As for native models (`rope_config.py`):

    dynamic     within the context of the first training it is plain RoPE: the longest context is capped there
    longrope    the long factors where the engine's longest context goes beyond that of the first training

In vLLM: `vllm/model_executor/layers/rotary_embedding/`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mini_vllm.errors import UnsupportedModelError

_SETTLED = "longrope, settled"  # a name for which the library does not choose anew


def context_length(config: Any) -> tuple[int, tuple[str, ...]]:
    """The longest context in tokens, with notes for the log.

    Args:
        config: the library's configuration of the model.

    Raises:
        UnsupportedModelError: it does not say.
    """
    length = getattr(config, "max_position_embeddings", None)
    if isinstance(length, bool) or not isinstance(length, int) or length < 2:
        raise UnsupportedModelError(
            f"{type(config).__name__} has max_position_embeddings={length!r}, so its longest context is not known."
        )
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in (parameters, *by_layer_type):
        original = rope.get("original_max_position_embeddings") or length
        if rope.get("rope_type") == "dynamic" or (rope.get("rope_type") == "longrope" and rope in by_layer_type):
            capped = min(length, original)
            return capped, (f"RoPE {rope['rope_type']} follows the length of the text: the context is {capped} tokens",)
        if rope.get("rope_type") == "longrope":
            return length, (
                f"RoPE longrope has two sets of factors: the short ones up to max_model_len {original}, else the long",
            )
    return length, ()


@torch.no_grad()
def settle_longrope(model: nn.Module, max_model_len: int) -> None:
    """Give every longrope embedding of a model its factors, and take the choice from it.

    Args:
        model: of the library.
        max_model_len: the longest context that the engine allows, in tokens.
    """
    for module in model.modules():
        rotary: Any = module
        if getattr(rotary, "rope_type", None) not in ("longrope", _SETTLED):
            continue
        original = rotary.config.rope_parameters["original_max_position_embeddings"]
        inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](
            rotary.config, rotary.inv_freq.device, seq_len=original + (1 if max_model_len > original else 0)
        )
        rotary.inv_freq.copy_(inv_freq)
        rotary.rope_type = _SETTLED
