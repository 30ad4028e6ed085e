"""`EngineConfig`: every option of the engine, in one frozen and validated dataclass.

Where it stands: `LLM(...)`, `LLMEngine(...)` and the command line build one; everything behind them only reads it.
The same names are keyword arguments and, with dashes, command-line flags.

What always holds: a config that exists is coherent. A value or a pair of values that cannot work raises
`InvalidConfigError` at construction, with the field's name. What depends on the model (its context length, what the
pool can hold) is settled at start by `with_model_limits` and is then a plain number.

In vLLM: `vllm/config/` and `vllm/engine/arg_utils.py`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mini_vllm.errors import InvalidConfigError

CacheKind = Literal["none", "contiguous", "paged"]
SchedulingKind = Literal["sequential", "static", "continuous"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
KernelsName = Literal["auto", "cpu", "none"]

DEFAULT_MODEL = "smollm2-135m-instruct"
# Enough to keep a few cores busy in a matrix product, and few enough that a running stream waits for one chunk of
# somebody else's long prompt only a second or so where a CPU computes some hundred tokens a second.
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512
MAX_THREADS = 1024  # more crash the thread pool rather than being refused by it
MAX_SEQUENCES = 65_536  # a bound for max_num_seqs: each one is a row of every persistent array

_CHOICES: dict[str, tuple[str, ...]] = {
    "cache": get_args(CacheKind),
    "scheduling": get_args(SchedulingKind),
    "dtype": get_args(DtypeName),
    "load_format": get_args(LoadFormat),
    "kernels": get_args(KernelsName),
    "generation_config": ("auto", "none"),
}
_POSITIVE = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_kv_blocks",
    "kv_cache_memory",
    "threads",
)
_TEXTS = ("device", "policy", "attention_backend", "model_impl")
_OPTIONAL_TEXTS = ("revision", "served_model_name", "chat_template", "trace")
_PATHS = ("model", "chat_template", "trace")  # a pathlib.Path is as good as its text
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1  # any 64 bits, signed or not, as for a request's own seed
_SIZE_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine. Names are vLLM's wherever vLLM has the thing.

    Args:
        model: a known short name, a local directory, a local `.gguf` file, or a Hugging Face id.
        revision: branch, tag or commit of a Hugging Face id.
        served_model_name: the name that outputs and the server show; the model's own name if None.
        dtype: what the model computes in; `auto` is bfloat16 where the hardware multiplies it, else float32.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        load_format: `auto` reads the checkpoint; `dummy` fills in random weights, and also takes as a model a
            config.json, or one of the shapes tinyllama-1.1b, llama-3.2-1b, llama-3-8b.
        model_impl: who computes the model: `native` (this package's own transformer), `transformers` (that library's
            class with the attention of this package; needs the extra `hf`), `auto` (native where it can), or
            `module:Class` for a model of your own.
        max_model_len: longest sequence, prompt and output together, in tokens; None takes the model's own.
            It is lowered at start, with a log line, to what the pool can hold.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: token budget of one step; None is 512, or max_model_len where chunked prefill is off.
        cache: `paged` (block tables), `contiguous` (one slot of max_model_len a sequence), `none` (recompute all).
        scheduling: `continuous` (join and leave at every step), `static` (whole batches), `sequential` (one request).
        policy: who goes first, `fcfs` or `priority`, or `module:Class` for one of your own.
        block_size: tokens in a block of the paged cache, a power of two.
        num_kv_blocks: the pool in blocks; None sizes it from `kv_cache_memory`.
        kv_cache_memory: bytes for keys and values (a number, or text such as "2GiB"); None takes
            `kv_cache_memory_fraction` of the memory that is free once the weights are loaded.
        kv_cache_memory_fraction: share of free memory for keys and values, over 0 and up to 1.
        attention_backend: name of the attention implementation, see `model/attention_backends`; `auto` picks by cache.
        kernels: `auto` takes the C++ kernels where they fit (built once, at first use), `cpu` demands them, `none` runs
            plain PyTorch alone.
        enable_prefix_caching: share the blocks of equal prompt beginnings between requests (paged only).
        enable_chunked_prefill: let a long prompt be computed in pieces beside running decodes.
        generation_config: `auto` takes sampling defaults from the model's generation_config.json, `none` does not.
        chat_template: path of a Jinja file that replaces the model's own chat template.
        seed: fixes the seeds of requests that bring none; None draws each from the operating system.
        threads: CPU threads for the model; None takes the cores at hand, or what a container's quota leaves of them.
        trace: write what the engine does to this file, as a timeline that Perfetto opens (https://ui.perfetto.dev).
        debug_checks: check every invariant of the block manager at each step (slow; on in tests).
    """

    model: str = DEFAULT_MODEL
    revision: str | None = None
    served_model_name: str | None = None
    dtype: DtypeName = "auto"
    device: str = "auto"
    load_format: LoadFormat = "auto"
    model_impl: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    cache: CacheKind = "paged"
    scheduling: SchedulingKind | None = None
    policy: str = "fcfs"
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: int | str | None = None
    kv_cache_memory_fraction: float = 0.4
    attention_backend: str = "auto"
    kernels: KernelsName = "auto"
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool = True
    generation_config: str = "auto"
    chat_template: str | None = None
    seed: int | None = None
    threads: int | None = None
    trace: str | None = None
    debug_checks: bool = False

    def __post_init__(self) -> None:
        self._check_types_and_ranges()
        self._settle_defaults()
        self._check_pairs()

    def _check_types_and_ranges(self) -> None:
        self._check_texts()
        if self.scheduling is not None and self.scheduling not in _CHOICES["scheduling"]:
            raise _bad_choice("scheduling", self.scheduling)
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if name != "scheduling" and value not in choices:
                raise _bad_choice(name, value)
        object.__setattr__(self, "kv_cache_memory", parse_memory_size(self.kv_cache_memory))
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is None and name not in ("max_num_seqs", "block_size"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidConfigError(f"{name} must be a whole number of 1 or more, got {value!r}", field=name)
        if self.threads is not None and self.threads > MAX_THREADS:
            raise InvalidConfigError(f"threads must be at most {MAX_THREADS}, got {self.threads}", field="threads")
        if self.max_model_len == 1:
            raise InvalidConfigError(
                "max_model_len must be 2 or more: a prompt token and an answer", field="max_model_len"
            )
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "debug_checks"):
            if not isinstance(getattr(self, name), bool | None):
                raise InvalidConfigError(f"{name} must be true or false, got {getattr(self, name)!r}", field=name)
        if self.max_num_seqs > MAX_SEQUENCES:
            raise InvalidConfigError(
                f"max_num_seqs must be at most {MAX_SEQUENCES}, got {self.max_num_seqs}", field="max_num_seqs"
            )
        fraction = self.kv_cache_memory_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
            raise InvalidConfigError(
                f"kv_cache_memory_fraction must be over 0 and at most 1, got {fraction!r}",
                field="kv_cache_memory_fraction",
            )
        seed = self.seed
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise InvalidConfigError(f"seed must be a whole number or None, got {seed!r}", field="seed")
        if seed is not None and not MIN_SEED <= seed <= MAX_SEED:
            raise InvalidConfigError("seed must fit 64 bits: from -2**63 to 2**64 - 1", field="seed")

    def _check_texts(self) -> None:
        for name in _PATHS:
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        if not isinstance(self.model, str) or not self.model:
            raise InvalidConfigError(f"model must be a name or a path, got {self.model!r}", field="model")
        for name in (*_TEXTS, *_OPTIONAL_TEXTS):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL_TEXTS:
                continue
            if not isinstance(value, str) or not value.strip():
                raise InvalidConfigError(f"{name} must be a text that is not empty, got {value!r}", field=name)

    def _settle_defaults(self) -> None:
        """Fill in what depends on other fields, so that readers of the config never see None for these."""
        if self.scheduling is None:
            object.__setattr__(self, "scheduling", "sequential" if self.cache == "none" else "continuous")
        if self.enable_prefix_caching is None:
            object.__setattr__(self, "enable_prefix_caching", self.cache == "paged")

    def _check_pairs(self) -> None:
        if self.cache == "none" and self.scheduling != "sequential":
            raise InvalidConfigError(
                f"cache='none' runs one request at a time: scheduling must be 'sequential', got {self.scheduling!r}",
                field="scheduling",
            )
        if self.cache != "paged" and self.enable_prefix_caching:
            raise InvalidConfigError(
                f"enable_prefix_caching shares blocks and needs cache='paged', got cache={self.cache!r}",
                field="enable_prefix_caching",
            )
        if self.attention_backend == "cpu" and self.kernels == "none":
            raise InvalidConfigError(
                "attention_backend='cpu' is one of the C++ kernels, and kernels='none' runs plain PyTorch alone; take "
                "attention_backend='reference', or leave kernels out",
                field="attention_backend",
            )
        if self.cache == "paged" and self.block_size & (self.block_size - 1):
            raise InvalidConfigError(f"block_size must be a power of two, got {self.block_size}", field="block_size")
        if self.max_model_len is not None:
            self._check_unchunked_budget(self.max_model_len)

    def _check_unchunked_budget(self, max_model_len: int) -> None:
        budget = self.max_num_batched_tokens
        if not self.enable_chunked_prefill and budget is not None and budget < max_model_len and self.cache != "none":
            raise InvalidConfigError(
                f"with chunked prefill off a prompt is prefilled whole, so max_num_batched_tokens ({budget}) must be "
                f"at least max_model_len ({max_model_len}); raise the one or lower the other",
                field="max_num_batched_tokens",
            )

    def with_model_limits(self, max_model_len: int) -> EngineConfig:
        """The same config once the model's context and the pool are known: no None is left in the limits.

        Args:
            max_model_len: what the model and the pool allow, in tokens.
        """
        self._check_unchunked_budget(max_model_len)
        budget = self.max_num_batched_tokens
        if budget is None:
            budget = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, 0 if self.enable_chunked_prefill else max_model_len)
        return dataclasses.replace(self, max_model_len=max_model_len, max_num_batched_tokens=budget)

    @staticmethod
    def field_names() -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(EngineConfig))

    @staticmethod
    def from_options(model: str | None, options: dict[str, Any]) -> EngineConfig:
        """Build a config from keyword arguments; an unknown name is refused with the list of known ones."""
        unknown = sorted(set(options) - set(EngineConfig.field_names()))
        if unknown:
            raise InvalidConfigError(
                f"unknown engine option {unknown[0]!r}; known options: {', '.join(EngineConfig.field_names())}",
                field=unknown[0],
            )
        if model is not None:
            options = {**options, "model": model}
        return EngineConfig(**options)


def parse_memory_size(value: int | str | None) -> int | None:
    """Bytes from a number or from text such as `512MiB`, `2GB`, `1.5g` (units are powers of 1024)."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", value.lower())
    number = None if match is None else float(match.group(1)) * _SIZE_UNITS[match.group(2)]
    if number is None or number >= 2**63:
        raise InvalidConfigError(
            f"kv_cache_memory must be bytes or text such as '2GiB', got {value!r}", field="kv_cache_memory"
        )
    return int(number)


def _bad_choice(name: str, value: object) -> InvalidConfigError:
    return InvalidConfigError(f"{name} must be one of {', '.join(_CHOICES[name])}, got {value!r}", field=name)
