"""`SamplingBatch`: all that the sampler must know of a step's draws, as tensors.

Where it stands: the worker builds it from the sequence table; the sampler reads it. R rows of logits, D draws; draw d
reads row `rows[d]`, so that the siblings of n may share one.

    draws    0        1         2          3
    rows     0        1         1          2          R = 3
    greedy   yes      no        no         yes
    worked            0         1                     the draws that need more than an argmax, W = 2

Most draws of most batches are plain greedy: they cost an argmax. Everything else stands in `WorkedDraws`, whose tensors
have one entry a *worked* draw, and whose rarer parts are None or empty where no draw needs them.

In vLLM: `vllm/v1/sample/metadata.py` (`SamplingMetadata`).
"""

from __future__ import annotations

from dataclasses import dataclass

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
class WorkedDraws:
    """The W draws that are not plain greedy.

    Args:
        draws: [W] int64, indexes into the D draws.
        temperature: [W] float32; 0 is greedy after all adjustments.
        top_k: [W] int64, 0 is off. top_p, min_p: [W] float32, 1 and 0 are off.
        repetition_penalty, presence_penalty, frequency_penalty: [W] float32; 1, 0 and 0 are off.
        seeds, sample_index, positions: [W] int64, what the noise is made of.
        truncates: whether any draw uses top_k, top_p or min_p.
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
    truncates: bool
    history: PenaltyHistory | None = None
    allowed: TokenPairs | None = None
    forbidden: TokenPairs | None = None
    bias: TokenPairs | None = None
    grammar_mask: Tensor | None = None


@dataclass(frozen=True)
class SamplingBatch:
    """The draws of one step.

    Args:
        rows: [D] int64, the row of logits that each draw reads.
        worked: the draws that need more than an argmax; None if all are plain greedy.
        num_logprobs: most alternatives that any draw wants; -1 if none wants logprobs.
    """

    rows: Tensor
    worked: WorkedDraws | None
    num_logprobs: int
