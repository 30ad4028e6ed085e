"""The options of the benchmarks, as dataclasses that the command line makes its flags from.

Where it stands: between `commands/bench/` and the benchmarks. Importing it loads neither torch nor a tokenizer, since
every start of `mini-vllm` reads the flags.

What always holds: options that exist are of the right form; a wrong one raises `InvalidConfigError` with its name.

In vLLM: `add_cli_args` in each file of `vllm/benchmarks/`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mini_vllm.benchmark.workload import Lengths
from mini_vllm.errors import InvalidConfigError

DEFAULT_LEN = "32-256"  # tokens of prompts and of answers
DEFAULT_BURST_SIZE = 8


@dataclass(frozen=True)
class WorkloadOptions:
    """Which requests.

    Args:
        num_prompts: how many requests; of a file with more, so many are drawn.
        input_len: prompt tokens: 128, 32-256, or chat:120 (log-normal with this median); None: 32-256.
        output_len: output tokens, written as input_len; for JSON lines those without a max_tokens of their own. None:
            32-256.
        shared_prefix_len: tokens that all prompts begin with, before their own input_len; None: 0.
        prompts_file: instead of random prompts: JSON lines with "prompt" and "max_tokens", or a ShareGPT file.
        seed: of the random prompts, lengths and choices.
    """

    num_prompts: int = 64
    input_len: str | None = None
    output_len: str | None = None
    shared_prefix_len: int | None = None
    prompts_file: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least("num_prompts", self.num_prompts, 1)
        _at_least("shared_prefix_len", self.shared_prefix_len or 0, 0)
        _at_least("seed", self.seed, 0)  # Python's generator takes -1 for 1
        for name in ("input_len", "output_len"):
            self.lengths(name)
        for name in ("input_len", "shared_prefix_len"):
            if self.prompts_file is not None and getattr(self, name) is not None:
                raise InvalidConfigError(
                    f"{name} is of random prompts, and prompts_file has its own; leave one out", field=name
                )

    def lengths(self, name: str) -> Lengths:
        """Those of `input_len` or of `output_len`."""
        text = getattr(self, name)
        return Lengths.parse(DEFAULT_LEN if text is None else text, name)


@dataclass(frozen=True)
class LatencyOptions:
    """What is swept.

    Args:
        batch_sizes: requests at once, one run each, such as 1,4,16.
        input_len: prompt tokens of each request; several, such as 128,1024, run with every batch size.
        output_len: output tokens of each request.
        seed: of the random prompts.
    """

    batch_sizes: str = "1,4,16,64"
    input_len: str = "128"
    output_len: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        self.pairs()
        _at_least("output_len", self.output_len, 1)
        _at_least("seed", self.seed, 0)

    def pairs(self) -> list[tuple[int, int]]:
        """(batch size, prompt tokens) of every run."""
        sizes, lengths = _integers("batch_sizes", self.batch_sizes), _integers("input_len", self.input_len)
        return [(size, length) for length in lengths for size in sizes]


@dataclass(frozen=True)
class LadderOptions:
    """How big the ladder is; the default takes about two minutes on two cores that have nothing else to do.

    Args:
        num_requests: requests of the mixed and of the shared-prefix workload.
        num_one_at_a_time: how many of them the rungs run that take one at a time.
        input_len: prompt tokens, written 128 or 32-256.
        output_len: output tokens, written as input_len.
        max_model_len: the longest sequence, and so the length of a slot.
        num_slots: slots of the contiguous rungs; the paged ones have the same memory.
        prefix_len: tokens that the prompts of the shared-prefix workload have in common.
        long_prompt_len: tokens of each long prompt.
        num_long_prompts: how many of them come while short answers run.
        chunk: token budget of a step with chunked prefill.
        seed: of the random prompts.
    """

    num_requests: int = 12
    num_one_at_a_time: int = 1
    input_len: str = "16-96"
    output_len: str = "8-40"
    max_model_len: int = 1024
    num_slots: int = 4
    prefix_len: int = 256
    long_prompt_len: int = 900
    num_long_prompts: int = 3
    chunk: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = ("num_requests", "num_one_at_a_time", "max_model_len", "num_slots", "prefix_len", "long_prompt_len")
        for name in (*numbers, "num_long_prompts", "chunk"):
            _at_least(name, getattr(self, name), 1)
        _at_least("seed", self.seed, 0)
        Lengths.parse(self.input_len, "input_len")
        Lengths.parse(self.output_len, "output_len")


# What the rungs and `LadderOptions` set themselves is no option of the engine here.
SET_BY_RUNGS = frozenset(
    {
        *("seed", "cache", "scheduling", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
        *("num_kv_blocks", "kv_cache_memory", "kv_cache_memory_fraction"),
        *("enable_prefix_caching", "enable_chunked_prefill", "kernels", "attention_backend", "trace"),
    }
)


@dataclass(frozen=True)
class ServingOptions:
    """How a server is loaded, and what counts as good service.

    Args:
        url: where the server is, such as http://127.0.0.1:8000; any that speaks OpenAI's protocol.
        served_model: the name to ask for; None takes the first that /v1/models lists.
        tokenizer: whose token ids random prompts are made of: the model that is served, or one with its vocabulary.
        endpoint: completions (prompts as token ids) or chat (the same as text, in a message).
        request_rate: requests a second; several, such as 1,2,4, are a run each; inf sends all at once.
        arrivals: poisson (each on its own) or burst (in groups of burst_size at the same moment).
        burst_size: requests of a burst; None: 8.
        max_concurrency: most requests open at once; others wait at the client, and their clock runs. None: no limit.
        ttft_limit: seconds to the first token that still count as good.
        tpot_limit: seconds a token after the first that still count as good.
        plain: send OpenAI's own fields only; answers then end where the model ends them.
        api_key: sent as a bearer token.
        timeout: seconds after which a request has failed.
    """

    url: str = "http://127.0.0.1:8000"
    served_model: str | None = None
    tokenizer: str = "smollm2-135m-instruct"
    endpoint: str = "completions"
    request_rate: str = "inf"
    arrivals: str = "poisson"
    burst_size: int | None = None
    max_concurrency: int | None = None
    ttft_limit: float = 1.0
    tpot_limit: float = 0.1
    plain: bool = False
    api_key: str | None = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise InvalidConfigError(f"url begins with http:// or https://, got {self.url!r}", field="url")
        for name, choices in (("endpoint", ("completions", "chat")), ("arrivals", ("poisson", "burst"))):
            if getattr(self, name) not in choices:
                raise InvalidConfigError(
                    f"{name} must be {' or '.join(choices)}, got {getattr(self, name)!r}", field=name
                )
        self._check_arrivals()
        if self.max_concurrency is not None:
            _at_least("max_concurrency", self.max_concurrency, 1)
        for name in ("ttft_limit", "tpot_limit", "timeout"):
            if not getattr(self, name) > 0:
                raise InvalidConfigError(f"{name} must be over 0 seconds, got {getattr(self, name)}", field=name)

    def _check_arrivals(self) -> None:
        """Settle `burst_size`: a number for bursts, else None."""
        is_burst = self.arrivals == "burst"
        if all(map(math.isinf, self.rates())) and is_burst:
            raise InvalidConfigError(
                f"arrivals=burst is of a finite request_rate, and {self.request_rate} sends all at once; give a "
                "request_rate such as 4, or leave arrivals out",
                field="arrivals",
            )
        if self.burst_size is None:
            object.__setattr__(self, "burst_size", DEFAULT_BURST_SIZE if is_burst else None)
            return
        _at_least("burst_size", self.burst_size, 1)
        if not is_burst:
            raise InvalidConfigError(
                f"burst_size={self.burst_size} is of arrivals=burst, got arrivals={self.arrivals}; change one",
                field="burst_size",
            )

    def rates(self) -> list[float]:
        """Requests a second of each run; infinite for all at once."""
        try:
            rates = [float(part) for part in self.request_rate.split(",")]
        except ValueError:
            rates = []
        if not rates or not all(rate > 0 for rate in rates):
            raise InvalidConfigError(
                f"request_rate is written 1,2.5,inf, each over 0, got {self.request_rate!r}", field="request_rate"
            )
        return rates


# The same for all engines, or of no use beside them.
SET_BY_COMPARE = frozenset({"seed", "enable_prefix_caching", "load_format", "trace"})


@dataclass(frozen=True)
class CompareOptions:
    """With whom to compare, and the two phases beside the mixed workload.

    Args:
        peer: another engine as NAME=COMMAND, the Python it is installed in: vllm=/path/to/python; also transformers,
            openvino, llama-cpp, url=http://host:port; NAME may go on after a colon (openvino:int8). None: all that
            this Python has.
        peer_model: what a peer runs where it cannot read this model: NAME=PATH; for a url the served model's name.
        peer_timeout: seconds after which a peer is given up.
        stream_input_len: prompt tokens of the one stream.
        stream_output_len: output tokens of the one stream.
        num_prefills: prompts of the prefill phase.
        prefill_len: tokens of each of them.
    """

    peer: str | Sequence[str] | None = None
    peer_model: str | Sequence[str] | None = None
    peer_timeout: float = 1200.0
    stream_input_len: int = 128
    stream_output_len: int = 128
    num_prefills: int = 8
    prefill_len: int = 1024

    def __post_init__(self) -> None:
        for name in ("stream_input_len", "stream_output_len", "num_prefills", "prefill_len"):
            _at_least(name, getattr(self, name), 1)
        if not self.peer_timeout > 0:
            raise InvalidConfigError(
                f"peer_timeout must be over 0 seconds, got {self.peer_timeout}", field="peer_timeout"
            )
        for name in ("peer", "peer_model"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))


def _at_least(name: str, value: int, lowest: int) -> None:
    if value < lowest:
        raise InvalidConfigError(f"{name} must be {lowest} or more, got {value}", field=name)


def _integers(name: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 8 and int(part) > 0 for part in parts):
        raise InvalidConfigError(f"{name} is written 1,4,16, each from 1 to 9,999,999, got {text[:80]!r}", field=name)
    numbers = [int(part) for part in parts]
    if twice := [number for place, number in enumerate(numbers) if number in numbers[:place]]:
        raise InvalidConfigError(f"{name} gives {twice[0]} twice, got {text[:80]!r}; write each once", field=name)
    return numbers
