"""The model runner: one scheduled batch in, sampled tokens out.

Where it stands: inside the executor, below the engine. A step is four named parts:

    prepare    ScheduledBatch + SequenceTable -> flat token ids, positions, attention metadata
    forward    the transformer over all tokens of the step, prefills and decodes together
    sample     logits only for the rows that a draw reads, then all draws at once; a model that finds the best tokens
               without all logits does so where no draw wants more
    collect    tensors -> plain numbers

It remembers nothing of a request between steps: all state stands in the engine's sequence table, and in the blocks.

In vLLM: `vllm/v1/worker/gpu_model_runner.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_vllm.cache.block_manager import BlockCopy
from mini_vllm.engine.scheduled_batch import ModelOutput, PromptLogprobsSpan, SampledToken, ScheduledBatch
from mini_vllm.engine.sequence_table import SequenceTable
from mini_vllm.model.attention import AttentionBackend
from mini_vllm.model.language_model import FindsBestTokens, LanguageModel
from mini_vllm.model.sampler import SamplerOutput, SamplerSteps, prompt_logprobs, sample, take_best
from mini_vllm.outputs import TokenLogprobs
from mini_vllm.worker.model_inputs import ModelInputs, build_model_inputs
from mini_vllm.worker.sampling_inputs import build_sampling_batch, wants_only_best_tokens
from mini_vllm.worker.sampling_outputs import collect_logprobs, collect_tokens, fail_broken_prompts

PROMPT_LOGPROB_ROWS = 128  # logits made at a time: a long prompt never allocates length x vocabulary


class ModelRunner:
    """Runs one model over one cache.

    Args:
        model: the transformer, or anything with its three methods.
        backend: its cache allocated.
        table: the engine's arrays; read only.
        device: where the model lives.
        sampler_steps: how the sampler works on whole rows; plain PyTorch if None.
    """

    def __init__(
        self,
        model: LanguageModel,
        backend: AttentionBackend,
        table: SequenceTable,
        device: torch.device,
        sampler_steps: SamplerSteps | None = None,
    ) -> None:
        self._model = model
        self._finds_best_tokens = model if isinstance(model, FindsBestTokens) else None
        self._backend = backend
        self._table = table
        self._device = device
        self._sampler_steps = sampler_steps

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy on write: give sequences blocks of their own before they write to them."""
        self._backend.copy_blocks(copies)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> ModelOutput:
        """Run one step, its block copies made before. Doing it twice writes and gives the same."""
        inputs = build_model_inputs(batch, self._table, self._device)
        hidden = self._model(inputs.input_ids, inputs.positions, self._backend.begin(inputs.metadata))
        tokens = self._sample(batch, inputs, hidden)
        prompt = [self._prompt_logprobs(batch, span, inputs, hidden) for span in batch.prompt_logprobs]
        return fail_broken_prompts(batch, ModelOutput(tokens, prompt))

    def _sample(self, batch: ScheduledBatch, inputs: ModelInputs, hidden: Tensor) -> list[SampledToken]:
        if not batch.draws:
            return []
        # Siblings of n draw from one sequence: its logits are computed once, and are the row of each of them.
        drawn_from = [inputs.query_starts[draw.sequence + 1] - 1 for draw in batch.draws]
        row_of = {token: row for row, token in enumerate(dict.fromkeys(drawn_from))}
        hidden = hidden.index_select(0, torch.tensor(list(row_of), device=self._device))
        rows = torch.tensor([row_of[token] for token in drawn_from], device=self._device)
        return collect_tokens(batch, self._table, self._draw(batch, hidden, rows))

    def _draw(self, batch: ScheduledBatch, hidden: Tensor, rows: Tensor) -> SamplerOutput:
        if self._finds_best_tokens is not None and wants_only_best_tokens(batch, self._table):
            found = self._finds_best_tokens.best_tokens(hidden)
            if found is not None:
                return take_best(*found, rows)
        logits = self._model.logits(hidden)
        sampling = build_sampling_batch(batch, rows, self._table, logits.shape[1])
        return sample(logits, sampling, self._sampler_steps)

    def _prompt_logprobs(
        self, batch: ScheduledBatch, span: PromptLogprobsSpan, inputs: ModelInputs, hidden: Tensor
    ) -> list[TokenLogprobs]:
        scheduled = batch.sequences[span.sequence]
        first_row = inputs.query_starts[span.sequence] - scheduled.start  # flat row of the sequence's position 0
        entries: list[TokenLogprobs] = []
        for begin in range(span.start, span.end, PROMPT_LOGPROB_ROWS):
            end = min(begin + PROMPT_LOGPROB_ROWS, span.end)
            logits = self._model.logits(hidden[first_row + begin : first_row + end])
            targets = torch.from_numpy(self._table.token_ids[scheduled.row, begin + 1 : end + 1].astype("int64"))
            result = prompt_logprobs(logits, targets.to(self._device), span.num_logprobs, self._sampler_steps)
            entries += collect_logprobs(targets, result, span.num_logprobs)
        return entries
