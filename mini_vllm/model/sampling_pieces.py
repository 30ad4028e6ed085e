"""How many rows of logits the sampler works on at a time.

Where it stands: below the sampler. A row is a whole vocabulary, and noise or an ordering of it takes 64-bit integers;
so a batch in one go would need several times the memory of its logits, and on a CPU would leave the processor's cache.

In vLLM: no counterpart; there the sampler works on the whole batch.
"""

from __future__ import annotations

from torch import Tensor

ELEMENTS_ON_CPU = 1 << 18  # 2 MiB of 64-bit integers: what a second-level cache holds
ELEMENTS_ON_DEVICE = 1 << 24  # an accelerator wants more work at once


def rows_per_piece(logits: Tensor) -> int:
    """Rows of `logits` [R, vocabulary] to take at a time, at least 1."""
    elements = ELEMENTS_ON_CPU if logits.device.type == "cpu" else ELEMENTS_ON_DEVICE
    return max(1, elements // logits.shape[1])
