"""The C++ kernels against plain PyTorch, and a row's bits against the same row in other company.

Attention against plain attention in float64, over ragged mixed steps and shuffled blocks, is in
`test_attention_backends.py`; whole engines are in `test_equality_bits.py`.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_doubles import tiny_transformer
from torch import Tensor
from torch.nn import functional

from mini_vllm.errors import KernelBuildError
from mini_vllm.kernels.cpu import build, ops
from mini_vllm.model.attention import AttentionLayerSpec, AttentionMetadata
from mini_vllm.model.attention_backends import make_backend
from mini_vllm.model.cpu_layers import FastApplyRotary, FastRMSNorm, PackedHead, PackedLinear, use_cpu_kernels
from mini_vllm.model.exactness import is_exact
from mini_vllm.model.layers import Linear, RMSNorm, SiluAndMul
from mini_vllm.model.onednn_linear import OneDnnHead, OneDnnLinear
from mini_vllm.model.rotary import ApplyRotary
from mini_vllm.store.model_store import home

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 2, 3, 7, 12, 13, 25, 64, 241, 500]


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    build.load_kernels(home())


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_linear(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> Linear:
    layer = Linear(inputs, outputs, bias=bias, dtype=dtype, device=CPU)
    layer.weight.copy_(random(outputs, inputs, dtype=dtype, seed=1))
    if layer.bias is not None:
        layer.bias.copy_(random(outputs, dtype=dtype, seed=2))
    return layer


def assert_close(actual: Tensor, exact: Tensor, inputs: int) -> None:
    """Equal to a result in float64, up to rounding: `inputs` times in the sum, and once to the tensor's dtype."""
    torch.testing.assert_close(
        actual.double(),
        exact,
        rtol=torch.finfo(actual.dtype).eps,
        atol=2 * inputs * torch.finfo(torch.float32).eps + torch.finfo(actual.dtype).tiny,
    )


