"""Workloads: which prompts, how long the answers, and who comes when.

Where it stands: made before a benchmark starts. The same arguments and seed give the same workload.

Lengths are written as on the command line:

    128        every one 128 tokens
    32-256     uniform, both ends included
    chat:120   log-normal with median 120, as the lengths of chats are: many short ones, a few very long
    chat:120,1.5    the same with a standard deviation of 1.5 of the logarithm, instead of 0.8

Synthetic prompts are random token ids, so no two share a beginning unless `shared_prefix_len` says so.

Prompts out of files are read in `workload_files.py`.

In vLLM: `vllm/benchmarks/datasets.py` (`RandomDataset`, `PrefixRepetitionRandomDataset`).
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mini_vllm.errors import InvalidConfigError

if TYPE_CHECKING:
    from mini_vllm.tokenizer.tokenizer import Tokenizer

_DEFAULT_SIGMA = 0.8
_LONGEST = 10_000_000  # tokens of a prompt or an answer: beyond every model, and soon refused for this one
_MOST_REQUESTS = 1_000_000
_LONGEST_OF_MEDIAN = 8  # a log-normal length is cut at this many medians: one giant would decide the whole run


@dataclass(frozen=True)
class Lengths:
    """How long things are, in tokens.

    Args:
        kind: `fixed` (always `low`), `uniform` (`low` to `high`), `lognormal` (median `low`, cut at `high`).
        low, high: see `kind`.
        sigma: standard deviation of the logarithm, for `lognormal` only.
    """

    kind: Literal["fixed", "uniform", "lognormal"]
    low: int
    high: int
    sigma: float = 0.0

    @staticmethod
    def parse(text: str, name: str = "lengths") -> Lengths:
        """From `128`, `32-256` or `chat:120[,0.8]`.

        Args:
            name: of the option, for the message.

        Raises:
            InvalidConfigError: it is none of these, or a length is under 1.
        """
        chat = re.fullmatch(r"chat:(\d{1,9})(?:,(\d(?:\.\d{1,9})?))?", text)
        plain = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
        if chat is not None:
            median = int(chat[1])
            sigma = _DEFAULT_SIGMA if chat[2] is None else float(chat[2])
            lengths = Lengths("lognormal", median, median * _LONGEST_OF_MEDIAN, sigma)
        elif plain is not None:
            low, high = int(plain[1]), int(plain[2] or plain[1])
            lengths = Lengths("fixed" if low == high else "uniform", low, high)
        else:
            raise InvalidConfigError(
                f"{name} is written 128, 32-256, chat:120 or chat:120,0.8 (with a deviation under 10), "
                f"got {text[:40]!r}",
                field=name,
            )
        if not 1 <= lengths.low <= lengths.high or lengths.low > _LONGEST or (plain and lengths.high > _LONGEST):
            raise InvalidConfigError(
                f"{name} goes from 1 to {_LONGEST:,} tokens, the smaller first, got {text[:40]!r}", field=name
            )
        return lengths

    def draw(self, source: random.Random) -> int:
        if self.kind == "fixed":
            return self.low
        if self.kind == "uniform":
            return source.randint(self.low, self.high)
        return min(self.high, max(1, round(source.lognormvariate(math.log(self.low), self.sigma))))


@dataclass(frozen=True)
class WorkItem:
    """One request.

    Args:
        prompt_token_ids: its prompt.
        num_output_tokens: exactly so many are generated; the end of sequence is ignored.
        arrives_after_steps: it is added once the engine has made this many steps of the run.
        origin: what its lengths come from, for messages: options, or a place in a file.
    """

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    arrives_after_steps: int = 0
    origin: str = dataclasses.field(default="", compare=False)


@dataclass(frozen=True)
class Workload:
    """Requests and what to call them.

    Args:
        name: says what they are.
        items: in the order in which they are added.
        seed: what they were drawn from; None if they were read.
    """

    name: str
    items: tuple[WorkItem, ...]
    seed: int | None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(item.prompt_token_ids) for item in self.items)

    @property
    def num_output_tokens(self) -> int:
        return sum(item.num_output_tokens for item in self.items)

    def first(self, count: int) -> Workload:
        """The first requests alone."""
        return Workload(f"{self.name}, the first {count}", self.items[:count], self.seed)

    def check_fits(self, max_model_len: int) -> None:
        """See, before any request runs, that none is longer than a sequence can be.

        Raises:
            InvalidConfigError: one is.
        """
        for item in self.items:
            prompt_len, output_len = len(item.prompt_token_ids), item.num_output_tokens
            if prompt_len + output_len > max_model_len:
                raise InvalidConfigError(
                    f"{item.origin}: a prompt of {prompt_len:,} tokens and an answer of {output_len:,} are "
                    f"{prompt_len + output_len:,}, and max_model_len is {max_model_len:,} here; shorten them, or raise "
                    "max_model_len where the model and the memory for keys and values allow it",
                    field="max_model_len",
                )

    def shortened(self, num_output_tokens: int) -> Workload:
        """The same prompts with at most so many tokens of output: a warm-up."""
        items = (
            dataclasses.replace(item, num_output_tokens=min(item.num_output_tokens, num_output_tokens))
            for item in self.items
        )
        return dataclasses.replace(self, items=tuple(items))


def synthetic_workload(
    tokenizer: Tokenizer,
    *,
    num_requests: int,
    input_len: Lengths,
    output_len: Lengths,
    shared_prefix_len: int = 0,
    seed: int = 0,
    origin: str = "input_len and output_len",
) -> Workload:
    """Random token ids of the model, none of them special.

    Args:
        input_len: of each prompt's own part, which comes after the shared one.
        shared_prefix_len: tokens at the beginning that all prompts have in common.
        origin: the options that the lengths are those of, for messages.
    """
    if not 1 <= num_requests <= _MOST_REQUESTS:
        raise InvalidConfigError(
            f"a workload has 1 to {_MOST_REQUESTS:,} requests, got {num_requests:,}", field="num_requests"
        )
    if shared_prefix_len > _LONGEST:
        raise InvalidConfigError(
            f"shared_prefix_len must be at most {_LONGEST:,}, got {shared_prefix_len:,}", field="shared_prefix_len"
        )
    source = random.Random(seed)
    ids = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_token_ids]
    shared = tuple(source.choices(ids, k=shared_prefix_len))
    items = tuple(
        WorkItem(shared + tuple(source.choices(ids, k=input_len.draw(source))), output_len.draw(source), origin=origin)
        for _ in range(num_requests)
    )
    prefix = f", {shared_prefix_len} tokens of prefix shared" if shared_prefix_len else ""
    return Workload(f"{num_requests} random prompts{prefix}", items, seed)
