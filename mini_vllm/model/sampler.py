"""The sampler: from logits to tokens, for all draws of a step at once.

Where it stands: the last thing the model runner does. A function of its arguments and nothing else; it is also what
fast kernels are tested against.

The order:

    raw logprobs                                                                                    here
    -> allowed tokens, grammar -> forbidden (bad words, min_tokens) -> logit_bias -> penalties      sampling_adjustments
    -> temperature -> min_p -> top_k -> top_p -> argmax of (scaled logit + Gumbel noise)            sampling_draw

What always holds: a draw's token depends on its row of logits and its own parameters alone. Among equal logits the
smaller id comes first, everywhere (sampling_order.py). A row that is not a number, and masks that leave no token, fail
their own draws and no others. A greedy draw costs an argmax.

In vLLM: `vllm/v1/sample/sampler.py`, `vllm/v1/sample/ops/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mini_vllm.model.sampling_adjustments import adjust, best_allowed
from mini_vllm.model.sampling_batch import SamplingBatch, WorkedDraws
from mini_vllm.model.sampling_draw import draw_tokens
from mini_vllm.model.sampling_order import top_tokens
from mini_vllm.model.sampling_pieces import rows_per_piece


@dataclass(frozen=True)
class SamplerOutput:
    """What was drawn.

    Args:
        token_ids: [D] int64; meaningless where `is_broken` or `has_no_token`.
        logprobs: [D] float32, raw logprob of the token drawn, NaN for draws that want none; None if nobody asked.
        top_token_ids, top_logprobs: [D, k] best first, raw; None if nobody asked. k is `num_logprobs`, or the
            vocabulary's size if that is less.
        best: [D] float32, the greatest raw logit of the row.
        has_no_token: [D] bool: the masks leave no token.
    """

    token_ids: Tensor
    logprobs: Tensor | None
    top_token_ids: Tensor | None
    top_logprobs: Tensor | None
    best: Tensor
    has_no_token: Tensor

    @property
    def is_broken(self) -> Tensor:
        """[D] bool: the row has NaN or +inf, or nothing but -inf."""
        return ~self.best.isfinite()


@dataclass(frozen=True)
class LogprobsOutput:
    """Raw logprobs of given tokens, NaN in rows whose logits are broken.

    Args:
        logprobs: [T] float32.
        top_token_ids: [T, k] int64. top_logprobs: [T, k] float32. Best first.
    """

    logprobs: Tensor
    top_token_ids: Tensor
    top_logprobs: Tensor


@dataclass(frozen=True)
class SamplerSteps:
    """The three things that the sampler does with whole rows; `cpu_sampler.py` has fast twins of them.

    Args:
        best_tokens: logits [R, vocabulary] -> the greatest of each row [R] and its token [R] int64; NaN if the row has
            one.
        draw: see `draw_worked`.
        logprobs: see `logprobs_of_rows`.
    """

    best_tokens: Callable[[Tensor], tuple[Tensor, Tensor]]
    draw: Callable[[Tensor, Tensor, Tensor, Tensor, WorkedDraws], tuple[Tensor, Tensor]]
    logprobs: Callable[[Tensor, Tensor, Tensor, int], LogprobsOutput]


def sample(logits: Tensor, batch: SamplingBatch, steps: SamplerSteps | None = None) -> SamplerOutput:
    """Draw all tokens of a step.

    Args:
        logits: [R, vocabulary] float32, one row for each sequence that draws. Not changed.
        batch: the draws.
        steps: how; plain PyTorch if None.
    """
    steps = steps or PLAIN_STEPS
    values, best_tokens = steps.best_tokens(logits)  # NaN is greater than all: this also tells which rows are broken
    output = take_best(values, best_tokens, batch.rows)
    if batch.worked is not None:
        draws, token_ids = batch.worked.draws, output.token_ids
        token_ids[draws], none_left = steps.draw(logits, values, token_ids[draws], batch.rows[draws], batch.worked)
        output.has_no_token[draws] = none_left & output.best[draws].isfinite()
    logprobs = _sampled_logprobs(logits, output.token_ids, batch, steps)
    if logprobs is None:
        return output
    return replace(
        output,
        logprobs=logprobs.logprobs,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def take_best(best: Tensor, token_ids: Tensor, rows: Tensor) -> SamplerOutput:
    """What plain greedy draws that want no logprobs give, in tensors of its own.

    Args:
        best: [R] float32, the greatest logit of each row. token_ids: [R] int64, its token.
        rows: [D] int64, the row that each draw reads.
    """
    token_ids = token_ids.index_select(0, rows)
    return SamplerOutput(
        token_ids=token_ids,
        logprobs=None,
        top_token_ids=None,
        top_logprobs=None,
        best=best.index_select(0, rows),
        has_no_token=torch.zeros_like(token_ids, dtype=torch.bool),
    )


def draw_worked(
    logits: Tensor, best: Tensor, token_ids: Tensor, rows: Tensor, worked: WorkedDraws
) -> tuple[Tensor, Tensor]:
    """Tokens [W] int64 of the worked draws, and which of them [W] bool have none to choose.

    Args:
        logits: [R, vocabulary] float32.
        best: [R] float32, the greatest logit of each row.
        token_ids: [W] int64, the token of that logit for each worked draw.
        rows: [W] int64, the row that each worked draw reads.
        worked: their parameters.
    """
    has_no_token = torch.zeros_like(rows, dtype=torch.bool)
    if worked.is_only_masked and worked.grammar_mask is not None and logits.device.type == "cpu":
        return best_allowed(logits, rows, token_ids, worked.grammar_mask)
    if worked.adjusts_logits:
        # Each draw gets a copy of its row to change, and from here on reads that one.
        logits = adjust(logits[rows], worked)
        rows = torch.arange(len(rows), device=rows.device)
        best, token_ids = logits.max(dim=1)
        has_no_token = best == -math.inf
    if worked.groups:
        places, drawn = draw_tokens(logits, rows, best, worked)
        token_ids[places] = drawn
    return token_ids, has_no_token


def _sampled_logprobs(
    logits: Tensor, token_ids: Tensor, batch: SamplingBatch, steps: SamplerSteps
) -> LogprobsOutput | None:
    """Logprobs of the drawn tokens, computed only for the draws that want them."""
    if batch.num_logprobs < 0:
        return None
    draws = batch.logprob_draws
    if draws is None:
        return steps.logprobs(logits, batch.rows, token_ids, batch.num_logprobs)
    some = steps.logprobs(logits, batch.rows[draws], token_ids[draws], batch.num_logprobs)
    shape = (len(token_ids), some.top_token_ids.shape[1])
    result = LogprobsOutput(
        logprobs=some.logprobs.new_full(shape[:1], math.nan),
        top_token_ids=token_ids.new_zeros(shape),
        top_logprobs=some.logprobs.new_full(shape, math.nan),
    )
    result.logprobs[draws] = some.logprobs
    result.top_token_ids[draws] = some.top_token_ids
    result.top_logprobs[draws] = some.top_logprobs
    return result


def prompt_logprobs(
    logits: Tensor, targets: Tensor, num_logprobs: int, steps: SamplerSteps | None = None
) -> LogprobsOutput:
    """Raw logprobs of known tokens, one a row of logits. Arguments as `logprobs_of_rows`."""
    every_row = torch.arange(len(logits), device=logits.device)
    return (steps or PLAIN_STEPS).logprobs(logits, every_row, targets, num_logprobs)


def logprobs_of_rows(logits: Tensor, rows: Tensor, targets: Tensor, num_logprobs: int) -> LogprobsOutput:
    """Raw logprobs of given tokens.

    Args:
        logits: [R, vocabulary] float32.
        rows: [T] int64, the row that each token is looked up in.
        targets: [T] int64, the tokens.
        num_logprobs: alternatives, best first; the whole vocabulary if it has fewer.
    """
    num_rows = rows_per_piece(logits)
    k = min(num_logprobs, logits.shape[1])
    pieces = zip(torch.split(rows, num_rows), torch.split(targets, num_rows), strict=True)
    columns = zip(*(_logprobs_of_piece(logits[some], wanted, k) for some, wanted in pieces), strict=True)
    return LogprobsOutput(*(torch.cat(column) for column in columns))


def _logprobs_of_piece(logits: Tensor, targets: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = logits.log_softmax(dim=1)
    # Ordered by logits: rounding can make two logprobs equal whose logits are not.
    top_token_ids = top_tokens(logits, k)[1] if k > 0 else targets.new_zeros(len(targets), 0)
    return logprobs.gather(1, targets[:, None]).squeeze(1), top_token_ids, logprobs.gather(1, top_token_ids)


def _best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, token_ids = logits.max(dim=1)
    return values, token_ids


PLAIN_STEPS = SamplerSteps(_best_tokens, draw_worked, logprobs_of_rows)
