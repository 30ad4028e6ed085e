"""Greedy decoding of a few sequences over the paged cache, as the engine would do it: in chunks, mixed and ragged."""

from __future__ import annotations

import torch
from torch import Tensor

from mini_vllm.model.attention import AttentionBackend, AttentionMetadata
from mini_vllm.model.attention_backends import make_backend
from mini_vllm.model.language_model import LanguageModel

BLOCK_SIZE = 4


class PagedSequence:
    """Token ids, how many of them are computed, the blocks that hold their keys, and the logits of each position."""

    def __init__(self, token_ids: list[int], blocks: list[int], final_length: int) -> None:
        self.token_ids, self.blocks, self.final_length = list(token_ids), blocks, final_length
        self.num_computed = 0
        self.logits: list[Tensor] = []

    @property
    def is_finished(self) -> bool:
        return len(self.token_ids) == self.final_length

    def next_chunk(self, chunk_size: int) -> range:
        """The positions of the next step: a chunk of the prompt, or the newest token."""
        return range(self.num_computed, min(len(self.token_ids), self.num_computed + chunk_size))

    def slot(self, position: int) -> int:
        return self.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


@torch.inference_mode()
def decode_greedily(
    model: LanguageModel, prompts: list[list[int]], *, num_tokens: int, chunk_size: int, backend: str = "reference"
) -> list[PagedSequence]:
    """Give every prompt `num_tokens` more tokens, in float32; short prompts decode while long ones still prefill.

    Returns:
        the sequences; `logits` has a row for each position but the last token's.
    """
    sequences = [PagedSequence(prompt, [], len(prompt) + num_tokens) for prompt in prompts]
    needed = [-(-sequence.final_length // BLOCK_SIZE) for sequence in sequences]
    shuffled = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)).tolist()
    for sequence, count in zip(sequences, needed, strict=True):
        sequence.blocks = [shuffled.pop() for _ in range(count)]
    dtype, device = torch.float32, torch.device("cpu")
    cache = make_backend(backend, "paged", BLOCK_SIZE, dtype, device, model.layer_specs)
    cache.allocate(model.layer_specs, sum(needed))
    while running := [sequence for sequence in sequences if not sequence.is_finished]:
        _step(model, cache, running, chunk_size)
    return sequences


def _step(model: LanguageModel, cache: AttentionBackend, running: list[PagedSequence], chunk_size: int) -> None:
    chunks = [sequence.next_chunk(chunk_size) for sequence in running]
    counts = [len(chunk) for chunk in chunks]
    widest = max(len(sequence.blocks) for sequence in running)
    contexts = [chunk.stop for chunk in chunks]
    metadata = AttentionMetadata(
        query_starts=torch.tensor([0, *counts]).cumsum(0).int(),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=torch.tensor([s.blocks + [0] * (widest - len(s.blocks)) for s in running], dtype=torch.int32),
        slot_mapping=torch.tensor([s.slot(p) for s, chunk in zip(running, chunks, strict=True) for p in chunk]),
        max_query_len=max(counts),
        max_context_len=max(contexts),
    )
    input_ids = torch.tensor([s.token_ids[p] for s, chunk in zip(running, chunks, strict=True) for p in chunk])
    positions = torch.tensor([p for chunk in chunks for p in chunk])
    logits = model.logits(model(input_ids, positions, cache.begin(metadata)))
    for sequence, chunk, rows in zip(running, chunks, logits.split(counts), strict=True):
        sequence.num_computed = chunk.stop
        sequence.logits += rows.unbind()
        if chunk.stop == len(sequence.token_ids):
            sequence.token_ids.append(int(rows[-1].argmax()))
