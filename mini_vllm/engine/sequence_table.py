"""`SequenceTable`: the running sequences as rows of arrays, which the worker reads and never writes.

Where it stands: owned by the scheduler. A sequence gets a row when it is admitted and keeps it while it runs. Each step
writes only what changed: one token, now and then one block number. So preparing a batch of 64 sequences is a few NumPy
index operations over these arrays, not 64 Python lists made anew. What decides whether anything is to be prepared at
all stands in Python lists: for a hundred numbers these are quicker to ask than an array is.

    row   token_ids              block_tables   temperature  top_p  ...
    0     504 3575  282 4649     7  2  -         0.8          1.0
    1     1   9690  198  -       3  -  -         0.0          1.0
    2     (free)

In vLLM: `vllm/v1/worker/gpu_input_batch.py` (`InputBatch`), there a mirror inside the worker.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mini_vllm.engine.sequence import Sequence
from mini_vllm.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class SequenceTable:
    """Arrays of `num_rows` rows.

    Args:
        num_rows: most sequences that run at once.
        max_model_len: longest sequence in tokens.
        block_size: tokens in a block.
    """

    def __init__(self, num_rows: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.token_ids: Int32Array = np.zeros((num_rows, max_model_len), np.int32)
        self.block_tables: Int32Array = np.zeros((num_rows, -(-max_model_len // block_size)), np.int32)
        self.num_prompt_tokens: Int32Array = np.zeros(num_rows, np.int32)
        self.temperature: FloatArray = np.zeros(num_rows, np.float32)
        self.top_k: Int64Array = np.zeros(num_rows, np.int64)
        self.top_p: FloatArray = np.ones(num_rows, np.float32)
        self.min_p: FloatArray = np.zeros(num_rows, np.float32)
        self.repetition_penalty: FloatArray = np.ones(num_rows, np.float32)
        self.presence_penalty: FloatArray = np.zeros(num_rows, np.float32)
        self.frequency_penalty: FloatArray = np.zeros(num_rows, np.float32)
        self.seeds: Int64Array = np.zeros(num_rows, np.int64)
        self.num_logprobs = [-1] * num_rows
        self.adjusts_logits = [False] * num_rows
        self.needs_work = [False] * num_rows  # more than an argmax
        self.bad_words_token_ids: list[tuple[tuple[int, ...], ...]] = [()] * num_rows
        self.stop_token_ids: list[frozenset[int]] = [frozenset()] * num_rows
        self.params: list[SamplingParams | None] = [None] * num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))

    def admit(self, sequence: Sequence) -> None:
        """Give the sequence a row and write all that is known of it."""
        row = sequence.row = self._free_rows.pop()
        request, params = sequence.group.request, sequence.group.request.params
        self.token_ids[row, : sequence.num_tokens] = sequence.token_ids
        self.num_prompt_tokens[row] = sequence.num_prompt_tokens
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k or 0
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition_penalty[row] = params.repetition_penalty
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.seeds[row] = request.seed
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.adjusts_logits[row] = params.adjusts_logits
        self.needs_work[row] = params.adjusts_logits or bool(self.temperature[row] > 0)
        self.bad_words_token_ids[row] = request.bad_words_token_ids
        self.stop_token_ids[row] = request.stop_token_ids
        self.params[row] = params
        self.write_blocks(sequence, 0)

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """The sequence's newest token. Call it before the token is added to `sequence.token_ids`."""
        self.token_ids[sequence.row, sequence.num_tokens] = token_id

    def write_blocks(self, sequence: Sequence, first: int) -> None:
        """Copy the sequence's block table from logical block `first` on."""
        blocks = sequence.block_table.blocks
        self.block_tables[sequence.row, first : len(blocks)] = blocks[first:]

    def release(self, sequence: Sequence) -> None:
        """Take the row back. What it holds is overwritten by the next owner."""
        self.params[sequence.row] = None
        self._free_rows.append(sequence.row)
        sequence.row = -1
