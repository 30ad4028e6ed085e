"""From a scheduled batch to the tensors of one forward: NumPy indexing over the sequence table, no loop over tokens.

Where it stands: the first thing the model runner does in a step.

Worked example: two decodes and a prefill of 3 tokens, block_size 4::

    sequences     (row 4, start 9, 1)   (row 0, start 5, 1)   (row 7, start 0, 3)
    query_starts  [0, 1, 2, 5]
    rows          [4, 0, 7, 7, 7]                    the row of each flat token
    positions     [9, 5, 0, 1, 2]                    start + place within the sequence's own tokens
    input_ids     token_ids[rows, positions]
    slots         block_tables[rows, positions // 4] * 4 + positions % 4

In vLLM: `_prepare_inputs` in `vllm/v1/worker/gpu_model_runner.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from mini_vllm.engine.scheduled_batch import ScheduledBatch
from mini_vllm.engine.sequence_table import SequenceTable
from mini_vllm.model.attention import AttentionMetadata


@dataclass(frozen=True)
class ModelInputs:
    """What the model takes in one step.

    input_ids, positions: [T] int64. query_starts: the plain integers behind `metadata.query_starts`.
    """

    input_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    query_starts: list[int]


def build_model_inputs(batch: ScheduledBatch, table: SequenceTable, device: torch.device) -> ModelInputs:
    """Lay the tokens of all scheduled sequences flat, one sequence after the other."""
    rows, starts, counts, _ = (np.array(column, np.int64) for column in zip(*batch.sequences, strict=True))
    first_tokens = list(accumulate(counts.tolist(), initial=0))  # and one past the last token
    query_starts = np.array(first_tokens, np.int64)
    row_of_token = np.repeat(rows, counts)
    positions = np.arange(first_tokens[-1]) + np.repeat(starts - query_starts[:-1], counts)
    blocks = table.block_tables[row_of_token, positions // table.block_size].astype(np.int64)
    slots = blocks * table.block_size + positions % table.block_size
    context_lens = starts + counts
    max_context_len = int(context_lens.max())
    max_blocks = -(-max_context_len // table.block_size)
    metadata = AttentionMetadata(
        query_starts=_to_device(query_starts.astype(np.int32), device),
        context_lens=_to_device(context_lens.astype(np.int32), device),
        block_tables=_to_device(table.block_tables[rows, :max_blocks], device),
        slot_mapping=_to_device(slots, device),
        max_query_len=int(counts.max()),
        max_context_len=max_context_len,
        only_last_tokens=not batch.prompt_logprobs,
    )
    input_ids = table.token_ids[row_of_token, positions].astype(np.int64)
    return ModelInputs(_to_device(input_ids, device), _to_device(positions, device), metadata, first_tokens)


def _to_device(array: np.ndarray[tuple[int, ...], np.dtype[np.integer]], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
