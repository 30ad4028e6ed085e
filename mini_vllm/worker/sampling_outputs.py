"""From the sampler's tensors to plain numbers: one `SampledToken` a draw.

Where it stands: the end of the worker's step; what it makes crosses back to the engine.

In vLLM: `vllm/v1/outputs.py` (`LogprobsTensors.tolists`).
"""

from __future__ import annotations

import math

from torch import Tensor

from mini_vllm.engine.scheduled_batch import ModelOutput, SampledToken, ScheduledBatch
from mini_vllm.engine.sequence_table import SequenceTable
from mini_vllm.model.sampler import LogprobsOutput, SamplerOutput
from mini_vllm.outputs import NO_TOKEN_LEFT, TokenLogprobs

BROKEN = "the model's logits are not finite (NaN or infinite); the request cannot be continued"


def collect_tokens(batch: ScheduledBatch, table: SequenceTable, output: SamplerOutput) -> list[SampledToken]:
    """What each draw gave, with as many logprobs as its request asked for."""
    token_ids = output.token_ids.tolist()
    logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
    if output.logprobs is not None and output.top_token_ids is not None and output.top_logprobs is not None:
        wanted = [table.num_logprobs[batch.sequences[draw.sequence].row] for draw in batch.draws]
        values = LogprobsOutput(output.logprobs, output.top_token_ids, output.top_logprobs)
        logprobs = list(_entries(token_ids, values, wanted))
    errors = [
        NO_TOKEN_LEFT if none_left else None if math.isfinite(best) else BROKEN
        for best, none_left in zip(output.best.tolist(), output.has_no_token.tolist(), strict=True)
    ]
    return list(map(SampledToken, token_ids, logprobs, errors))


def collect_logprobs(targets: Tensor, values: LogprobsOutput, num_logprobs: int) -> list[TokenLogprobs]:
    """Entries of known tokens. targets: [T] int64."""
    token_ids: list[int] = targets.tolist()
    return [entry for entry in _entries(token_ids, values, [num_logprobs] * len(token_ids)) if entry is not None]


def _entries(token_ids: list[int], values: LogprobsOutput, wanted: list[int]) -> list[TokenLogprobs | None]:
    """One entry a token with its first `wanted` alternatives; None where wanted is -1."""
    logprobs = values.logprobs.tolist()
    top_ids, top_values = values.top_token_ids.tolist(), values.top_logprobs.tolist()
    return [
        None
        if count < 0
        else TokenLogprobs(token_id, logprobs[i], tuple(top_ids[i][:count]), tuple(top_values[i][:count]))
        for i, (token_id, count) in enumerate(zip(token_ids, wanted, strict=True))
    ]


def fail_broken_prompts(batch: ScheduledBatch, output: ModelOutput) -> ModelOutput:
    """The same output, but a sequence that has a prompt logprob which is no number fails as a whole."""
    broken = {
        span.sequence
        for span, entries in zip(batch.prompt_logprobs, output.prompt_logprobs, strict=True)
        if any(math.isnan(entry.logprob) for entry in entries)
    }
    if not broken:
        return output
    return ModelOutput(
        tokens=[
            token._replace(error=BROKEN) if draw.sequence in broken else token
            for draw, token in zip(batch.draws, output.tokens, strict=True)
        ],
        prompt_logprobs=[
            [] if span.sequence in broken else entries
            for span, entries in zip(batch.prompt_logprobs, output.prompt_logprobs, strict=True)
        ],
        errors=dict.fromkeys(broken, BROKEN),
    )
