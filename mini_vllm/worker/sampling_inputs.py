"""From a batch's draws to a `SamplingBatch`: the sampling parameters of the rows, as tensors.

Where it stands: between the forward and the sampler. Dense parameters are columns of the sequence table, read by one
NumPy index; the rare ones (bias, bad words, allowed tokens, min_tokens, penalties) cost only the draws that have them.

In vLLM: `_make_sampling_metadata` in `vllm/v1/worker/gpu_input_batch.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mini_vllm.engine.scheduled_batch import Draw, ScheduledBatch
from mini_vllm.engine.sequence_table import SequenceTable
from mini_vllm.model.sampling_batch import PenaltyHistory, SamplingBatch, TokenPairs, WorkedDraws, group_draws


def build_sampling_batch(batch: ScheduledBatch, rows: Tensor, table: SequenceTable, vocab_size: int) -> SamplingBatch:
    """Describe all draws of a step.

    Args:
        rows: for each draw, the row of its logits.
        vocab_size: width of the logits.
    """
    table_rows = [batch.sequences[draw.sequence].row for draw in batch.draws]
    num_logprobs = [table.num_logprobs[row] for row in table_rows]
    worked = [place for place, row in enumerate(table_rows) if table.needs_work[row]]
    wanting = [place for place, number in enumerate(num_logprobs) if number >= 0]
    return SamplingBatch(
        rows=rows,
        worked=_worked_draws(batch.draws, table_rows, worked, table, vocab_size, rows.device) if worked else None,
        num_logprobs=max(num_logprobs),
        logprob_draws=torch.tensor(wanting, device=rows.device) if 0 < len(wanting) < len(table_rows) else None,
    )


def wants_only_best_tokens(batch: ScheduledBatch, table: SequenceTable) -> bool:
    """Whether every draw of a step is plain greedy, and none wants logprobs."""
    rows = [batch.sequences[draw.sequence].row for draw in batch.draws]
    return not any(table.needs_work[row] or table.num_logprobs[row] >= 0 for row in rows)


def _worked_draws(
    draws: Sequence[Draw],
    table_rows: Sequence[int],
    worked: Sequence[int],
    table: SequenceTable,
    vocab_size: int,
    device: torch.device,
) -> WorkedDraws:
    rows = np.array([table_rows[index] for index in worked])
    positions = [draws[index].position for index in worked]
    adjusted = [place for place, row in enumerate(rows.tolist()) if table.adjusts_logits[row]]
    builder = _AdjustmentBuilder(table, vocab_size, device)
    for place in adjusted:
        builder.add(place, int(rows[place]), positions[place])

    def column(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return torch.from_numpy(values[rows]).to(device)

    return WorkedDraws(
        draws=torch.tensor(worked, device=device),
        temperature=column(table.temperature),
        top_k=column(table.top_k),
        top_p=column(table.top_p),
        min_p=column(table.min_p),
        repetition_penalty=column(table.repetition_penalty),
        presence_penalty=column(table.presence_penalty),
        frequency_penalty=column(table.frequency_penalty),
        seeds=column(table.seeds),
        sample_index=torch.tensor([draws[index].sample_index for index in worked], device=device),
        positions=torch.tensor(positions, device=device),
        groups=group_draws(
            table.temperature[rows], table.top_k[rows], table.top_p[rows], table.min_p[rows], vocab_size, device
        ),
        history=builder.history(),
        allowed=builder.pairs(builder.allowed),
        forbidden=builder.pairs(builder.forbidden),
        bias=builder.pairs(builder.bias),
        grammar_mask=_grammar_masks([draws[index] for index in worked], device),
    )


def _grammar_masks(draws: Sequence[Draw], device: torch.device) -> Tensor | None:
    """[W, ceil(vocabulary / 32)] int32; all bits are set for a draw without a grammar. None if no draw has one."""
    masks = [draw.grammar_mask for draw in draws]
    one = next((mask for mask in masks if mask is not None), None)
    if one is None:
        return None
    everything = np.full_like(one, -1)
    return torch.from_numpy(np.stack([everything if mask is None else mask for mask in masks])).to(device)


class _AdjustmentBuilder:
    """Collects the sparse entries of the draws whose logits are adjusted."""

    def __init__(self, table: SequenceTable, vocab_size: int, device: torch.device) -> None:
        self._table, self._vocab_size, self._device = table, vocab_size, device
        self.allowed: list[tuple[int, int, float]] = []
        self.forbidden: list[tuple[int, int, float]] = []
        self.bias: list[tuple[int, int, float]] = []
        self._penalised: list[tuple[int, Tensor, Tensor]] = []

    def add(self, place: int, row: int, position: int) -> None:
        """Collect for worked draw `place`, of table row `row`, whose token will stand at `position`."""
        table, params = self._table, self._table.params[row]
        if params is None:
            raise RuntimeError(f"row {row} draws a token but belongs to nobody")
        prompt_len = int(table.num_prompt_tokens[row])
        tokens = table.token_ids[row, :position]
        self.allowed.extend((place, token_id, 0.0) for token_id in params.allowed_token_ids or ())
        if position - prompt_len < params.min_tokens:
            self.forbidden.extend((place, token_id, 0.0) for token_id in table.stop_token_ids[row])
        for *before, last in table.bad_words_token_ids[row]:
            if not before or (len(before) <= len(tokens) and tokens[-len(before) :].tolist() == before):
                self.forbidden.append((place, last, 0.0))
        self.bias.extend((place, token_id, value) for token_id, value in (params.logit_bias or {}).items())
        if params.has_penalties:
            history = torch.from_numpy(tokens.astype(np.int64))
            self._penalised.append((place, history[:prompt_len], history[prompt_len:]))

    def pairs(self, entries: list[tuple[int, int, float]]) -> TokenPairs | None:
        if not entries:
            return None
        draws, token_ids, values = zip(*entries, strict=True)
        return TokenPairs(
            torch.tensor(draws, device=self._device),
            torch.tensor(token_ids, device=self._device),
            torch.tensor(values, device=self._device),
        )

    def history(self) -> PenaltyHistory | None:
        if not self._penalised:
            return None
        draws, prompts, outputs = zip(*self._penalised, strict=True)
        return PenaltyHistory(torch.tensor(draws, device=self._device), self._padded(prompts), self._padded(outputs))

    def _padded(self, tokens: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            list(tokens), batch_first=True, padding_value=float(self._vocab_size)
        ).to(self._device)
