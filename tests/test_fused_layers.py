"""The layers in one call have the bits of the same layers piece by piece, whatever the step looks like.

The pieces are held against plain PyTorch in `test_cpu_kernels.py` and `test_attention_backends.py`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from engine_doubles import TINY_CONFIG
from torch import Tensor

from mini_vllm.kernels.cpu import ops
from mini_vllm.kernels.cpu.build import load_kernels
from mini_vllm.model.attention import AttentionMetadata
from mini_vllm.model.attention_backends.paged_cpu import PagedCpuAttention, PagedCpuBackend
from mini_vllm.model.cpu_layers import FastDecoderLayers, PackedLinear, use_cpu_kernels
from mini_vllm.model.transformer import Transformer
from mini_vllm.store.model_store import home

CPU = torch.device("cpu")
# New tokens and context of each sequence in one step.
STEPS = {
    "one token": [(1, 1)],
    "one token of a long sequence": [(1, 130)],
    "a batch of decodes": [(1, length) for length in (1, 16, 17, 63, 64, 65, 129, 200, 3, 90, 40, 41, 5, 150)],
    "more rows than one block takes": [(1, 20 + i) for i in range(64)],
    "decodes and short chunks, enough for two halves": [(1 if i % 3 else 5, 30 + i) for i in range(80)],
    "prefills, chunks and decodes": [(70, 70), (1, 50), (17, 117), (1, 1), (3, 64), (33, 33), (16, 200)],
    "unequal prefills": [(60, 60), (1, 9), (50, 90), (2, 30), (100, 130), (40, 40)],
    "so many rows that threads share them": [(200, 200), (1, 9), (190, 195), (150, 240)],
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "windows": {"sliding_windows": (20, None)},
    "one key head": {"num_kv_heads": 1, "head_dim": 12},
    "wide": {"hidden_size": 96, "intermediate_size": 160, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "capped": {"attention_softcap": 5.0},
    "many heads to a key head": {"num_heads": 10, "num_kv_heads": 2, "head_dim": 24, "sliding_windows": (1, 2)},
}


def fused_layers(dtype: torch.dtype, changes: dict[str, Any]) -> tuple[Transformer, FastDecoderLayers]:
    load_kernels(home())
    model = Transformer(replace(TINY_CONFIG, **changes), dtype=dtype).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    use_cpu_kernels(model)
    (layers,) = model.layers
    assert isinstance(layers, FastDecoderLayers)
    return model, layers


def metadata_of(step: list[tuple[int, int]], block_size: int) -> tuple[AttentionMetadata, Tensor, int]:
    """The step over shuffled blocks, the positions of its tokens, and how many blocks there are."""
    needed = [-(-length // block_size) for _, length in step]
    pool = np.random.default_rng(3).permutation(sum(needed)).astype(np.int32)
    tables = np.zeros((len(step), max(needed)), np.int32)
    slots, positions = [], []
    for row, ((new, length), start) in enumerate(zip(step, accumulate([0, *needed]), strict=False)):
        tables[row, : needed[row]] = pool[start : start + needed[row]]
        places = np.arange(length - new, length)
        positions.append(places)
        slots.append(tables[row][places // block_size].astype(np.int64) * block_size + places % block_size)
    metadata = AttentionMetadata(
        query_starts=torch.tensor([0, *accumulate(new for new, _ in step)], dtype=torch.int32),
        context_lens=torch.tensor([length for _, length in step], dtype=torch.int32),
        block_tables=torch.from_numpy(tables),
        slot_mapping=torch.from_numpy(np.concatenate(slots)),
        max_query_len=max(new for new, _ in step),
        max_context_len=max(length for _, length in step),
    )
    return metadata, torch.from_numpy(np.concatenate(positions)), sum(needed)


def filled_backend(model: Transformer, block_size: int, num_blocks: int, dtype: torch.dtype) -> PagedCpuBackend:
    """A pool that holds something everywhere, as if all earlier tokens had been computed."""
    backend = PagedCpuBackend(block_size, dtype, CPU)
    backend.allocate(model.layer_specs, num_blocks)
    generator = torch.Generator().manual_seed(2)
    for cache in (*backend._keys, *backend._values):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    return backend


def by_pieces(layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor, plan: PagedCpuAttention) -> Tensor:
    """A layer by single kernels; the residual is added before a product is rounded, as in the layers together."""
    attention, mlp = layer.attention, layer.mlp
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    qkv = attention.qkv_proj(layer.input_norm(hidden)).view(len(hidden), heads + 2 * kv_heads, -1)
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    ops.rotate_(query, cos, sin)
    ops.rotate_(key, cos, sin)
    hidden = with_residual(attention.o_proj, plan(attention.layer, query, key, value).flatten(1), hidden)
    inner = ops.silu_and_mul(mlp.gate_up_proj(layer.post_attention_norm(hidden)))
    return with_residual(mlp.down_proj, inner, hidden)


def with_residual(linear: PackedLinear, x: Tensor, residual: Tensor) -> Tensor:
    return ops.linear(x, linear.packed, linear.out_features, linear.bias, residual)


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_same(dtype: torch.dtype, shape: str, step: str, block_size: int, *, only_last_tokens: bool = False) -> None:
    model, fused = fused_layers(dtype, SHAPES[shape])
    metadata, positions, num_blocks = metadata_of(STEPS[step], block_size)
    metadata = replace(metadata, only_last_tokens=only_last_tokens)
    backends = [filled_backend(model, block_size, num_blocks, dtype) for _ in range(2)]
    width = model.config.hidden_size
    hidden = torch.randn(len(positions), width, generator=torch.Generator().manual_seed(5)).to(dtype)
    given = hidden.clone()
    cos, sin = model.rotaries[0](positions, dtype)
    with torch.inference_mode():
        together = fused(hidden, cos, sin, backends[0].begin(metadata))
        apart, plan = hidden.clone(), backends[1].begin(metadata)
        for layer in fused.layers:
            apart = by_pieces(layer, apart, cos, sin, plan)
    assert torch.isfinite(apart).all() and apart.float().std() > 0.5
    read = metadata.query_starts[1:].long() - 1 if only_last_tokens else slice(None)
    assert torch.equal(together[read], apart[read])
    assert torch.equal(hidden, given), "what was given is changed"
    for one, other in zip(
        backends[0]._keys + backends[0]._values, backends[1]._keys + backends[1]._values, strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_step_has_the_bits_of_the_pieces(dtype: torch.dtype, step: str, num_threads: int) -> None:
    for shape in SHAPES:
        assert_same(dtype, shape, step, 16)


@pytest.mark.parametrize("step", STEPS)
def test_where_only_last_tokens_are_read_they_and_all_keys_are_the_same(step: str, num_threads: int) -> None:
    for shape in ("wide", "windows", "one key head"):
        for dtype in (torch.float32, torch.bfloat16):
            assert_same(dtype, shape, step, 16, only_last_tokens=True)


@pytest.mark.parametrize("block_size", [1, 4, 32, 128])
def test_blocks_of_any_size_do(block_size: int, num_threads: int) -> None:
    for step in STEPS:
        assert_same(torch.bfloat16, "wide", step, block_size)


def test_what_one_thread_leaves_to_another_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than cores and many layers: some thread is always late, and the others take over what it has."""
    layers = {"num_layers": 24, "sliding_windows": (None,) * 24, "ropes": TINY_CONFIG.ropes[:1] * 24}
    monkeypatch.setitem(SHAPES, "deep", layers)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for step in ("more rows than one block takes", "decodes and short chunks, enough for two halves"):
            for _ in range(3):
                assert_same(torch.bfloat16, "deep", step, 16)
    finally:
        torch.set_num_threads(before)


