"""Stop strings in streamed text: what may be shown, and where the text ends.

Where it stands: between the detokenizer and the output, one matcher a sequence.

Text that could be the beginning of a stop string is held back until it is known; nothing else is:

    stop "DEFGHI"      push "C"   -> "C"
                       push "DE"  -> ""      held: DE
                       push "FX"  -> "DEFX"  it was not one
                       push "DEF" -> ""      held: DEF
                       push "GHIJ"-> stop    the text ends before the D

While it is too early to stop (min_tokens) a stop string that completes is text like any other; one that has only begun
is held back all the same, since it may complete later, and then it counts.

What always holds: the text shown plus the text held back is the text pushed; the held part is shorter than the longest
stop string, so a push costs no more than its own text and the stop strings, however long the answer is.

In vLLM: `check_stop_strings` in `vllm/v1/engine/detokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Looks for the first stop string that completes.

    Args:
        stops: non-empty strings.
        include_stop: whether the stop string itself is shown.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Text that may be shown now that `text` has come. `matched` is set once a stop string has completed.

        Args:
            may_stop: False while it is too early: a stop string that completes in `text` does not count.
        """
        if not self._stops or not text:
            return text
        num_held, text = len(self._held), self._held + text
        found = self._first_stop(text, num_held) if may_stop else None
        if found is not None:
            end, start, self.matched = found
            self._held = ""
            return text[: end if self._include_stop else start]
        shown = len(text) - self._longest_beginning(text)
        self._held = text[shown:]
        return text[:shown]

    def _first_stop(self, text: str, num_held: int) -> tuple[int, int, str] | None:
        """End, start and text of the stop string that completes first after the first `num_held` characters."""
        places = ((text.find(stop, max(0, num_held - len(stop) + 1)), stop) for stop in self._stops)
        return min(((start + len(stop), start, stop) for start, stop in places if start >= 0), default=None)

    def flush(self) -> str:
        """No more text will come: what was held back was not a stop string."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest tail of `text` that a stop string begins with."""
        longest = min(max(map(len, self._stops)) - 1, len(text))
        for length in range(longest, 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
