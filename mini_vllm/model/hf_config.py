"""Reading `config.json` strictly: typed values, and refusals that name the key.

Where it stands: between the raw JSON and `architectures.py`, which asks for the values of one family.

What always holds: a null is the same as an absent key; a value of the wrong type stops the start; a key that would
change the numbers, and that the family at hand does not read, may only have the value that changes nothing.

In vLLM: the config classes of the transformers library do this part, less strictly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mini_vllm.errors import ModelLoadError, UnsupportedModelError

# Keys of Hugging Face configurations that change what a model computes, each with the values under which it changes
# nothing. A family reads those that it implements; all others must be neutral. None stands for absent.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "attention_chunk_size": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "lm_head_bias": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1,),
    "qk_layernorm": (False,),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "reorder_and_upcast_attn": (False,),
    "residual_multiplier": (1,),
    "rope_local_base_freq": (),
    "rope_interleaved": (False,),
    "rotary_dim": (),
    "rotary_pct": (1,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "sliding_window": (),
    "use_alibi": (False,),
    "use_bidirectional_attention": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
    "v_head_dim": (),
}


class HFConfig:
    """A parsed configuration with typed look-ups.

    Args:
        raw: the JSON object.
        where: how messages name it: "config.json", or "rope_scaling in config.json" for an object inside.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        self.raw = raw
        self.where = where

    def has(self, key: str) -> bool:
        """Whether the key is there with a value other than null."""
        return self.raw.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number of at least `minimum`; required when there is no default."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ModelLoadError(f"{key} in {self.where} must be a whole number of at least {minimum}, not {value!r}.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number; required when there is no default."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ModelLoadError(f"{key} in {self.where} must be a positive number, not {value!r}.")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive, finite numbers."""
        values = self._value(key, None)
        if not isinstance(values, list):
            raise ModelLoadError(f"{key} in {self.where} must be a list of numbers, not {values!r}.")
        entries = HFConfig({f"{key}[{i}]": value for i, value in enumerate(values)}, self.where)
        return tuple(entries.number(name) for name in entries.raw)

    def optional_number(self, key: str, default: float | None) -> float | None:
        """A positive number, or None where the configuration says null; `default` where it says nothing."""
        if key in self.raw and self.raw[key] is None:
            return None
        return None if default is None and not self.has(key) else self.number(key, default)

    def renamed(self, names: Mapping[str, str]) -> HFConfig:
        """The same configuration with some keys under the names that other families use, unless those are there."""
        values = {ours: self.raw[theirs] for theirs, ours in names.items() if self.has(theirs) and not self.has(ours)}
        return HFConfig({**{key: self.raw[key] for key in self.raw if key not in names}, **values}, self.where)

    def with_values(self, **values: Any) -> HFConfig:
        """The same configuration with other values under some keys."""
        return HFConfig({**self.raw, **values}, self.where)

    def boolean(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise ModelLoadError(f"{key} in {self.where} must be true or false, not {value!r}.")
        return value

    def mapping(self, key: str) -> HFConfig:
        """The object under `key`; empty when absent."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise ModelLoadError(f"{key} in {self.where} must be an object, not {value!r}.")
        return HFConfig(value, where=f"{key} in {self.where}")

    def token_ids(self, key: str) -> frozenset[int]:
        """One token id or a list of them; empty when absent."""
        value = self._value(key, [])
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise ModelLoadError(f"{key} in {self.where} must hold token ids, not {value!r}.")
        return frozenset(ids)

    def dtype(self) -> str | None:
        """What the checkpoint was saved in: `dtype`, or `torch_dtype` as it was called before transformers 5."""
        dtype = self.raw.get("dtype") or self.raw.get("torch_dtype")
        return None if dtype is None else str(dtype).removeprefix("torch.")

    def only(self, key: str, supported: tuple[str, ...], default: str) -> str:
        """One of the names that are implemented.

        Raises:
            UnsupportedModelError: any other value.
        """
        value = self._value(key, default)
        if value not in supported:
            raise UnsupportedModelError(
                f"{key}={value!r} in {self.where} is not implemented; supported: {', '.join(supported)}."
            )
        return str(value)

    def refuse_unread(self, read: frozenset[str]) -> None:
        """Refuse every key that changes the numbers and that the family does not read.

        Args:
            read: the keys of `_NEUTRAL` that the family reads itself.

        Raises:
            UnsupportedModelError: such a key has a value that is not neutral.
        """
        for key, neutral in _NEUTRAL.items():
            if key in read or not self.has(key) or self.raw[key] in neutral:
                continue
            allowed = " or ".join(["absent", *(repr(value) for value in neutral)])
            raise UnsupportedModelError(
                f"{key}={self.raw[key]!r} in {self.where} would change what the model computes and is not implemented "
                f"for this architecture; it must be {allowed}."
            )

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is not None:
            return value
        if default is None:
            raise ModelLoadError(f"{self.where} has no {key}, which this model needs. Is the download complete?")
        return default