def changed(metadata: AttentionMetadata, name: str, value: Any) -> AttentionMetadata:
    tensor: Tensor = getattr(metadata, name)
    return replace(metadata, **{name: torch.tensor(value, dtype=tensor.dtype)})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("block_tables", [[0, 1, 2]], "a table for each of 2 sequences"),
        ("context_lens", [20, 49], "sequence 1 has 49 keys, its table has room for 48"),
        ("context_lens", [2, 40], "sequence 0 has 3 tokens in a context of 2"),
        ("query_starts", [1, 3, 4], "query_starts must go from 0 to the 4 tokens"),
        ("query_starts", [0, 3, 5], "query_starts must go from 0 to the 4 tokens"),
        ("query_starts", [0, 4, 4], "sequence 1 has 0 tokens"),
        ("block_tables", [[0, 1, 9], [2, 3, 5]], "sequence 1 has block 5, there are 5"),
        ("block_tables", [[-1, 1, 9], [2, 3, 4]], "sequence 0 has block -1"),
        ("slot_mapping", [17, 18, 19, 80], "slot 80 lies outside of 80"),
        ("slot_mapping", [17, 18, 19], "slot_mapping must have 4 entries, got 3"),
    ],
)
def test_a_step_that_does_not_fit_its_pool_is_refused(name: str, value: Any, message: str) -> None:
    model, fused = fused_layers(torch.float32, {})
    good, positions, num_blocks = metadata_of([(3, 20), (1, 40)], 16)
    good = changed(good, "block_tables", [[0, 1, 9], [2, 3, 4]])  # the 9 stands behind the last key
    bad = changed(good, name, value)
    hidden = torch.zeros(4, model.config.hidden_size)
    cos, sin = model.rotaries[0](positions, torch.float32)
    heads = torch.zeros(4, model.config.num_heads + 2 * model.config.num_kv_heads, model.config.head_dim)
    query, key, value_heads = heads.split([model.config.num_heads, *(model.config.num_kv_heads,) * 2], dim=1)
    for metadata in (good, bad):
        backend = filled_backend(model, 16, num_blocks, torch.float32)

        def by_layers(plan: PagedCpuAttention) -> Tensor:
            return fused(hidden, cos, sin, plan)

        def by_attention(plan: PagedCpuAttention) -> Tensor:
            return plan(0, query, key, value_heads)

        for call in (by_layers, by_attention):
            if metadata is good:
                call(backend.begin(metadata))
            else:
                with pytest.raises(RuntimeError, match=message):
                    call(backend.begin(metadata))


def test_layers_that_differ_are_not_joined() -> None:
    """A width that makes no whole panels, or other angles, stands alone."""
    load_kernels(home())
    odd = Transformer(replace(TINY_CONFIG, intermediate_size=48))
    use_cpu_kernels(odd)
    assert not any(isinstance(layer, FastDecoderLayers) for layer in odd.layers)
    first, second = TINY_CONFIG.ropes
    angles = Transformer(replace(TINY_CONFIG, ropes=(first, replace(second, theta=500.0))))
    use_cpu_kernels(angles)
    assert [len(layer.layers) for layer in angles.layers if isinstance(layer, FastDecoderLayers)] == [1, 1]
    assert angles.rotary_of_layer == [0, 1]
