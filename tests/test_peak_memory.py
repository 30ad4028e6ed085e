"""What a whole engine takes beyond its weights and its pool, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mini_vllm.store.model_store import ModelFiles

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")

MOST = 700e6  # bytes; 240e6 of them are taken by importing PyTorch
_MEASURE = """
import json, sys
from mini_vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], dtype=sys.argv[2], num_kv_blocks=160)
params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=5)
llm.generate([[index % 4000 + 5 for index in range(2000)]], params)
llm.generate([[index + 5] * 24 for index in range(64)], params)
pool = llm.engine.pool
(peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([int(peak) * 1024, pool.num_blocks * pool.block_bytes]))
"""


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
def test_a_long_prompt_and_a_batch_of_64_take_little_beyond_weights_and_pool(
    smollm2_files: ModelFiles, dtype: str, width: int
) -> None:
    command = [sys.executable, "-c", _MEASURE, smollm2_files.name, dtype]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peak, pool = json.loads(done.stdout)
    weights = width * 134_515_008
    # The file that the weights were packed from stays mapped. Its pages are in the peak, though the system takes them
    # back when it needs them; in bfloat16 there is room for them all the same.
    mapped = weights if dtype == "float32" else 0
    beyond = peak - weights - pool - mapped
    assert beyond < MOST, f"{beyond / 1e6:.0f} MB beyond {weights / 1e6:.0f} of weights and {pool / 1e6:.0f} of pool"
