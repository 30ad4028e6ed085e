"""Random noise that depends on nothing but what it is for: (seed, sample index, position, token id).

Where it stands: the sampler adds it to the logits. There is no generator and no state, so a draw does not depend on
what else is in the batch, on the order of requests, on chunking, preemption or speculation; and any of them can be
repeated.

**Gumbel-max.** If g are independent standard Gumbel numbers, argmax(logit + g) is a draw from softmax(logit) (Gumbel
1954; Maddison et al. 2014, "A* Sampling"). So sampling is an argmax, and a small rounding difference in a logit hardly
ever changes the token.

**The recipe**, in unsigned 64-bit arithmetic with wrap-around; a kernel that follows it gives the same bits:

    mix(z):   z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
              z = (z ^ (z >> 27)) * 0x94D049BB133111EB
              z ^ (z >> 31)                                  the finaliser of SplitMix64 (Steele et al. 2014)
    key     = mix(mix(mix(seed + G) + sample_index + G) + position + G)         G = 0x9E3779B97F4A7C15
    bits    = mix(key + (token_id + 1) * G) >> 32            SplitMix64, started at key: its (token_id + 1)-th number
    v       = min((bits + 0.5) * 2^-32, 1 - 2^-24)           uniform in (0, 1)
    g       = -log(-log1p(-v))                               float32; finite for every v

In vLLM: `apply_temperature` and the exponential race in `vllm/v1/sample/ops/topk_topp_sampler.py`, which draws from
PyTorch generators.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """The same 64 bits as a signed number, which is what PyTorch's int64 holds."""
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST_MULTIPLIER = _signed(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER = _signed(0x94D049BB133111EB)
_LARGEST_UNIFORM = 1.0 - 2.0**-24


def gumbel_noise(seeds: Tensor, sample_index: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise.

    Args:
        seeds, sample_index, positions: [D] int64, one a draw.
        token_ids: [D, K] int64, or [1, K] for the same tokens in every draw.

    Returns:
        [D, K] float32, finite.
    """
    bits = random_bits(seeds, sample_index, positions, token_ids)
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def random_bits(seeds: Tensor, sample_index: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The 32 random bits behind each number: [D, K] int64 in [0, 2**32). Arguments as `gumbel_noise`."""
    key = _mix(seeds + _GOLDEN)
    key = _mix(key + sample_index + _GOLDEN)
    key = _mix(key + positions + _GOLDEN)
    bits = _mix(key[:, None] + (token_ids + 1) * _GOLDEN)
    return _shift_right(bits, 32, out=bits)


def _mix(z: Tensor) -> Tensor:
    """The finaliser, in place. A whole vocabulary goes through it: one buffer instead of ten makes it twice as fast."""
    buffer = torch.empty_like(z)
    z.bitwise_xor_(_shift_right(z, 30, out=buffer)).mul_(_FIRST_MULTIPLIER)
    z.bitwise_xor_(_shift_right(z, 27, out=buffer)).mul_(_SECOND_MULTIPLIER)
    return z.bitwise_xor_(_shift_right(z, 31, out=buffer))


def _shift_right(z: Tensor, count: int, *, out: Tensor) -> Tensor:
    """Logical shift: PyTorch's own copies the sign bit into the places that become free."""
    return torch.bitwise_right_shift(z, count, out=out).bitwise_and_((1 << (64 - count)) - 1)
