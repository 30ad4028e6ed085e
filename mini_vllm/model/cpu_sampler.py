"""The fast twins of the sampler's steps on a processor: each row is read a few times instead of some dozen.

Where it stands: the model runner gives `CPU_STEPS` to `sampler.sample` where the C++ kernels are in use. How it is done
is told in `kernels/cpu/csrc/sampler.h`.

What always holds: the same order of tokens, the same noise and the same rules as in `sampler.py`. Logarithms and
exponentials may differ in their last place, so a token can differ where two candidates are that close.

In vLLM: no counterpart; there the sampler is the same on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mini_vllm.kernels.cpu import ops
from mini_vllm.model.sampler import LogprobsOutput, SamplerSteps
from mini_vllm.model.sampling_batch import WorkedDraws


def _draw(logits: Tensor, best: Tensor, token_ids: Tensor, rows: Tensor, worked: WorkedDraws) -> tuple[Tensor, Tensor]:
    allowed, forbidden, bias, history = worked.allowed, worked.forbidden, worked.bias, worked.history
    numbers = torch.stack(
        (
            worked.temperature,
            worked.top_p,
            worked.min_p,
            worked.repetition_penalty,
            worked.presence_penalty,
            worked.frequency_penalty,
        )
    )
    integers = torch.stack((rows, worked.top_k, worked.seeds, worked.sample_index, worked.positions))
    return ops.draw_tokens(
        logits,
        numbers,
        integers,
        worked.grammar_mask,
        (allowed.draws, allowed.token_ids) if allowed else (None, None),
        (forbidden.draws, forbidden.token_ids) if forbidden else (None, None),
        (bias.draws, bias.token_ids, bias.values) if bias else (None, None, None),
        (history.draws, history.prompt_token_ids, history.output_token_ids) if history else (None, None, None),
    )


def _logprobs(logits: Tensor, rows: Tensor, targets: Tensor, num_logprobs: int) -> LogprobsOutput:
    return LogprobsOutput(*ops.logprobs(logits, rows, targets, min(num_logprobs, logits.shape[1])))


CPU_STEPS = SamplerSteps(ops.best_tokens, _draw, _logprobs)
