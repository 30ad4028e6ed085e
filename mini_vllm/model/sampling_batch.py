"""`SamplingBatch`: all that the sampler must know of a step's draws, as tensors.

Where it stands: the worker builds it from the sequence table; the sampler reads it. R rows of logits, D draws; draw d
reads row `rows[d]`, so that the siblings of n may share one.

    draws    0        1         2          3
    rows     0        1         1          2          R = 3
    greedy   yes      no        no         yes
    worked            0         1                     the draws that need more than an argmax, W = 2

Most draws of most batches are plain greedy: they cost an argmax. Everything else stands in `WorkedDraws`, whose tensors
have one entry a *worked* draw, and whose rarer parts are None or empty where no draw needs them. What is computed is
decided here, from NumPy arrays, so that the sampler seldom has to wait for a device to know what comes next.

In vLLM: `vllm/v1/sample/metadata.py` (`SamplingMetadata`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenPairs:
    """Sparse entries of a [W, vocabulary] matrix. draws, token_ids: [N] int64; values: [N] float32, where there are
    any."""

    draws: Tensor
    token_ids: Tensor
    values: Tensor | None = None


@dataclass(frozen=True)
class PenaltyHistory:
    """Tokens that penalties look at, for the P worked draws that have penalties.

    Args:
        draws: [P] int64, which worked draws.
        prompt_token_ids, output_token_ids: [P, L] int64, padded with the vocabulary's size.
    """

    draws: Tensor
    prompt_token_ids: Tensor
    output_token_ids: Tensor


@dataclass(frozen=True)
class DrawGroup:
    """Worked draws with a temperature that are cut down in the same way.

    Args:
        places: [G] int64, which worked draws.
        max_top_k: the largest top_k in the group, below the vocabulary's size; 0 in a group without top_k.
        uses_top_p: whether any draw of the group has a top_p below 1.
        uses_min_p: whether any has a min_p over 0.
    """

    places: Tensor
    max_top_k: int
    uses_top_p: bool
    uses_min_p: bool


def group_draws(
    temperature: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float32],
    min_p: npt.NDArray[np.float32],
    vocab_size: int,
    device: torch.device,
) -> tuple[DrawGroup, ...]:
    """Sort the worked draws into at most three groups: with top_k, with top_p alone, with neither.

    Args:
        temperature, top_k, top_p, min_p: [W]. Greedy draws are in no group. A top_k of vocab_size or more is off.
    """
    is_random = temperature > 0
    by_top_k = is_random & (top_k > 0) & (top_k < vocab_size)
    by_top_p = is_random & ~by_top_k & (top_p < 1)
    groups = []
    for members in (by_top_k, by_top_p, is_random & ~by_top_k & ~by_top_p):
        if members.any():
            groups.append(
                DrawGroup(
                    places=torch.from_numpy(members.nonzero()[0]).to(device),
                    max_top_k=int(top_k[members & by_top_k].max(initial=0)),
                    uses_top_p=bool((top_p[members] < 1).any()),
                    uses_min_p=bool((min_p[members] > 0).any()),
                )
            )
    return tuple(groups)


@dataclass(frozen=True)
class WorkedDraws:
    """The W draws that are not plain greedy.

    Args:
        draws: [W] int64, indexes into the D draws.
        temperature: [W] float32; 0 is greedy after all adjustments.
        top_k: [W] int64, 0 is off. top_p, min_p: [W] float32, 1 and 0 are off.
        repetition_penalty, presence_penalty, frequency_penalty: [W] float32; 1, 0 and 0 are off.
        seeds, sample_index, positions: [W] int64, what the noise is made of.
        groups: the draws that have a temperature, by how they are cut down (`group_draws`).
        history: for penalties; None if no draw has any.
        allowed: pairs of (draw, the only tokens it may take); draws without pairs are free.
        forbidden: pairs of (draw, token it must not take).
        bias: triples of (draw, token, what is added to its logit).
        grammar_mask: [W, ceil(vocabulary / 32)] int32, bit t % 32 of word t // 32 set where token t may come; None if
            no draw has a grammar (rows without one have all bits set).
    """

    draws: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    seeds: Tensor
    sample_index: Tensor
    positions: Tensor
    groups: tuple[DrawGroup, ...]
    history: PenaltyHistory | None = None
    allowed: TokenPairs | None = None
    forbidden: TokenPairs | None = None
    bias: TokenPairs | None = None
    grammar_mask: Tensor | None = None

    @property
    def is_only_masked(self) -> bool:
        """Whether all draws are greedy, and nothing but a grammar holds them back."""
        others = (self.history, self.allowed, self.forbidden, self.bias)
        return self.grammar_mask is not None and not self.groups and all(part is None for part in others)

    @property
    def adjusts_logits(self) -> bool:
        """Whether any draw has masks, bias or penalties."""
        parts = (self.history, self.allowed, self.forbidden, self.bias, self.grammar_mask)
        return any(part is not None for part in parts)


@dataclass(frozen=True)
class SamplingBatch:
    """The draws of one step.

    Args:
        rows: [D] int64, the row of logits that each draw reads.
        worked: the draws that need more than an argmax; None if all are plain greedy.
        num_logprobs: most alternatives that any draw wants; -1 if none wants logprobs.
        logprob_draws: [L] int64, the draws that want logprobs; None where all want the same: some, or none.
    """

    rows: Tensor
    worked: WorkedDraws | None
    num_logprobs: int
    logprob_draws: Tensor | None = None
