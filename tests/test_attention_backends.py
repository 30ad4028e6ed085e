"""Every attention backend gives what plain attention over each sequence's own history gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mini_vllm.cache.block_manager import BlockCopy
from mini_vllm.errors import InvalidConfigError
from mini_vllm.model import attention_backends
from mini_vllm.model.attention import AttentionLayerSpec, AttentionMetadata
from mini_vllm.model.attention_backends import make_backend
from mini_vllm.model.attention_backends.contiguous import ContiguousBackend
from mini_vllm.model.attention_backends.paged_reference import PagedReferenceBackend

CPU = torch.device("cpu")


def plain_attention(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayerSpec) -> Tensor:
    """Attention written out in float64 for one sequence: the last Q of K positions. The oracle."""
    group = layer.num_heads // layer.num_kv_heads
    key, value = key.repeat_interleave(group, 1).double(), value.repeat_interleave(group, 1).double()
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    position = torch.arange(len(key))
    distance = (position[None, :] - position[len(key) - len(query) :, None]).neg()  # [Q, K]
    visible = (distance >= 0) & (distance < (layer.sliding_window or len(key)))
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).float()


class History:
    """Sequences with random keys and values, and the steps in which a backend meets them."""

    def __init__(self, lengths: list[int], layer: AttentionLayerSpec, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.layer = layer
        self.queries = [torch.randn(n, layer.num_heads, layer.head_dim, generator=draw) for n in lengths]
        self.keys = [torch.randn(n, layer.num_kv_heads, layer.head_dim, generator=draw) for n in lengths]
        self.values = [torch.randn(n, layer.num_kv_heads, layer.head_dim, generator=draw) for n in lengths]

    def expected(self, sequence: int, start: int, end: int) -> Tensor:
        keys, values = self.keys[sequence][:end], self.values[sequence][:end]
        return plain_attention(self.queries[sequence][start:end], keys, values, self.layer)


def run_step(backend, history: History, tables: list[list[int]], block_size: int, spans: list[tuple[int, int, int]]):
    """Compute positions [start, end) of some sequences in one step. Returns the backend's output, cut by sequence."""
    width = max(len(table) for table in tables)
    rows = np.array([tables[s] + [0] * (width - len(tables[s])) for s, _, _ in spans], np.int32)
    slots = [tables[s][p // block_size] * block_size + p % block_size for s, a, b in spans for p in range(a, b)]
    counts = [b - a for _, a, b in spans]
    metadata = AttentionMetadata(
        query_starts=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        context_lens=torch.tensor([b for _, _, b in spans], dtype=torch.int32),
        block_tables=torch.from_numpy(rows),
        slot_mapping=torch.tensor(slots),
        max_query_len=max(counts),
        max_context_len=max(b for _, _, b in spans),
    )
    flat = [
        torch.cat([tensors[s][a:b] for s, a, b in spans]) for tensors in (history.queries, history.keys, history.values)
    ]
    return backend.begin(metadata)(0, *flat).split(counts)


LAYERS = [
    AttentionLayerSpec(4, 4, 8, 8**-0.5),
    AttentionLayerSpec(4, 2, 8, 8**-0.5),
    AttentionLayerSpec(6, 1, 16, 0.1),
    AttentionLayerSpec(4, 2, 8, 8**-0.5, sliding_window=5),
    AttentionLayerSpec(4, 1, 8, 8**-0.5, sliding_window=1),
    AttentionLayerSpec(4, 2, 8, 1.0, softcap=2.0),
    AttentionLayerSpec(6, 1, 16, 0.5, sliding_window=7, softcap=1.5),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_paged_attention_equals_plain_attention_for_ragged_mixed_steps(
    layer: AttentionLayerSpec, block_size: int, name: str
) -> None:
    lengths = [37, 9, 1, 600]
    history = History(lengths, layer, seed=block_size)
    # Blocks handed out in a shuffled order, so that no table is contiguous.
    needed = [-(-n // block_size) for n in lengths]
    shuffled = np.random.default_rng(1).permutation(sum(needed) + 3).tolist()
    tables = [[shuffled.pop() for _ in range(count)] for count in needed]
    backend = make_backend(name, "paged", block_size, torch.float32, CPU)
    backend.allocate([layer], sum(needed) + 3)
    steps = [
        [(0, 0, 20), (1, 0, 8), (2, 0, 1)],  # three fresh prefills, one of a single token
        [(1, 8, 9), (0, 20, 36), (3, 0, 300)],  # a decode, a chunk with a prefix, a fresh prefill longer than a piece
        [(3, 300, 599), (0, 36, 37)],  # a chunk of more than one piece with a prefix, a decode
        [(3, 599, 600)],
    ]
    for spans in steps:
        outputs = run_step(backend, history, tables, block_size, spans)
        for (sequence, start, end), output in zip(spans, outputs, strict=True):
            torch.testing.assert_close(output, history.expected(sequence, start, end), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_contiguous_equals_plain_attention(layer: AttentionLayerSpec) -> None:
    history = History([30, 12], layer, seed=3)
    backend = make_backend("contiguous", "contiguous", 32, torch.float32, CPU)
    backend.allocate([layer], 3)
    for spans in ([(0, 0, 17), (1, 0, 11)], [(1, 11, 12), (0, 17, 29)], [(0, 29, 30)]):
        outputs = run_step(backend, history, [[2], [0]], 32, spans)
        for (sequence, start, end), output in zip(spans, outputs, strict=True):
            torch.testing.assert_close(output, history.expected(sequence, start, end), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_recompute_equals_plain_attention(layer: AttentionLayerSpec) -> None:
    history = History([30, 12], layer, seed=4)
    backend = make_backend("recompute", "none", 32, torch.float32, CPU)
    backend.allocate([layer], 2)
    outputs = run_step(backend, history, [[0], [1]], 32, [(0, 0, 30), (1, 0, 12)])
    for sequence, output in enumerate(outputs):
        end = len(history.keys[sequence])
        torch.testing.assert_close(output, history.expected(sequence, 0, end), atol=2e-5, rtol=1e-4)


def test_what_lies_in_the_blocks_of_others_never_matters() -> None:
    """Blocks that are not a sequence's own hold NaN, as after a failed request; no NaN may come through the padding."""
    layer = LAYERS[1]
    history = History([9, 2], layer, seed=5)
    backend = make_backend("reference", "paged", 4, torch.float32, CPU)
    backend.allocate([layer], 6)
    for tensor in (*backend._cache.keys, *backend._cache.values):
        tensor[:6] = torch.nan
    tables = [[5, 1, 3], [0]]
    run_step(backend, history, tables, 4, [(0, 0, 8), (1, 0, 1)])
    outputs = run_step(backend, history, tables, 4, [(0, 8, 9), (1, 1, 2)])
    torch.testing.assert_close(outputs[0], history.expected(0, 8, 9), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(outputs[1], history.expected(1, 1, 2), atol=2e-5, rtol=1e-4)


def test_copied_blocks_hold_the_same_keys_and_values() -> None:
    layer = LAYERS[1]
    history = History([6], layer, seed=6)
    backend = make_backend("reference", "paged", 4, torch.float32, CPU)
    backend.allocate([layer], 5)
    run_step(backend, history, [[1, 2]], 4, [(0, 0, 5)])
    backend.copy_blocks([BlockCopy(source=2, target=4), BlockCopy(source=4, target=0)])
    output = run_step(backend, history, [[1, 0]], 4, [(0, 5, 6)])[0]
    torch.testing.assert_close(output, history.expected(0, 5, 6), atol=2e-5, rtol=1e-4)


def test_block_bytes_counts_keys_and_values_of_all_layers() -> None:
    backend = make_backend("auto", "paged", 16, torch.bfloat16, CPU)
    assert backend.block_bytes([LAYERS[0], LAYERS[1]]) == 2 * 16 * 2 * (4 * 8 + 2 * 8)


def test_a_pool_takes_memory_only_where_it_is_written() -> None:
    """Two gigabytes are allocated; the process must not grow by a tenth of that."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("resident memory is read from /proc")

    def resident_bytes() -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmRSS")) * 1024

    before = resident_bytes()
    backend = make_backend("reference", "paged", 16, torch.bfloat16, CPU)
    backend.allocate([LAYERS[0]] * 4, 2**31 // backend.block_bytes([LAYERS[0]] * 4))
    assert resident_bytes() - before < 2**31 // 10


@pytest.mark.parametrize(("name", "cache"), [("nonsense", "paged"), ("contiguous", "paged"), ("reference", "none")])
def test_a_backend_that_does_not_fit_is_refused(name: str, cache: str) -> None:
    with pytest.raises(InvalidConfigError, match=name) as error:
        make_backend(name, cache, 16, torch.float32, CPU)
    assert error.value.field == "attention_backend"


def test_a_backend_refuses_layers_that_it_does_not_implement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedReferenceBackend, "lacks", staticmethod(_no_softcap))
    make_backend("reference", "paged", 16, torch.float32, CPU, [AttentionLayerSpec(4, 2, 8, 1.0)])
    with pytest.raises(InvalidConfigError, match="'reference' does not implement score capping") as error:
        make_backend("reference", "paged", 16, torch.float32, CPU, [AttentionLayerSpec(4, 2, 8, 1.0, softcap=2.0)])
    assert error.value.field == "attention_backend"


def test_auto_passes_over_a_backend_that_does_not_implement_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContiguousBackend, "lacks", staticmethod(_no_softcap))
    monkeypatch.setitem(attention_backends._AUTOMATIC, "paged", ("contiguous", "reference"))
    monkeypatch.setitem(attention_backends._MODULES, "contiguous", ("paged", "contiguous", "ContiguousBackend"))
    plain, capped = AttentionLayerSpec(4, 2, 8, 1.0), AttentionLayerSpec(4, 2, 8, 1.0, softcap=2.0)
    chosen = [make_backend("auto", "paged", 16, torch.float32, CPU, layers) for layers in ([plain], [plain, capped])]
    assert [type(backend) for backend in chosen] == [ContiguousBackend, PagedReferenceBackend]


def _no_softcap(layers: Sequence[AttentionLayerSpec]) -> str | None:
    return "score capping" if any(layer.softcap is not None for layer in layers) else None
