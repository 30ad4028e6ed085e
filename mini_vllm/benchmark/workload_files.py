"""Workloads as the command line chooses them: random, or out of a file.

Where it stands: above `workload.py`. Two kinds of file, told apart by what is in them:

    JSON lines     {"prompt": "text" or [token ids], "max_tokens": 20}     max_tokens may be left out
    ShareGPT       [{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}, ...]

Of a ShareGPT conversation the first question is the prompt, and the answer that stands there says how many tokens are
generated. As in vLLM, conversations with under 4 tokens on a side, with a prompt over 1,024 tokens, or over 2,048
together are left out.

What always holds: the same file, options and seed give the same workload; a wrong entry is named by its place.

In vLLM: `ShareGPTDataset` and `CustomDataset` in `vllm/benchmarks/datasets.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mini_vllm.benchmark.options import DEFAULT_LEN, WorkloadOptions
from mini_vllm.benchmark.workload import Lengths, WorkItem, Workload, synthetic_workload
from mini_vllm.errors import InvalidConfigError
from mini_vllm.json_text import parse_json
from mini_vllm.tokenizer.tokenizer import Tokenizer

_MIN_LEN, _MAX_PROMPT_LEN, _MAX_TOTAL_LEN = 4, 1024, 2048  # of a ShareGPT conversation, in tokens


def make_workload(options: WorkloadOptions, tokenizer: Tokenizer) -> Workload:
    """The workload in the token ids of a model.

    Raises:
        InvalidConfigError: the file cannot be read, or an entry is not of the form above.
    """
    if options.prompts_file is not None:
        output_len = None if options.output_len is None else options.lengths("output_len")
        return read_prompts_file(Path(options.prompts_file), tokenizer, output_len, options.num_prompts, options.seed)
    return synthetic_workload(
        tokenizer,
        num_requests=options.num_prompts,
        input_len=options.lengths("input_len"),
        output_len=options.lengths("output_len"),
        shared_prefix_len=options.shared_prefix_len or 0,
        seed=options.seed,
        origin="shared_prefix_len, input_len and output_len",
    )


def read_prompts_file(
    path: Path, tokenizer: Tokenizer, output_len: Lengths | None, num_prompts: int, seed: int = 0
) -> Workload:
    """The prompts of a file, at most `num_prompts` of them, in the file's order.

    Args:
        output_len: of JSON lines without a max_tokens; None takes the default.

    Raises:
        InvalidConfigError: the file cannot be read, or an entry is something else; it names the place.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError(f"the prompts file {path} cannot be read: {error}", field="prompts_file") from error
    source = random.Random(seed)
    if text.lstrip().startswith("["):
        if output_len is not None:
            raise InvalidConfigError(
                f"output_len is of random prompts and JSON lines; the answers of {path.name}, a ShareGPT file given as "
                "prompts_file, have lengths of their own; leave output_len out",
                field="output_len",
            )
        conversations = _conversations(text, path)
        # Only as many as are needed go through the tokenizer: such files have some 90,000.
        order = source.sample(range(len(conversations)), len(conversations))
        items = _first(_items_of_conversations(conversations, order, path, tokenizer), num_prompts)
    else:
        lens = output_len or Lengths.parse(DEFAULT_LEN)
        items = [_item_of_line(line, where, tokenizer, lens.draw(source)) for where, line in _lines(text)]
        chosen = sorted(source.sample(range(len(items)), min(num_prompts, len(items))))
        items = [items[place] for place in chosen]
    if not items:
        raise InvalidConfigError(f"{path} has no prompts that can be used", field="prompts_file")
    return Workload(f"{len(items)} prompts of {path.name}", tuple(items), seed)


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """The lines that hold something, each with its name."""
    yield from ((f"line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _item_of_line(line: str, where: str, tokenizer: Tokenizer, default_output_len: int) -> WorkItem:
    record = _parsed(line, where)
    prompt = record.get("prompt") if isinstance(record, dict) else None
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
        raise _wrong(where, '"prompt" must be text or a list of token ids')
    if not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise _wrong(where, f"token id {wrong}, but the model's ids go from 0 to {tokenizer.vocab_size - 1}")
    wanted = record.get("max_tokens", default_output_len)
    if type(wanted) is not int or wanted < 1:
        raise _wrong(where, f'"max_tokens" must be 1 or more, got {wanted!r}')
    return WorkItem(tuple(ids), wanted, origin=_place(where))


def _conversations(text: str, path: Path) -> list[Any]:
    found = _parsed(text, str(path))
    return found if isinstance(found, list) else []


def _items_of_conversations(
    conversations: list[Any], order: list[int], path: Path, tokenizer: Tokenizer
) -> Iterator[WorkItem]:
    for place in order:
        record, where = conversations[place], f"entry {place + 1} of {path.name}"
        turns = record.get("conversations") if isinstance(record, dict) else None
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise _wrong(where, '"conversations" must be a list of objects')
        if len(turns) < 2:
            continue
        texts = [turn.get("value") for turn in turns[:2]]
        if not all(isinstance(one, str) for one in texts):
            raise _wrong(where, '"value" must be text')
        prompt, answer = (tokenizer.encode(str(one)) for one in texts)
        if _fits(len(prompt), len(answer)):
            yield WorkItem(tuple(prompt), len(answer), origin=_place(where))


def _fits(prompt_len: int, output_len: int) -> bool:
    is_long_enough = min(prompt_len, output_len) >= _MIN_LEN
    return is_long_enough and prompt_len <= _MAX_PROMPT_LEN and prompt_len + output_len <= _MAX_TOTAL_LEN


def _first(items: Iterator[WorkItem], count: int) -> list[WorkItem]:
    return [item for item, _ in zip(items, range(count), strict=False)]


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise _wrong(where, f"this is not JSON: {error}") from error


def _place(where: str) -> str:
    return f"prompts_file, {where}"


def _wrong(where: str, what: str) -> InvalidConfigError:
    return InvalidConfigError(f"{_place(where)}: {what}", field="prompts_file")
