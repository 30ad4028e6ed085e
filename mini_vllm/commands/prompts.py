"""Where the prompts of `mini-vllm generate` come from.

    arguments      each one a prompt
    -              all of standard input, one prompt; the line break that ends it is not part of it
    --file FILE    a prompt a line, or with a name that ends in .jsonl an object a line:
                   {"prompt": "text" or [token ids]}  or  {"messages": [{"role": ..., "content": ...}]}

What always holds: there is at least one prompt, and its source is named in every error.

In vLLM: nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TypeAlias

from mini_vllm.errors import InvalidRequestError
from mini_vllm.json_text import parse_json

GivenPrompt: TypeAlias = str | list[int] | list[dict[str, Any]]


def collect_prompts(arguments: list[str], file: Path | None) -> dict[str, GivenPrompt]:
    """Read the prompts, from one source.

    Returns:
        Them in their order, each by its place: `prompt 2 of 3`, or `line 5 of FILE`.

    Raises:
        InvalidRequestError: no source or two, nothing in it, or a part of it that cannot be read.
    """
    if file is not None and arguments:
        raise InvalidRequestError("give prompts as arguments or with --file, not both", param="prompt")
    if file is not None:
        return _from_file(file)
    if "-" in arguments:
        if len(arguments) > 1:
            raise InvalidRequestError("'-' reads standard input and is then the only prompt", param="prompt")
        return {"standard input": _from_stdin()}
    if not arguments:
        raise InvalidRequestError("no prompt; give one or more, or - for standard input, or --file", param="prompt")
    return {f"prompt {number} of {len(arguments)}": text for number, text in enumerate(arguments, 1)}


def as_chat(prompt: GivenPrompt, system: str | None, place: str) -> list[dict[str, Any]]:
    """A text as the message of a user; messages stay what they are.

    Args:
        system: a system message to go before it.
        place: where the prompt stands, for the message.
    """
    if isinstance(prompt, str):
        before = [] if system is None else [{"role": "system", "content": system}]
        return [*before, {"role": "user", "content": prompt}]
    messages = [item for item in prompt if isinstance(item, dict)]
    if not messages:
        raise InvalidRequestError(
            f"{place}: token ids cannot be sent as a chat message; leave --chat out", param="prompt"
        )
    return messages


def _from_stdin() -> str:
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"standard input is not UTF-8 text: {error}", param="prompt") from error
    return text.removesuffix("\n").removesuffix("\r")


def _from_file(file: Path) -> dict[str, GivenPrompt]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{file} cannot be read: {error}", param="prompt") from error
    # Not splitlines: it also splits at characters such as U+2028, which JSON and prompts may hold.
    lines = {f"line {number} of {file}": line for number, line in enumerate(text.split("\n"), start=1) if line.strip()}
    if not lines:
        raise InvalidRequestError(f"{file} holds no prompts", param="prompt")
    if file.suffix == ".jsonl":
        return {place: _from_json(line, place) for place, line in lines.items()}
    return {place: line.removesuffix("\r") for place, line in lines.items()}


def _from_json(line: str, where: str) -> GivenPrompt:
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise InvalidRequestError(f"{where} is not JSON: {error}", param="prompt") from error
    prompt = entry.get("prompt", entry.get("messages")) if isinstance(entry, dict) else None
    is_ids = isinstance(prompt, list) and all(isinstance(item, int) for item in prompt)
    is_messages = isinstance(prompt, list) and all(isinstance(item, dict) for item in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids or is_messages):
        raise InvalidRequestError(
            f'{where} must be an object with "prompt" (text or token ids) or "messages"', param="prompt"
        )
    given: GivenPrompt = prompt
    return given
