"""The sampler: from logits to tokens, for all draws of a step at once.

Where it stands: the last thing the model runner does. A function of its arguments and nothing else; it is also what
fast kernels are tested against.

The order, with every stage a function below:

    raw logprobs -> allowed tokens and grammar -> forbidden (bad words, min_tokens) -> logit_bias -> penalties
    -> temperature -> min_p -> top_k -> top_p -> argmax of (scaled logit + Gumbel noise)

What always holds: a draw's token depends on its row of logits and its own parameters alone. Candidates are ordered by
(logit, then smaller id), so ties are settled the same way everywhere. A row that is not a number, and masks that leave
no token, fail their own draws and no others.

In vLLM: `vllm/v1/sample/sampler.py`, `vllm/v1/sample/ops/`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_vllm.model.noise import gumbel_noise
from mini_vllm.model.sampling_batch import PenaltyHistory, SamplingBatch, TokenPairs, WorkedDraws

FIRST_CANDIDATES = 512  # top_p mostly keeps far fewer; where it keeps more the whole row is sorted


@dataclass(frozen=True)
class SamplerOutput:
    """What was drawn.

    Args:
        token_ids: [D] int64; meaningless where `is_broken` or `has_no_token`.
        logprobs: [D] float32, raw logprob of the token drawn; None if nobody asked.
        top_token_ids, top_logprobs: [D, k] best first, raw; None if nobody asked.
        is_broken: [D] bool: the row has NaN or +inf.
        has_no_token: [D] bool: the masks leave no token.
    """

    token_ids: Tensor
    logprobs: Tensor | None
    top_token_ids: Tensor | None
    top_logprobs: Tensor | None
    is_broken: Tensor
    has_no_token: Tensor


@dataclass(frozen=True)
class LogprobsOutput:
    """Raw logprobs of given tokens. logprobs: [T] float32. top_token_ids, top_logprobs: [T, k], best first."""

    logprobs: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor


def sample(logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
    """Draw all tokens of a step.

    Args:
        logits: [R, vocabulary] float32, one row for each sequence that draws. Not changed.
        batch: the draws.
    """
    best = logits.max(dim=1)  # NaN wins any comparison, so the maximum also tells which rows are broken
    is_broken = ~best.values.isfinite()
    token_ids = best.indices[batch.rows]
    has_no_token = torch.zeros_like(is_broken[batch.rows])
    if batch.worked is not None:
        adjusted = adjust(logits[batch.rows[batch.worked.draws]], batch.worked)  # [W, vocabulary], a copy
        has_no_token[batch.worked.draws] = adjusted.amax(dim=1) == -math.inf
        token_ids[batch.worked.draws] = draw(adjusted, batch.worked)
    is_broken = is_broken[batch.rows]
    if batch.num_logprobs < 0:
        return SamplerOutput(token_ids, None, None, None, is_broken, has_no_token & ~is_broken)
    raw = prompt_logprobs(logits[batch.rows], token_ids, batch.num_logprobs)
    return SamplerOutput(
        token_ids, raw.logprobs, raw.top_token_ids, raw.top_logprobs, is_broken, has_no_token & ~is_broken
    )


def prompt_logprobs(logits: Tensor, targets: Tensor, num_logprobs: int) -> LogprobsOutput:
    """Raw logprobs of known tokens.

    Args:
        logits: [T, vocabulary] float32.
        targets: [T] int64, the token that each row is asked about.
        num_logprobs: alternatives, best first.
    """
    logprobs = logits.log_softmax(dim=1)
    top = logprobs.topk(num_logprobs, dim=1)
    return LogprobsOutput(logprobs.gather(1, targets[:, None]).squeeze(1), top.indices, top.values)


# ---- adjusting logits: what may come, and how much it is liked ---------------------------------------------------


def adjust(logits: Tensor, worked: WorkedDraws) -> Tensor:
    """Masks, bias and penalties.

    Args:
        logits: [W, vocabulary] float32; changed in place and returned.
    """
    if worked.allowed is not None:
        _keep_only(logits, worked.allowed)
    if worked.grammar_mask is not None:
        logits.masked_fill_(~unpack_bitmask(worked.grammar_mask, logits.shape[1]), -math.inf)
    if worked.forbidden is not None:
        logits[worked.forbidden.draws, worked.forbidden.token_ids] = -math.inf
    if worked.bias is not None and worked.bias.values is not None:
        logits.index_put_((worked.bias.draws, worked.bias.token_ids), worked.bias.values, accumulate=True)
    if worked.history is not None:
        _penalise(logits, worked, worked.history)
    return logits


def _keep_only(logits: Tensor, allowed: TokenPairs) -> None:
    draws = allowed.draws.unique()
    kept = torch.full_like(logits[draws], -math.inf)
    place = torch.searchsorted(draws, allowed.draws)
    kept[place, allowed.token_ids] = logits[allowed.draws, allowed.token_ids]
    logits[draws] = kept


def unpack_bitmask(mask: Tensor, vocab_size: int) -> Tensor:
    """[W, ceil(vocabulary / 32)] int32, least significant bit first -> [W, vocabulary] bool."""
    bits = (mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def _penalise(logits: Tensor, worked: WorkedDraws, history: PenaltyHistory) -> None:
    """Repetition penalty over prompt and output, presence and frequency penalty over the output."""
    draws, vocab_size = history.draws, logits.shape[1]
    counts = logits.new_zeros(len(draws), vocab_size + 1)  # the last column takes the padding
    counts.scatter_add_(1, history.output_token_ids, torch.ones_like(history.output_token_ids, dtype=counts.dtype))
    seen = (counts > 0).scatter_(1, history.prompt_token_ids, True)[:, :vocab_size]
    counts = counts[:, :vocab_size]
    penalised = logits[draws]
    repetition = worked.repetition_penalty[draws, None]
    repeated = torch.where(penalised > 0, penalised / repetition, penalised * repetition)
    penalised = torch.where(seen, repeated, penalised)
    penalised -= worked.frequency_penalty[draws, None] * counts
    penalised -= worked.presence_penalty[draws, None] * (counts > 0)
    logits[draws] = penalised


# ---- drawing ------------------------------------------------------------------------------------------------------


def draw(logits: Tensor, worked: WorkedDraws) -> Tensor:
    """[W, vocabulary] adjusted logits -> [W] int64 tokens."""
    is_greedy = worked.temperature == 0
    best = logits.max(dim=1, keepdim=True)
    # The best logit becomes 0, so dividing by a tiny temperature cannot overflow.
    scaled = (logits - best.values) / worked.temperature.masked_fill(is_greedy, 1.0)[:, None]
    if worked.truncates:
        sampled = _draw_truncated(scaled, worked)
    else:
        every_token = torch.arange(logits.shape[1], device=logits.device)[None]
        sampled = (scaled + _noise(worked, every_token)).argmax(dim=1)
    return torch.where(is_greedy, best.indices.squeeze(1), sampled)


def _draw_truncated(scaled: Tensor, worked: WorkedDraws) -> Tensor:
    """Draw among the tokens that min_p, top_k and top_p leave."""
    scaled = scaled.masked_fill(scaled < worked.min_p.log()[:, None], -math.inf)
    num_kept = count_kept(scaled, worked.top_k, worked.top_p)  # [W]
    most = int(num_kept.max())
    if most == scaled.shape[1]:  # some row keeps everything
        kept = torch.where(keep_best(scaled, num_kept), scaled, -math.inf)
        every_token = torch.arange(scaled.shape[1], device=scaled.device)[None]
        return (kept + _noise(worked, every_token)).argmax(dim=1)
    kept = torch.where(keep_best(scaled, num_kept), scaled, -math.inf)
    candidates = kept.topk(most, dim=1)
    chosen = (candidates.values + _noise(worked, candidates.indices)).argmax(dim=1, keepdim=True)
    return candidates.indices.gather(1, chosen).squeeze(1)


def count_kept(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """How many of the best tokens of each row survive top_k, and then top_p of what is left.

    Example: probabilities .4 .3 .2 .1, top_p .6. Before each token stand 0, .4, .7, .9; the first two are below .6, so
    two are kept: the one that crosses p is in.

    Args:
        scaled: [W, vocabulary], the best logit of a row is 0.
        top_k: [W] int64, 0 is off. top_p: [W] float32, 1 is off.

    Returns:
        [W] int64, at least 1.
    """
    vocab_size = scaled.shape[1]
    limit = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)
    needs_p = top_p < 1.0
    if not bool(needs_p.any()):
        return limit
    most = int(limit[needs_p].max())
    result = limit.clone()
    if most > FIRST_CANDIDATES:
        # Nearly always a few hundred candidates hold p of the mass; the rows where they do not are sorted whole.
        kept, is_certain = _count_by_mass(scaled, limit, top_p, FIRST_CANDIDATES)
        result[needs_p & is_certain] = kept[needs_p & is_certain]
        needs_p = needs_p & ~is_certain
        if not bool(needs_p.any()):
            return result
    kept, _ = _count_by_mass(scaled[needs_p], limit[needs_p], top_p[needs_p], most)
    result[needs_p] = kept
    return result


def _count_by_mass(scaled: Tensor, limit: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Count with the `width` best tokens of each row; also whether these were enough to be certain."""
    values = scaled.topk(width, dim=1).values  # [W, width], descending
    place = torch.arange(width, device=scaled.device)
    inside = place < limit[:, None]
    weights = values.exp().masked_fill(~inside, 0.0)
    # All of the row counts as the whole, unless top_k has already cut it down to what is in `values`.
    total = torch.where(limit <= width, weights.sum(dim=1), scaled.exp().sum(dim=1))
    before = (weights.cumsum(dim=1) - weights) / total[:, None]
    kept = ((before < top_p[:, None]) & inside).sum(dim=1).clamp(min=1)
    is_certain = (kept < width) | (limit <= width)
    return kept, is_certain


def keep_best(scaled: Tensor, num_kept: Tensor) -> Tensor:
    """[W, vocabulary] bool: the `num_kept` best of each row; among equal ones the smaller ids."""
    most = int(num_kept.max())
    threshold = scaled.topk(most, dim=1).values.gather(1, num_kept[:, None] - 1)  # the worst that is kept
    above, level = scaled > threshold, scaled == threshold
    room = num_kept - above.sum(dim=1)
    if bool((level.sum(dim=1) > room).any()):
        level &= level.cumsum(dim=1) <= room[:, None]
    return above | level


def _noise(worked: WorkedDraws, token_ids: Tensor) -> Tensor:
    return gumbel_noise(worked.seeds, worked.sample_index, worked.positions, token_ids)
