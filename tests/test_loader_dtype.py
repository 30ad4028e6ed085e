"""Which dtype runs, on processors that can and cannot multiply bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import build_tiny_model, our_logits, some_tokens

from mini_vllm.errors import InvalidConfigError
from mini_vllm.model import dtype as dtype_module
from mini_vllm.model.dtype import bfloat16_feature, processor_features, resolve_dtype
from mini_vllm.model.loader import load_model
from mini_vllm.store.model_store import ModelFiles

SAPPHIRE_RAPIDS = "processor\t: 0\nflags\t\t: fpu vme avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n\nprocessor\t: 1\n"
SKYLAKE = "processor\t: 0\nmodel name\t: a bf16 b\nflags\t\t: fpu vme avx2 avx512f\n"
GRAVITON3 = "processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\n"


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What Linux says of the processor, to be written by the test; absent at first."""
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(dtype_module, "_CPU_INFO", path)
    return path


@pytest.mark.parametrize(
    ("text", "feature"), [(SAPPHIRE_RAPIDS, "amx_bf16"), (SKYLAKE, None), (GRAVITON3, "bf16"), ("", None)]
)
def test_auto_on_a_cpu_is_bfloat16_where_the_processor_multiplies_it(cpu: Path, text: str, feature: str | None) -> None:
    cpu.write_text(text)
    choice = resolve_dtype("auto", "cpu", "float16")
    assert bfloat16_feature() == feature
    assert choice.dtype is (torch.bfloat16 if feature else torch.float32)
    assert choice.reason == (
        f"the processor multiplies bfloat16 ({feature})"
        if feature
        else "the processor does not say that it multiplies bfloat16"
    )


def test_without_linux_pytorch_is_asked(cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {"avx2": True, "avx512_bf16": True, "amx_bf16": False, "architecture": "x86_64", "l2_cache_size": 1}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert processor_features() == {"avx2", "avx512_bf16"}
    assert bfloat16_feature() == "avx512_bf16"
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert processor_features() == frozenset()
    assert resolve_dtype("auto", "cpu").dtype is torch.float32


@pytest.mark.parametrize(
    ("capability", "checkpoint", "expected"),
    [
        ((8, 0), "bfloat16", torch.bfloat16),
        ((9, 0), "float16", torch.bfloat16),
        ((7, 5), "float16", torch.float16),
        ((7, 5), "bfloat16", torch.float32),
        ((7, 5), None, torch.float32),
    ],
)
def test_auto_on_a_gpu_never_squeezes_a_bfloat16_checkpoint_into_float16(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], checkpoint: str | None, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert resolve_dtype("auto", "cuda:0", checkpoint).dtype is expected


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_dtype_asked_for_by_name_is_the_one_that_runs(cpu: Path, name: str, device: str) -> None:
    choice = resolve_dtype(name, device, "bfloat16")
    assert choice.dtype is getattr(torch, name)
    assert choice.reason.startswith("as asked")


def test_the_reason_says_when_a_named_dtype_may_disappoint(cpu: Path) -> None:
    cpu.write_text(SKYLAKE)
    assert "may overflow" in resolve_dtype("float16", "cpu", "bfloat16").reason
    assert "slower" in resolve_dtype("float16", "cpu", "float16").reason
    assert "slow" in resolve_dtype("bfloat16", "cpu").reason
    cpu.write_text(SAPPHIRE_RAPIDS)
    assert resolve_dtype("bfloat16", "cpu").reason == "as asked"


def test_another_dtype_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="got 'half'") as caught:
        resolve_dtype("half", "cpu")
    assert caught.value.field == "dtype"


@pytest.mark.parametrize(("name", "tolerance"), [("float16", 0.1), ("bfloat16", 0.8)])
def test_sixteen_bit_dtypes_run_on_a_cpu(tmp_path: Path, name: str, tolerance: float) -> None:
    tiny = build_tiny_model(tmp_path, "LlamaForCausalLM")
    loaded = load_model(ModelFiles("tiny", tmp_path, "safetensors"), dtype=name)
    token_ids = some_tokens(20)
    assert loaded.dtype is getattr(torch, name)
    torch.testing.assert_close(our_logits(loaded.model, token_ids), tiny.logits(token_ids), atol=tolerance, rtol=0)
