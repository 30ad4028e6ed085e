"""The rotary embedding of a GGUF file, said as `rope_theta` and `rope_scaling` of a Hugging Face configuration.

Where it stands: a part of `gguf_metadata.py`; `rope_config.py` reads what comes out of here.

    rope.freq_base                      rope_theta
    rope.scaling.type none | linear | yarn, factor, original_context_length ...     rope_scaling
    tensor rope_freqs.weight            rope_scaling of type llama3

Converters of Llama 3 write no scaling type. They write the tensor, with what each pair's frequency is divided by: 1 for
fast pairs, `factor` for slow ones, and between. The numbers that it was made from are found again by making it: all
Llama 3 models have low_freq_factor 1, high_freq_factor 4 and an original context of 8192, and the factor is the
tensor's largest value. A tensor that does not come out the same is refused.

What always holds: what cannot be said exactly is refused, never approximated.

In vLLM: `vllm/model_executor/layers/rotary_embedding/llama3_rope.py` has the same formula.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

from mini_vllm.errors import UnsupportedModelError
from mini_vllm.store.gguf_file import GGUFFile

if TYPE_CHECKING:
    from mini_vllm.model.gguf_metadata import GGUFMetadata

FACTORS_NAME = "rope_freqs.weight"
_SCALING = "rope.scaling."
# Multipliers on top of the formulas, which must be neutral.
_NEUTRAL = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0}
ROPE_KEYS = frozenset(
    {"rope.dimension_count", "rope.freq_base", "rope.scale_linear"}
    | {f"{_SCALING}{key}" for key in ("type", "factor", "original_context_length", "finetuned")}
    | {f"{_SCALING}{key}" for key in ("yarn_beta_fast", "yarn_beta_slow", *_NEUTRAL)}
)

_DEFAULT_THETA = 10_000.0  # what llama.cpp takes when the file does not say
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192
_TOLERANCE = 1e-4  # relative; the tensor is float32 and its makers computed in float32 or in float64


def rope_config(metadata: GGUFMetadata, head_dim: int) -> dict[str, Any]:
    """`rope_theta` and, if there is scaling, `rope_scaling`.

    Args:
        metadata: of the file.
        head_dim: width of one head.

    Raises:
        UnsupportedModelError: a scaling type, a multiplier or factors that are not implemented.
    """
    turned = metadata.integer("rope.dimension_count", head_dim)
    if turned != head_dim:
        raise UnsupportedModelError(
            f"{metadata.file.path} turns {turned} of {head_dim} dimensions of a head; a rotary embedding of a part of "
            "the head is not implemented."
        )
    theta = metadata.number("rope.freq_base", _DEFAULT_THETA)
    scaling = _scaling(metadata)
    factors = _frequency_factors(metadata.file)
    if any(factor != 1 for factor in factors):
        if scaling is not None:
            raise UnsupportedModelError(f"{metadata.file.path} has both {FACTORS_NAME} and rope scaling {scaling}.")
        scaling = _llama3(metadata, theta, head_dim, factors)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _frequency_factors(file: GGUFFile) -> list[float]:
    """The values of `rope_freqs.weight`, [head_dim / 2]; empty if the file has no such tensor."""
    tensor = file.tensors.get(FACTORS_NAME)
    if tensor is None:
        return []
    if tensor.type_name != "F32":
        raise UnsupportedModelError(f"The tensor {FACTORS_NAME} in {file.path} is {tensor.type_name}, not F32.")
    with file.path.open("rb") as opened:
        opened.seek(tensor.offset)
        return [value for (value,) in struct.iter_unpack("<f", opened.read(tensor.num_bytes))]


def _scaling(metadata: GGUFMetadata) -> dict[str, Any] | None:
    """What the metadata say; None without scaling."""
    for key, neutral in _NEUTRAL.items():
        value = metadata.number(f"{_SCALING}{key}", neutral)
        if value != neutral:
            raise UnsupportedModelError(
                f"{metadata.architecture}.{_SCALING}{key}={value} in {metadata.file.path} is not implemented; "
                f"it must be {neutral}."
            )
    older = metadata.number("rope.scale_linear", 1.0)  # how linear scaling was written in 2023
    kind = metadata.get(f"{_SCALING}type")
    if kind is None:
        kind = "linear" if older != 1 else "none"
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{metadata.architecture}.{_SCALING}type={kind!r} in {metadata.file.path} is not implemented; "
            "supported: none, linear, yarn."
        )
    factor = metadata.number(f"{_SCALING}factor", older)
    original = metadata.integer(f"{_SCALING}original_context_length", metadata.integer("context_length"))
    scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    if kind == "yarn":
        for name in ("beta_fast", "beta_slow"):
            if metadata.get(f"{_SCALING}yarn_{name}") is not None:
                scaling[name] = metadata.number(f"{_SCALING}yarn_{name}")
    return scaling


def _llama3(metadata: GGUFMetadata, theta: float, head_dim: int, factors: list[float]) -> dict[str, Any]:
    expected = llama3_factors(theta, head_dim, max(factors))
    # Said so that a NaN, which compares to nothing, does not pass.
    if len(factors) != len(expected) or not all(
        abs(found - made) <= _TOLERANCE * made for found, made in zip(factors, expected, strict=True)
    ):
        raise UnsupportedModelError(
            f"The tensor {FACTORS_NAME} in {metadata.file.path} is not that of Llama 3 (low_freq_factor "
            f"{_LLAMA3_LOW}, high_freq_factor {_LLAMA3_HIGH}, original context {_LLAMA3_ORIGINAL}); other frequency "
            "factors are not implemented."
        )
    return {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }


def llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
    """What Llama 3 divides the frequency of each pair by, [head_dim / 2]."""
    factors = []
    for pair in range(head_dim // 2):
        frequency = theta ** (-2 * pair / head_dim)
        turns = _LLAMA3_ORIGINAL * frequency / (2 * math.pi)  # full turns within the original context
        keep = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
        keep = min(max(keep, 0.0), 1.0)
        factors.append(1 / ((1 - keep) / factor + keep))
    return factors
