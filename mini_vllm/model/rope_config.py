"""Reading the rotary embedding's part of `config.json`, in both of its spellings.

Where it stands: `architectures.py` asks here for the `RopeConfig` and for how long a context it gives.

    transformers 4   "rope_theta": 500000.0, "rope_scaling": {"type" or "rope_type": "llama3", "factor": 8.0, ...}
    transformers 5   "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, ...}

What always holds: every key in these objects is known, or the model is refused. Scaling that was overlooked gives text
that reads well for a page and then falls apart, which no short test sees.

In vLLM: `vllm/model_executor/layers/rotary_embedding/__init__.py` (`get_rope`) and `_get_and_verify_max_len`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import cast, get_args

from mini_vllm.errors import ModelLoadError, UnsupportedModelError
from mini_vllm.model.config import RopeConfig, RopeType
from mini_vllm.model.hf_config import HFConfig

_ROPE_TYPES: tuple[str, ...] = get_args(RopeType)

# "finetuned" is a remark in YaRN's own checkpoints and changes nothing.
_KNOWN_KEYS = frozenset(
    {"type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"}
    | {"low_freq_factor", "high_freq_factor"}
    | {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate", "finetuned"}
)
_LONGROPE_KEYS = frozenset({"short_factor", "long_factor"})


def read_rope(
    config: HFConfig,
    default_theta: float = RopeConfig.theta,
    partial: float | None = None,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> RopeConfig:
    """The rotary embedding that the configuration asks for.

    Args:
        config: the parsed `config.json`.
        default_theta: the base where the configuration has none.
        partial: what part of a head turns where the configuration has none; None: a family that always turns all.
        aliases: names of rope types that mean another one in this family.

    Raises:
        UnsupportedModelError: an unknown rope type, or an unknown key beside it.
        ModelLoadError: a missing or impossible number, or two spellings that disagree.
    """
    reader = _RopeReader(config, default_theta, partial, aliases)
    spellings = [key for key in ("rope_parameters", "rope_scaling") if config.has(key)]
    ropes = [reader.read(config.mapping(key)) for key in spellings]
    if not ropes:
        return reader.read(config.mapping("rope_parameters"))
    if ropes[0] != ropes[-1]:
        raise ModelLoadError(
            f"rope_parameters and rope_scaling in {config.where} disagree: {ropes[0]} and {ropes[-1]}. Remove one."
        )
    return ropes[0]


def context_length(rope: RopeConfig, max_position: int) -> tuple[int, tuple[str, ...]]:
    """The longest context that the model is meant for, in tokens, and what the log should say of it.

    Linear and yarn scaling count from the context before the stretch. "dynamic" changes all angles whenever the text
    grows, which keys that are already in a cache cannot follow; up to the original length it is plain RoPE.

    Args:
        rope: the rotary embedding.
        max_position: `max_position_embeddings` of the configuration.
    """
    if rope.rope_type == "linear":
        length = int(max_position * rope.factor)
        return length, (f"linear rope scaling stretches the context from {max_position} to {length} tokens",)
    if rope.rope_type == "yarn":
        length = max(max_position, int(rope.original_max_position * rope.factor))
        return length, (f"yarn stretches the context from {rope.original_max_position} to {length} tokens",)
    if rope.rope_type == "dynamic":
        length = min(max_position, rope.original_max_position)
        note = (
            "dynamic rope scaling depends on the current length, which a KV cache cannot follow: the context is capped "
            f"at the original {length} tokens, where it equals plain RoPE"
        )
        return length, (note,)
    if rope.rope_type == "longrope":
        note = (
            "longrope has two sets of rotary frequencies and a KV cache can follow only one: those for long texts if "
            f"max_model_len is over {rope.original_max_position} tokens, those for short ones if not"
        )
        return max_position, (note,)
    return max_position, ()


class _RopeReader:
    """Reads one object; what it does not hold is looked up beside it. The arguments are those of `read_rope`."""

    def __init__(
        self, config: HFConfig, default_theta: float, partial: float | None, aliases: Mapping[str, str]
    ) -> None:
        self.config, self.default_theta, self.partial, self.aliases = config, default_theta, partial, aliases

    def read(self, rope: HFConfig) -> RopeConfig:
        rope_type = self._type(rope)
        known = _KNOWN_KEYS | (_LONGROPE_KEYS if rope_type == "longrope" else frozenset())
        unknown = sorted(key for key in rope.raw if key not in known)
        if unknown:
            raise UnsupportedModelError(
                f"{rope.where} holds {', '.join(unknown)}, which is not implemented; "
                f"supported: {', '.join(sorted(known))}."
            )
        theta = rope.number("rope_theta", self.config.number("rope_theta", self.default_theta))
        if theta <= 1:
            raise ModelLoadError(
                f"rope_theta={theta} of {self.config.where} must be greater than 1, or no pair turns slower."
            )
        return replace(self._read_type(rope, rope_type, theta), partial=self._part(rope))

    def _type(self, rope: HFConfig) -> RopeType:
        """`rope_type` or the older `type`; both only when they agree."""
        supported = (*_ROPE_TYPES, *self.aliases)
        rope_type = rope.only("rope_type", supported, default="default")
        older = rope.only("type", supported, default=rope_type)
        if rope.has("rope_type") and older != rope_type:
            raise ModelLoadError(f"rope_type={rope_type!r} and type={older!r} in {rope.where} disagree. Remove one.")
        return cast(RopeType, self.aliases.get(older, older))

    def _part(self, rope: HFConfig) -> float:
        """`partial_rotary_factor`, in the object or beside it."""
        key = "partial_rotary_factor"
        part = rope.number(key, self.config.number(key, self.partial or 1.0))
        if part != 1 and self.partial is None:
            raise UnsupportedModelError(
                f"{key}={part!r} in {rope.where} is not implemented for this architecture; it must be absent or 1.0."
            )
        if part > 1:
            raise ModelLoadError(f"{key}={part!r} in {rope.where} must be at most 1.")
        return part

    def _read_type(self, rope: HFConfig, rope_type: RopeType, theta: float) -> RopeConfig:
        if rope_type == "default":
            return RopeConfig(theta=theta)
        original = _read_original_length(self.config, rope)
        if rope_type == "yarn":
            return _read_yarn(self.config, rope, theta, original)
        if rope_type == "llama3":
            return _read_llama3(rope, theta, original)
        if rope_type == "longrope":
            return _read_longrope(self.config, rope, theta, original)
        return RopeConfig(rope_type, theta, rope.number("factor"), original)


def _read_original_length(config: HFConfig, rope: HFConfig) -> int:
    """Beside the rope object if it stands there (as transformers reads it), else in it, else the model's context."""
    key = "original_max_position_embeddings"
    if config.has(key):
        return config.integer(key)
    return rope.integer(key, config.integer("max_position_embeddings"))


