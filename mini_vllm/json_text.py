"""Reading JSON that somebody else wrote.

Where it stands: whoever reads a file, a line or a body calls `parse_json` instead of `json.loads`, and then has one
exception to think of.

What always holds: a text that is no JSON, or none that Python can hold, is a ValueError. `json.loads` alone raises
RecursionError for a hundred thousand brackets, which a file or a client can easily send.

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
