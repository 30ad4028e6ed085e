"""How much memory a load takes that is not a mapped file, measured in a process of its own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import tiny_config, tiny_model_config

from mini_vllm.model.architectures import weight_map
from mini_vllm.model.config import model_config_from_hf
from mini_vllm.model.converted_weights import converted_path
from mini_vllm.model.loader import load_model
from mini_vllm.store.model_store import ModelFiles

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="anonymous memory is read from /proc")

_MEASURE = """
import json, sys, threading
from pathlib import Path
import mini_vllm.model.loader as loader
from mini_vllm.store.model_store import ModelFiles

def anonymous():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["RssAnon"].split()[0]) * 1024

files = ModelFiles(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
before, peak, done = anonymous(), 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, anonymous())
watcher = threading.Thread(target=watch)
watcher.start()
loaded = loader.load_model(files, dtype=sys.argv[4])
weights = sum(parameter.numel() * parameter.itemsize for parameter in loaded.model.parameters())
if len(sys.argv) > 5:
    from mini_vllm.kernels.cpu.build import load_kernels
    from mini_vllm.model.cpu_layers import use_cpu_kernels
    from mini_vllm.store.model_store import home
    load_kernels(home())
    use_cpu_kernels(loaded.model)
done.set()
watcher.join()
print(json.dumps([max(peak, anonymous()) - before, weights]))
"""


def _measure(files: ModelFiles, dtype: str, *options: str) -> tuple[int, int]:
    """The highest anonymous memory during a load, over that before it, and the size of the weights; in bytes."""
    command = [sys.executable, "-c", _MEASURE, files.name, str(files.path), files.format, dtype, *options]
    peak, weights = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return peak, weights


def test_the_first_start_of_a_gguf_model_needs_a_fraction_of_its_weights(smollm2_files: ModelFiles) -> None:
    converted_path(smollm2_files.cache_dir, torch.bfloat16).unlink(missing_ok=True)
    peak, weights = _measure(smollm2_files, "bfloat16")
    assert weights == 269_030_016
    assert peak < 0.75 * weights  # 0.35: the largest matrix, and what the gguf package takes


def test_a_later_start_of_a_gguf_model_needs_next_to_nothing(smollm2_files: ModelFiles) -> None:
    load_model(smollm2_files, dtype="bfloat16")
    peak, weights = _measure(smollm2_files, "bfloat16")
    assert peak < 0.05 * weights  # all is mapped


SIZES = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 128}


@pytest.fixture(scope="module")
def float32_files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A checkpoint of 141 MB in float32."""
    directory = tmp_path_factory.mktemp("float32")
    (directory / "config.json").write_text(json.dumps(tiny_config(**SIZES)))
    tensors = {}
    for spec in weight_map(tiny_model_config(**SIZES)):
        tensors.update({name: torch.ones(shape) for name, shape in zip(spec.sources, spec.shapes, strict=True)})
    save_file(tensors, directory / "model.safetensors")
    return ModelFiles("float32", directory, "safetensors")


def test_a_checkpoint_in_the_dtype_that_runs_takes_memory_for_what_is_fused_only(float32_files: ModelFiles) -> None:
    fused = sum(
        4 * math.prod(shape)
        for spec in weight_map(tiny_model_config(**SIZES))
        for shape in spec.shapes
        if len(spec.sources) > 1
    )
    peak, weights = _measure(float32_files, "float32")
    assert fused < 0.6 * weights
    assert peak < fused + 0.15 * weights


def test_a_checkpoint_in_another_dtype_is_let_go_tensor_by_tensor(float32_files: ModelFiles) -> None:
    peak, weights = _measure(float32_files, "bfloat16")
    assert peak < 1.3 * weights  # 1.1: the weights, and the parts of the matrix that is being joined


# The embedding is 6 % of the weights, as in a model of 1.1 billion.
LARGE = {**SIZES, "vocab_size": 4000, "num_hidden_layers": 12}
GPT2 = {"n_embd": 512, "n_layer": 12, "n_head": 8, "n_positions": 512, "vocab_size": 4000}
SHAPES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": tiny_config(**LARGE),
    "MixtralForCausalLM": tiny_config(
        "MixtralForCausalLM", **{**LARGE, "num_local_experts": 6, "intermediate_size": 512, "num_hidden_layers": 6}
    ),
    "GPT2LMHeadModel": {"architectures": ["GPT2LMHeadModel"], **GPT2},
}


@pytest.mark.parametrize("architecture", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_and_packing_for_the_kernels_peaks_below_1_2_times_the_weights(
    tmp_path: Path, architecture: str, dtype: str
) -> None:
    raw = SHAPES[architecture]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = {}
    for spec in weight_map(model_config_from_hf(raw)):
        tensors.update({name: torch.ones(shape) for name, shape in zip(spec.sources, spec.shapes, strict=True)})
    save_file(tensors, tmp_path / "model.safetensors")
    peak, weights = _measure(ModelFiles("large", tmp_path, "safetensors"), dtype, "kernels")
    assert weights > 50e6
    assert peak < 1.2 * weights  # 1.07: see allocation.py