def _read_llama3(rope: HFConfig, theta: float, original: int) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise ModelLoadError(f"low_freq_factor={low} in {rope.where} must be less than high_freq_factor={high}.")
    factor = rope.number("factor")
    return RopeConfig("llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high)


def _read_yarn(config: HFConfig, rope: HFConfig, theta: float, original: int) -> RopeConfig:
    factor = rope.number("factor", config.integer("max_position_embeddings") / original)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=rope.number("beta_fast", RopeConfig.beta_fast),
        beta_slow=rope.number("beta_slow", RopeConfig.beta_slow),
        truncate=rope.boolean("truncate", RopeConfig.truncate),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _yarn_attention_factor(rope: HFConfig, factor: float) -> float:
    """Longer contexts flatten the softmax; YaRN sharpens it by 0.1 ln(factor) + 1 (section 3.4 of the paper)."""

    def sharpen(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    # DeepSeek's checkpoints state two weights and mean their ratio; a zero or missing one means that neither counts.
    if rope.raw.get("mscale") and rope.raw.get("mscale_all_dim"):
        return sharpen(rope.number("mscale")) / sharpen(rope.number("mscale_all_dim"))
    return sharpen(1.0)


def _read_longrope(config: HFConfig, rope: HFConfig, theta: float, original: int) -> RopeConfig:
    """A list of factors for short texts and one for long ones; scores are sharpened by sqrt(1 + ln(s) / ln(original)).

    s is how many times longer the context has become.
    """
    factor = rope.number("factor", config.integer("max_position_embeddings") / original)
    sharpening = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(
        "longrope",
        theta,
        factor,
        original,
        attention_factor=rope.number("attention_factor", sharpening),
        short_factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
    )
