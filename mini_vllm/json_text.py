"""Reading JSON that somebody else wrote, and writing JSON that takes one line.

Where it stands: whoever reads a file, a line or a body calls `parse_json` instead of `json.loads`, and then has one
exception to think of. Whoever writes one value a line (JSON lines, a log, server-sent events) calls `json_line`.

What always holds: a text that is no JSON, or none that Python can hold, is a ValueError. `json.loads` alone raises
RecursionError for a hundred thousand brackets, which a file or a client can easily send. A line that was written is one
line for everybody.

In vLLM: nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def parse_json(text: str | bytes, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """The value of a JSON text.

    Args:
        text: text, or bytes in UTF-8, UTF-16 or UTF-32.
        parse_constant: makes the value of NaN, Infinity and -Infinity; None takes Python's floats.

    Raises:
        ValueError: it is no JSON, holds a number of thousands of digits, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_line(value: Any, *, separators: tuple[str, str] | None = None) -> str:
    """A value as JSON that is one line, however its reader counts lines; characters stay readable.

    JSON escapes the line breaks of ASCII. Unicode has three others, and readers that take lines as Python's
    `splitlines` does would break there, so they are escaped as well.

    Args:
        separators: as of `json.dumps`.

    Raises:
        ValueError: it holds NaN or an infinity, for which JSON has no word.
    """
    text = json.dumps(value, ensure_ascii=False, separators=separators, allow_nan=False)
    if text.isascii():
        return text
    return text.replace("\u0085", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
