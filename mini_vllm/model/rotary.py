"""The rotary position embedding: queries and keys are turned by angles that grow with the position.

Where it stands: the transformer asks for cos and sin once a step, and every layer turns its queries and keys by them.

Dimension i of a head is paired with dimension i + head_dim / 2 (the half-split layout of most checkpoints), and pair i
of a token at position p is turned by the angle p * inv_freq[i]::

    half-split    x0 x1 x2 x3 | x4 x5 x6 x7        (x0, x4) turns fastest, (x3, x7) slowest
                   '-----------'  pair 0
    interleaved   x0 x1  x2 x3  x4 x5  x6 x7       (x0, x1) turns fastest
    partial 1/2   x0 x1 | x2 x3    x4 x5 x6 x7     the last four do not turn at all

The product of a query at p and a key at q then depends on p - q only.

What always holds: angles are computed in float32 in every model dtype. In bfloat16 position 257 would already round to
256. Nothing here depends on how long a text is now, so keys in a cache stay right.

In vLLM: `vllm/model_executor/layers/rotary_embedding/`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mini_vllm.model.config import RopeConfig


class RotaryEmbedding(nn.Module):
    """Positions to cos and sin, shared by all layers of a step.

    Args:
        config: the frequencies.
        head_dim: width of one head.
        max_length: the longest context in tokens, which longrope goes by.
    """

    def __init__(self, config: RopeConfig, head_dim: int, max_length: int = 0) -> None:
        super().__init__()
        self.config, self.head_dim = config, head_dim
        self.attention_factor = config.attention_factor
        # A plain attribute, not a buffer: model.to(bfloat16) must not round the frequencies, and a model that is built
        # on the meta device must have them all the same.
        self.inv_freq = inverse_frequencies(config, head_dim, max_length)

    def settle_context(self, max_length: int) -> None:
        """Choose the frequencies for contexts of up to `max_length` tokens, before the first step."""
        self.inv_freq = inverse_frequencies(self.config, self.head_dim, max_length)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cos and sin of every pair's angle.

        Args:
            positions: [T] int64.
            dtype: the dtype of the queries and keys.

        Returns:
            cos and sin, each [T, 1, rotary_dim / 2]; the 1 stands for the heads, which all turn alike.
        """
        if self.inv_freq.device != positions.device:
            self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions.to(torch.float32)[:, None, None] * self.inv_freq
        return (angles.cos() * self.attention_factor).to(dtype), (angles.sin() * self.attention_factor).to(dtype)


class NoRotaryEmbedding(nn.Module):
    """Stands where the layers have no rotary embedding: no cos and no sin."""

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        empty = torch.empty(0, dtype=dtype, device=positions.device)
        return empty, empty


class ApplyRotary(nn.Module):
    """Turns queries and keys: (a, b) -> (a cos - b sin, b cos + a sin) for every pair."""

    def forward(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Args: query [T, num_heads, head_dim], key [T, num_kv_heads, head_dim], cos and sin [T, 1, head_dim / 2]."""
        return _turn(query, cos, sin), _turn(key, cos, sin)


class ApplyPartialRotary(nn.Module):
    """As `ApplyRotary`, for the first `rotary_dim` dimensions of each head; the others are left as they are."""

    def __init__(self, rotary_dim: int) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim

    def forward(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self._turn_first(query, cos, sin), self._turn_first(key, cos, sin)

    def _turn_first(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.cat((_turn(x[..., : self.rotary_dim], cos, sin), x[..., self.rotary_dim :]), dim=-1)


class ApplyInterleavedRotary(nn.Module):
    """As `ApplyRotary`, for pairs that lie side by side; computed in float32."""

    def forward(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self._turn_pairs(query, cos, sin), self._turn_pairs(key, cos, sin)

    def _turn_pairs(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x[..., ::2].to(torch.float32), x[..., 1::2].to(torch.float32)
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.flatten(start_dim=-2).to(x.dtype)


class LeaveUnturned(nn.Module):
    """For a layer without rotary embedding."""

    def forward(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return query, key


def build_rotary_embedding(config: RopeConfig | None, head_dim: int, max_length: int) -> nn.Module:
    """What makes cos and sin for the layers that share one configuration."""
    return NoRotaryEmbedding() if config is None else RotaryEmbedding(config, head_dim, max_length)


def build_apply_rotary(config: RopeConfig | None, head_dim: int) -> nn.Module:
    """What turns queries and keys of one layer."""
    if config is None:
        return LeaveUnturned()
    if config.interleaved:
        return ApplyInterleavedRotary()
    rotary_dim = config.rotary_dim(head_dim)
    return ApplyRotary() if rotary_dim == head_dim else ApplyPartialRotary(rotary_dim)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def inverse_frequencies(config: RopeConfig, head_dim: int, max_length: int = 0) -> Tensor:
    """How far each pair turns from one position to the next, in radians: [rotary_dim / 2] float32 on the CPU.

    The order of operations is that of the transformers library, so that the result is equal to the bit: at position
    20,000 an error in the last place of a frequency is an error in the third place of the angle.
    """
    # The device is named because the caller may build the model under torch.device("meta").
    rotary_dim = config.rotary_dim(head_dim)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    periods = config.theta**exponents  # positions that a pair takes to turn by one radian
    if config.rope_type == "linear":
        return 1.0 / periods / config.factor
    if config.rope_type == "llama3":
        return _llama3(1.0 / periods, config)
    if config.rope_type == "yarn":
        return _yarn(periods, config, rotary_dim)
    if config.rope_type == "longrope":
        # A cache cannot follow a text that outgrows the original context, so the longest one decides for all.
        factors = config.long_factors if max_length > config.original_max_position else config.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * periods)
    return 1.0 / periods  # "default", and "dynamic" within the original context, which the configuration holds it to


def _llama3(plain: Tensor, config: RopeConfig) -> Tensor:
    """Slow pairs are slowed by `factor`, fast ones are kept, those between are blended (Llama 3.1's scheme)."""
    turns = config.original_max_position / (2 * math.pi / plain)  # full turns within the original context
    keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * plain / config.factor + keep * plain


def _yarn(periods: Tensor, config: RopeConfig, rotary_dim: int) -> Tensor:
    """As llama3, but the blend is linear in the pair's index, not in its frequency (arXiv:2309.00071, section 3.2)."""

    def pair_that_turns(times: float) -> float:
        """The index, not rounded, of the pair that turns so many times within the original context."""
        return (
            rotary_dim * math.log(config.original_max_position / (times * 2 * math.pi)) / (2 * math.log(config.theta))
        )

    first, last = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The upper limit counts dimensions, not pairs: so it is in the authors' code, and models are trained with it.
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu") - first) / (last - first)
    keep = 1 - ramp.clamp(0, 1)
    return 1.0 / (config.factor * periods) * (1 - keep) + 1.0 / periods * keep
