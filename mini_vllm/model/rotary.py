"""The rotary position embedding: queries and keys are turned by angles that grow with the position.

Where it stands: the transformer asks for cos and sin once a step, and every layer turns its queries and keys by them.

Dimension i of a head is paired with dimension i + head_dim / 2 (the half-split layout of Hugging Face checkpoints), and
pair i of a token at position p is turned by the angle p * inv_freq[i]::

    head_dim 8:   x0 x1 x2 x3 | x4 x5 x6 x7        (x0, x4) turns fastest, (x3, x7) slowest
                   '-----------'  pair 0

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
        head_dim: width of one head, even.
    """

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self.attention_factor = config.attention_factor
        # A plain attribute, not a buffer: model.to(bfloat16) must not round the frequencies, and a model that is built
        # on the meta device must have them all the same.
        self.inv_freq = inverse_frequencies(config, head_dim)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cos and sin of every pair's angle.

        Args:
            positions: [T] int64.
            dtype: the dtype of the queries and keys.

        Returns:
            cos and sin, each [T, 1, head_dim / 2]; the 1 stands for the heads, which all turn alike.
        """
        if self.inv_freq.device != positions.device:
            self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions.to(torch.float32)[:, None, None] * self.inv_freq
        return (angles.cos() * self.attention_factor).to(dtype), (angles.sin() * self.attention_factor).to(dtype)


class ApplyRotary(nn.Module):
    """Turns queries and keys: (a, b) -> (a cos - b sin, b cos + a sin) for every pair."""

    def forward(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Args: query [T, num_heads, head_dim], key [T, num_kv_heads, head_dim], cos and sin [T, 1, head_dim / 2]."""
        return _turn(query, cos, sin), _turn(key, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """How far each pair turns from one position to the next, in radians: [head_dim / 2] float32 on the CPU.

    The order of operations is that of the transformers library, so that the result is equal to the bit: at position
    20,000 an error in the last place of a frequency is an error in the third place of the angle.
    """
    # The device is named because the caller may build the model under torch.device("meta").
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    periods = config.theta**exponents  # positions that a pair takes to turn by one radian
    if config.rope_type == "linear":
        return 1.0 / periods / config.factor
    if config.rope_type == "llama3":
        return _llama3(1.0 / periods, config)
    if config.rope_type == "yarn":
        return _yarn(periods, config, head_dim)
    return 1.0 / periods  # "default", and "dynamic" within the original context, which the configuration holds it to


def _llama3(plain: Tensor, config: RopeConfig) -> Tensor:
    """Slow pairs are slowed by `factor`, fast ones are kept, those between are blended (Llama 3.1's scheme)."""
    turns = config.original_max_position / (2 * math.pi / plain)  # full turns within the original context
    keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * plain / config.factor + keep * plain


def _yarn(periods: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    """As llama3, but the blend is linear in the pair's index, not in its frequency (arXiv:2309.00071, section 3.2)."""

    def pair_that_turns(times: float) -> float:
        """The index, not rounded, of the pair that turns so many times within the original context."""
        return head_dim * math.log(config.original_max_position / (times * 2 * math.pi)) / (2 * math.log(config.theta))

    first, last = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The upper limit counts dimensions, not pairs: so it is in the authors' code, and models are trained with it.
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - first) / (last - first)
    keep = 1 - ramp.clamp(0, 1)
    return 1.0 / (config.factor * periods) * (1 - keep) + 1.0 / periods * keep