# ---- linear ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (2, 1), (34, 33), (130, 47), (256, 515)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_the_product_rounded_once(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
    layer = make_linear(inputs, outputs, bias, dtype)
    packed = PackedLinear(layer)
    for rows in ROWS:
        x = random(rows, inputs, dtype=dtype, seed=rows)
        exact = functional.linear(
            x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double()
        )
        assert_close(packed(x), exact, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_takes_rows_that_lie_apart_and_adds_a_residual(dtype: torch.dtype) -> None:
    layer = make_linear(48, 40, True, dtype)
    wide, residual = random(9, 3, 64, dtype=dtype), random(9, 40, dtype=dtype, seed=5)
    x = wide[:, 1, 8:56]
    exact = functional.linear(x.double(), layer.weight.double(), layer.bias.double()) + residual.double()
    packed = ops.pack_linear(layer.weight)
    assert_close(ops.linear(x, packed, 40, layer.bias, residual), exact, 48)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_not_rounded_to_the_models_dtype(dtype: torch.dtype) -> None:
    weight, x = random(300, 64, dtype=dtype), random(5, 64, dtype=dtype, seed=1)
    logits = PackedHead(weight)(x)
    assert logits.dtype == torch.float32
    assert_close(logits, x.double() @ weight.double().T, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs", [64, 1536])
def test_a_row_of_a_linear_layer_has_the_same_bits_among_any_others(inputs: int, dtype: torch.dtype) -> None:
    packed = PackedLinear(make_linear(inputs, 96, True, dtype))
    row = random(1, inputs, dtype=dtype, seed=7)
    alone = packed(row)
    for rows in ROWS:
        for place in {0, rows // 2, rows - 1}:
            x = random(rows, inputs, dtype=dtype, seed=rows)
            x[place] = row
            assert torch.equal(packed(x)[place], alone[0]), (rows, place)


@pytest.mark.parametrize("rows", ROWS)
def test_onednn_linear_is_close_to_plain_and_does_not_depend_on_the_batch(rows: int) -> None:
    """Used where there are matrix units. The bits are promised for those; here the values are held."""
    dtype = torch.bfloat16
    layer = make_linear(64, 96, True, dtype)
    x = random(rows, 64, dtype=dtype, seed=rows)
    assert_close(OneDnnLinear(layer)(x), functional.linear(x.double(), layer.weight.double(), layer.bias.double()), 64)
    assert_close(OneDnnHead(layer.weight)(x), x.double() @ layer.weight.double().T, 64)
    assert torch.equal(OneDnnLinear(layer)(x)[:1], OneDnnLinear(layer)(x[:1]))


# ---- element by element ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 16, 33, 576])
def test_rms_norm_is_that_of_the_reference(width: int, dtype: torch.dtype) -> None:
    twin = RMSNorm(width, 1e-5, dtype=dtype, device=CPU)
    twin.weight.copy_(random(width, dtype=dtype, seed=3))
    fast = FastRMSNorm(twin)
    x = random(70, width, dtype=dtype) * 3
    # Where the two round to different sides, they differ by one place of the quotient, then by one of the product.
    torch.testing.assert_close(fast(x), twin(x), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    heads = random(5, 9, width, dtype=dtype)[:, 2:6]
    torch.testing.assert_close(fast(heads), twin(heads), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(fast(x)[3:4], fast(x[3:4]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 96])
def test_rotary_turns_queries_and_keys_where_they_lie(head_dim: int, dtype: torch.dtype) -> None:
    heads = random(21, 6, head_dim, dtype=dtype)
    angles = random(21, 1, head_dim // 2, dtype=torch.float32, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    query, key, _ = heads.split([3, 2, 1], dim=1)
    wide = [part.double() for part in (query, key, cos, sin)]
    exact_query, exact_key = ApplyRotary()(*wide)
    value = heads[:, 5].clone()
    query, key = FastApplyRotary()(query, key, cos, sin)
    assert_close(query, exact_query, 2)
    assert_close(key, exact_key, 2)
    assert torch.equal(heads[:, 5], value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [4, 16, 1536])
def test_silu_and_mul_is_that_of_the_reference(width: int, dtype: torch.dtype) -> None:
    gate_up = random(19, 2 * width, dtype=dtype) * 4
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = 120.0, -120.0, 0.0  # where exp overflows, underflows, is 1
    exact = SiluAndMul()(gate_up.double())
    torch.testing.assert_close(
        ops.silu_and_mul(gate_up).double(), exact, rtol=torch.finfo(dtype).eps + 1e-6, atol=1e-30
    )


REFERENCES = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("width", [1, 17, 128])
def test_activations_are_those_of_the_reference_for_rows_that_lie_apart(
    name: ops.ActivationName, width: int, dtype: torch.dtype
) -> None:
    x = (random(19, 2 * width, dtype=dtype) * 4)[:, :width]
    x[0, 0], x[1, 0], x[2, 0] = 120.0, -120.0, 0.0  # where exp overflows, underflows, is 1
    exact = REFERENCES[name](x.double())
    result = ops.activate(x, name)
    torch.testing.assert_close(result.double(), exact, rtol=torch.finfo(dtype).eps + 1e-6, atol=2e-7)
    for row in range(len(x)):
        assert torch.equal(ops.activate(x[row : row + 1], name), result[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_the_other_activations_leave_every_nan_what_it_is(dtype: torch.dtype) -> None:
    bits = [0x7FFFFFFF, 0x7F800001 | 1 << 16, 0x7FC00001, 0x7FC000FF, 0xFFC10000 - (1 << 32)]
    x = torch.tensor(bits, dtype=torch.int32).view(torch.float32)[:, None].to(dtype)
    for name in REFERENCES:
        assert ops.activate(x, name).isnan().all()
    assert ops.silu_and_mul(torch.cat([x, torch.ones_like(x)], dim=1)).isnan().all()


# ---- attention -------------------------------------------------------------------------------------------------------

SHAPES = [
    AttentionLayerSpec(4, 4, 8, 0.3),
    AttentionLayerSpec(9, 3, 64, 0.125),
    AttentionLayerSpec(8, 1, 80, 0.1),
    AttentionLayerSpec(4, 2, 128, 0.09, sliding_window=70),
    AttentionLayerSpec(6, 2, 48, 0.2, softcap=3.0),
]


def attend(layer: AttentionLayerSpec, tensors: list[Tensor], cuts: list[int], block_size: int, poison: bool) -> Tensor:
    """Attention of one sequence, computed in the chunks that end at `cuts`, beside a second one of other length."""
    length = len(tensors[0])
    backend = make_backend("cpu", "paged", block_size, tensors[0].dtype, CPU)
    needed = -(-length // block_size)
    backend.allocate([layer], 2 * needed + 1)
    if poison:
        for cache in (backend._keys[0], backend._values[0]):
            cache.fill_(float("nan"))
            if layer.head_dim % 16:  # the padding of a head is zero and stays so
                pytest.skip("the pool of a padded head is never all NaN")
    table = np.random.default_rng(block_size).permutation(2 * needed + 1).astype(np.int32)
    other, own = table[:1], table[1 : needed + 1]
    outputs = []
    for start, end in zip([0, *cuts[:-1]], cuts, strict=True):
        positions = np.arange(start, end)
        slots = own[positions // block_size].astype(np.int64) * block_size + positions % block_size
        tables = np.zeros((2, needed), np.int32)
        tables[0, 0], tables[1] = other[0], own
        metadata = AttentionMetadata(
            query_starts=torch.tensor([0, 1, 1 + end - start], dtype=torch.int32),
            context_lens=torch.tensor([1, end], dtype=torch.int32),
            block_tables=torch.from_numpy(tables),
            slot_mapping=torch.tensor([int(other[0]) * block_size, *slots.tolist()]),
            max_query_len=end - start,
            max_context_len=end,
        )
        step = [torch.cat([tensor[:1], tensor[start:end]]) for tensor in tensors]
        outputs.append(backend.begin(metadata)(0, *step)[1:])
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", SHAPES, ids=str)
def test_attention_has_the_same_bits_in_prefill_in_chunks_in_decode_and_for_every_block_size(
    layer: AttentionLayerSpec, dtype: torch.dtype
) -> None:
    length = 150
    tensors = [
        random(length, heads, layer.head_dim, dtype=dtype, seed=seed)
        for seed, heads in enumerate((layer.num_heads, layer.num_kv_heads, layer.num_kv_heads))
    ]
    whole = attend(layer, tensors, [length], 16, poison=False)
    assert torch.isfinite(whole).all()
    for block_size in (1, 2, 8, 16, 32, 64):
        for cuts in ([length], list(range(1, length + 1)), [7, 64, 65, 130, length]):
            assert torch.equal(attend(layer, tensors, cuts, block_size, poison=False), whole), (block_size, cuts[:3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 16])
def test_what_was_in_a_block_before_never_matters(block_size: int, dtype: torch.dtype) -> None:
    layer = SHAPES[1]
    tensors = [random(70, heads, 64, dtype=dtype, seed=heads) for heads in (9, 3, 3)]
    for cuts in ([70], [33, 34, 35, 70]):
        clean, poisoned = (attend(layer, tensors, cuts, block_size, poison) for poison in (False, True))
        assert torch.equal(clean, poisoned)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_how_large_scores_are_never_matters(dtype: torch.dtype) -> None:
    """Of scores over 2^30 the rounding is larger than any exponent of a float."""
    layer = SHAPES[1]
    for seed in range(10):
        query, key = (random(70, heads, 64, dtype=dtype, seed=seed + heads) * 1e5 for heads in (9, 3))
        attended = attend(layer, [query, key, torch.ones(70, 3, 64, dtype=dtype)], [70], 16, poison=False)
        torch.testing.assert_close(attended, torch.ones_like(attended), rtol=0.01, atol=0)


# ---- a whole model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["recompute", "cpu"])
def test_a_model_on_the_kernels_has_the_logits_of_the_plain_one(backend: str) -> None:
    plain, fast = tiny_transformer(seed=5), tiny_transformer(seed=5)
    use_cpu_kernels(fast)
    token_ids = torch.tensor(list(b"what a model says does not depend on who multiplies"))
    length = len(token_ids)
    metadata = AttentionMetadata(
        query_starts=torch.tensor([0, length], dtype=torch.int32),
        context_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.arange(length),
        max_query_len=length,
        max_context_len=length,
    )
    logits = []
    for model, name in ((plain, "recompute"), (fast, backend)):
        attention = make_backend(name, "paged" if name == "cpu" else "none", 64, torch.float32, CPU)
        attention.allocate(model.layer_specs, 1)
        with torch.inference_mode():
            logits.append(model.logits(model(token_ids, torch.arange(length), attention.begin(metadata))))
    assert logits[0].std() > 1
    torch.testing.assert_close(logits[1], logits[0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_doctors_trial_finds_this_processor_exact(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_exact(dtype)
    # A layer that looks at how many rows there are is found out.
    honest = ops.rms_norm
    monkeypatch.setattr(ops, "rms_norm", lambda x, weight, eps: honest(x, weight, eps) * (1 + 0.01 * (len(x) == 80)))
    assert not is_exact(dtype)


# ---- building and choosing -------------------------------------------------------------------------------------------


def test_only_modules_with_a_twin_are_swapped() -> None:
    model = torch.nn.ModuleDict(
        {"a": make_linear(8, 8, False, torch.float32), "odd": make_linear(7, 8, False, torch.float32)}
    )
    use_cpu_kernels(model)
    assert isinstance(model["a"], PackedLinear)
    assert type(model["odd"]) is Linear


def test_without_a_compiler_the_reason_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "kernels_are_loaded", lambda: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler \(no-such-compiler\); install g\+\+ or set CXX"):
        build.load_kernels(tmp_path)
    assert not list((tmp_path / "kernels").glob("*")) if (tmp_path / "kernels").exists() else True


def test_a_failed_build_leaves_a_note_alone_and_says_where_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "kernels_are_loaded", lambda: False)
    monkeypatch.setenv(build.FLAGS_VARIABLE, "-march=no-such-processor")
    with pytest.raises(KernelBuildError, match=r"do not compile with .*error"):
        build.load_kernels(tmp_path)
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".failed"]


def test_a_folder_that_takes_nothing_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "kernels_are_loaded", lambda: False)
    (tmp_path / "kernels").write_text("a file where the folder should be")
    with pytest.raises(KernelBuildError, match=r"cannot be kept under .*kernels: .*File exists"):
        build.load_kernels(tmp_path, is_demanded=False)


def test_a_compiler_that_failed_is_tried_again_only_if_it_changed_or_is_demanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, compiler = tmp_path / "tries", tmp_path / "compiler"

    def write_compiler(version: str) -> None:
        compiler.write_text(f"""#!/bin/sh
if [ "$1" = --version ]; then echo "fake {version}"; exit 0; fi
echo x >> {tries}; echo "error: it is broken" >&2; exit 1
""")
        compiler.chmod(0o755)

    def num_tries_after(message: str, *, is_demanded: bool = False) -> int:
        with pytest.raises(KernelBuildError, match=message):
            build.load_kernels(tmp_path / "home", is_demanded=is_demanded)
        return len(tries.read_text().split())

    monkeypatch.setattr(build, "kernels_are_loaded", lambda: False)
    monkeypatch.setenv("CXX", str(compiler))
    write_compiler("1")
    assert num_tries_after("do not compile with .*: error: it is broken$") == 1
    assert num_tries_after("error: it is broken .*earlier start; kernels='cpu' .* tries again") == 1
    assert num_tries_after("error: it is broken$", is_demanded=True) == 2
    write_compiler("2")
    assert num_tries_after("error: it is broken$") == 3
    monkeypatch.setenv(build.FLAGS_VARIABLE, "-march=another")
    assert num_tries_after("error: it is broken$") == 4


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags name an x86 instruction set")
def test_the_kernels_are_right_without_avx512_too() -> None:
    """The same source for processors with AVX2 only, in a process of its own: operators are registered once."""
    if os.environ.get(build.FLAGS_VARIABLE):
        pytest.skip("this is that process")
    chosen = [
        "linear",
        "rms_norm",
        "rotary",
        "silu",
        "same_bits",
        "never_matters",
        "any_size",
        "best_outputs",
        "few_outputs",
    ]
    files = [__file__, *(str(Path(__file__).with_name(f"test_{name}.py")) for name in ("fused_layers", "head_screen"))]
    command = [sys.executable, "-m", "pytest", "-q", *files, "-p", "no:cacheprovider", "-k", " or ".join(chosen)]
    environment = {**os.environ, build.FLAGS_VARIABLE: "-march=x86-64-v3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_sizes_that_do_not_match_are_refused_and_not_read_past_their_end() -> None:
    x = torch.ones(2, 6)
    packed = ops.pack_linear(torch.ones(5, 6))
    with pytest.raises(RuntimeError, match="panels"):
        ops.linear(x, packed, 100)
    with pytest.raises(RuntimeError, match="bias must be"):
        ops.linear(x, packed, 5, torch.ones(1))
    with pytest.raises(RuntimeError, match="weight must be"):
        ops.rms_norm(x, torch.ones(1), 1e-6)
