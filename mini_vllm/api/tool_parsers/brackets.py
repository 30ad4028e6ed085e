"""Where a value in brackets ends, in text that comes in pieces.

    {"q": "a } b"} and more
    ^            ^
    begins       the bracket that closes it; the one in the string does not count

Where it stands: the tool parsers ask it before they parse. It looks at every character once, however the text is cut.

In vLLM: nothing; its parsers use a library that reads JSON which is not whole.
"""

from __future__ import annotations

import re


class BracketScanner:
    """Follows one value.

    Args:
        quotes: characters that begin and end strings: `"` for JSON, `"'` for Python.
    """

    def __init__(self, quotes: str = '"') -> None:
        self._outside = re.compile(rf"[\[\](){{}}{quotes}]")
        self._inside = {quote: re.compile(rf"\\.?|{quote}", re.DOTALL) for quote in quotes}
        self._place = 0
        self._depth = 0
        self._quote: str | None = None
        self._end: int | None = None

    @property
    def is_in_string(self) -> bool:
        """Whether the text ended inside a string, when it was looked at last."""
        return self._quote is not None

    def end(self, text: str, begin: int = 0) -> int | None:
        """The position behind the value, None as long as it is not closed.

        Args:
            text: what there is by now; it may only grow from call to call.
            begin: where the value begins; the same at each call.
        """
        self._place = max(self._place, begin)
        while self._end is None:
            pattern = self._outside if self._quote is None else self._inside[self._quote]
            found = pattern.search(text, self._place)
            if found is None:
                self._place = len(text)
                return None
            if found.group() == "\\":
                self._place = found.start()  # the character that it escapes has not come yet
                return None
            self._place = found.end()
            self._step(found.group())
            if self._depth == 0 and self._quote is None:
                self._end = self._place
        return self._end

    def _step(self, mark: str) -> None:
        if self._quote is not None:
            if mark == self._quote:
                self._quote = None
        elif mark in self._inside:
            self._quote = mark
        elif mark in "([{":
            self._depth += 1
        else:
            self._depth = max(0, self._depth - 1)
