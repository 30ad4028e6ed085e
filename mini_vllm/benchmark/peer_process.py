"""One engine under measurement, alone in a process, with the Python that it is installed in.

    PYTHON peer_process.py JOB.json RESULT.json

Where it stands: started by `peers.py`, one engine after the other. A peer's Python knows nothing of mini vLLM, so this
file is on its own: the standard library, and the engine that is asked for.

Each engine is an adapter of two methods: made from the job (loads the model), and `generate`, which answers prompts
greedily with exactly so many tokens each, past the end of sequence, and returns the tokens that came back. Each is set
up as its own documentation advises for a CPU, without a prefix cache.

What always holds: every engine does the same phases in the same order: load, a first token, a warm-up, then each phase
`repeats` times.

In vLLM: nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, ClassVar, Protocol

Tokens = list[int]

TRANSFORMERS_BATCH = 16  # requests of a static batch: what people write first
KV_CACHE_GIB = 2


class Engine(Protocol):
    """One engine: made from the job, then asked.

    Attributes:
        package: its distribution's name, for the version.
        batches: whether it answers several prompts at once.
    """

    package: ClassVar[str]
    batches: ClassVar[bool]

    def __init__(self, job: dict[str, Any]) -> None: ...

    def generate(self, prompts: list[Tokens], output_lens: list[int]) -> list[Tokens]: ...


class MiniVllm(Engine):
    """This engine, with the options of the command line."""

    package = "mini-vllm"
    batches = True

    def __init__(self, job: dict[str, Any]) -> None:
        mini_vllm = importlib.import_module("mini_vllm")
        self._params = mini_vllm.SamplingParams
        self._llm = mini_vllm.LLM(**job["options"])

    def generate(self, prompts: list[Tokens], output_lens: list[int]) -> list[Tokens]:
        params = [self._params(temperature=0.0, max_tokens=n, ignore_eos=True) for n in output_lens]
        return [output.outputs[0].token_ids for output in self._llm.generate(prompts, params)]


class Vllm(Engine):
    """vLLM's offline class."""

    package = "vllm"
    batches = True

    def __init__(self, job: dict[str, Any]) -> None:
        # Read when vLLM is imported. What the caller's environment sets already stays.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(KV_CACHE_GIB))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{job['threads'] - 1}")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        vllm = importlib.import_module("vllm")
        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(
            job["model"],
            dtype=job["dtype"],
            max_model_len=job["max_model_len"],
            max_num_seqs=job["max_num_seqs"],
            enable_prefix_caching=False,
        )

    def generate(self, prompts: list[Tokens], output_lens: list[int]) -> list[Tokens]:
        params = [self._params(temperature=0.0, max_tokens=n, ignore_eos=True) for n in output_lens]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class Transformers(Engine):
    """The transformers library: static batches, padded on the left."""

    package = "transformers"
    batches = True

    def __init__(self, job: dict[str, Any]) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.set_grad_enabled(False)
        self._torch.set_num_threads(job["threads"])
        auto = importlib.import_module("transformers").AutoModelForCausalLM
        self._model = auto.from_pretrained(job["model"], dtype=getattr(self._torch, job["dtype"]))

    def generate(self, prompts: list[Tokens], output_lens: list[int]) -> list[Tokens]:
        answers: list[Tokens] = []
        for start in range(0, len(prompts), TRANSFORMERS_BATCH):
            end = start + TRANSFORMERS_BATCH
            answers += self._batch(prompts[start:end], output_lens[start:end])
        return answers

    def _batch(self, prompts: list[Tokens], output_lens: list[int]) -> list[Tokens]:
        width, count = max(map(len, prompts)), max(output_lens)
        ids = self._torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = self._torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = self._model.generate(
            ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        # The batch goes on until its longest answer is done; what the shorter ones get beyond theirs does not count.
        answers = output[:, width:].tolist()
        return [answer[:length] for answer, length in zip(answers, output_lens, strict=True)]


class OpenVino(Engine):
    """OpenVINO GenAI's continuous batching, over a model exported by optimum-cli."""

    package = "openvino-genai"
    batches = True

    def __init__(self, job: dict[str, Any]) -> None:
        self._numpy, self._openvino = importlib.import_module("numpy"), importlib.import_module("openvino")
        self._genai = importlib.import_module("openvino_genai")
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = KV_CACHE_GIB
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = job["max_num_seqs"]
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        precision = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[job["dtype"]]
        options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": job["threads"]}
        self._pipeline = self._genai.ContinuousBatchingPipeline(job["model"], scheduler, "CPU", options)

    def generate(self, prompts: list[Tokens], output_lens: list[int]) -> list[Tokens]:
        inputs = [self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64)) for prompt in prompts]
        results = self._pipeline.generate(inputs, [self._config(length) for length in output_lens])
        return [list(result.m_generation_ids[0]) for result in results]

    def _config(self, length: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = length, True, False
        return config


class LlamaCpp(Engine):
    """llama.cpp through llama-cpp-python, which runs one request at a time."""

    package = "llama-cpp-python"
    batches = False

    def __init__(self, job: dict[str, Any]) -> None:
        llama = importlib.import_module("llama_cpp").Llama
        threads = {"n_threads": job["threads"], "n_threads_batch": job["threads"]}
        self._llama = llama(job["model"], n_ctx=job["max_model_len"], verbose=False, **threads)

    def generate(self, prompts: list[Tokens], output_lens: list[int]) -> list[Tokens]:
        answers = []
        for prompt, length in zip(prompts, output_lens, strict=True):
            self._llama.reset()  # or it would find the beginning of the last prompt in its cache
            # Some versions penalise repetition unless they are told not to. Tokens come without end, past that of a
            # sequence too, so as many are taken as are wanted.
            tokens = self._llama.generate(prompt, temp=0.0, repeat_penalty=1.0)
            answers.append([int(token) for token in itertools.islice(tokens, length)])
        return answers


ENGINES: dict[str, type[Engine]] = {
    "mini-vllm": MiniVllm,
    "vllm": Vllm,
    "transformers": Transformers,
    "openvino": OpenVino,
    "llama-cpp": LlamaCpp,
}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do the job.

    Args:
        job: `engine`, `model`, `dtype`, `threads`, `max_model_len`, `max_num_seqs`, `options` (of mini vLLM only),
            `repeats`, `started_at` (on `time.time`), and `phases`: name -> {`prompts`, `output_lens`}.

    Returns:
        `version`, `load_seconds`, `first_token_seconds` (from `started_at`), and `phases`: name -> {`seconds` (one a
        run), `answers` (of the first run), `num_output_tokens` (one a run), `is_stable`}.
    """
    kind = ENGINES[job["engine"]]
    loading = time.perf_counter()
    engine = kind(job)
    load_seconds = time.perf_counter() - loading
    phases = {name: phase for name, phase in job["phases"].items() if kind.batches or not phase["is_batch"]}
    some = next(iter(phases.values()))
    engine.generate([some["prompts"][0][:4]], [1])
    first_token_seconds = time.time() - job["started_at"]
    warm_up = [prompt[::-1] for prompt in some["prompts"]]
    engine.generate(warm_up, some["output_lens"])
    return {
        "version": importlib.metadata.version(_distribution(kind.package)),
        "load_seconds": load_seconds,
        "first_token_seconds": first_token_seconds,
        "phases": {name: _measure(engine, phase, job["repeats"]) for name, phase in phases.items()},
    }


def _distribution(package: str) -> str:
    """The installed package's name: vLLM for CPU is called otherwise."""
    for name in (package, f"{package}-cpu"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return package


def _measure(engine: Engine, phase: dict[str, Any], repeats: int) -> dict[str, Any]:
    seconds: list[float] = []
    counts: list[int] = []
    first: list[Tokens] = []
    is_stable = True
    for _ in range(repeats):
        started = time.perf_counter()
        answers = engine.generate(phase["prompts"], phase["output_lens"])
        seconds.append(time.perf_counter() - started)
        counts.append(sum(map(len, answers)))
        first = first or answers
        is_stable = is_stable and answers == first
    return {"seconds": seconds, "num_output_tokens": counts, "answers": first, "is_stable": is_stable}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps(run(job)), encoding="utf-8")


if __name__ == "__main__":  # some engines start processes that read this file again
    main()
