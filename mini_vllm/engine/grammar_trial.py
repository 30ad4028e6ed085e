"""A trial of a grammar, in a process that can be killed: does it compile, and soon?

    this process                           the other one
    vocabulary, once      ------------->   builds the library's trie
    source of a grammar   ------------->   compiles it, and computes a first mask
    reason, or None       <-------------   after at most COMPILE_SECONDS; else it is killed, and the form refused

Where it stands: `GrammarCompiler` asks before it compiles a form that may be slow. The library counts its work and
gives up where there is too much, but not in every place: a schema of two thousand characters whose strings must match
thirty patterns at once kept it busy for six minutes. A thread in the middle of that cannot be stopped; a process can.

What always holds: a trial takes no longer than its limit; whatever happens to the other process, this one lives.

In vLLM: nothing.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

COMPILE_SECONDS = 3.0
START_SECONDS = 60.0  # for the other process to begin: a busy machine is no fault of the form
MAX_MEMORY = 2 * 2**30  # bytes of address space that the other process may have
TOO_SLOW = f"it takes longer than {COMPILE_SECONDS:g} s to compile; make it simpler"
MAX_GREEDY = 16  # bytes of the longest token that is looked for
_SIZE = 8  # bytes of the length before each message
# It must find this package wherever it was started from.
_PROGRAM = "import sys; sys.path.insert(0, {root!r}); from mini_vllm.engine.grammar_trial import main; main()"


@dataclass(frozen=True)
class VocabularyBytes:
    """The bytes of every id, under the names by which the library asks for them."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_ids: list[int]

    is_tokenizer_wrapper = True
    bos_token_id = None

    @property
    def eos_token_id(self) -> int:
        return self.eos_token_ids[0]

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text that a grammar forces: at each place the longest one. It need not be the model's own way."""
        data = text if isinstance(text, bytes) else text.encode()
        token_ids, place = [], 0
        while place < len(data):
            sizes = range(min(MAX_GREEDY, len(data) - place), 0, -1)
            size = next((size for size in sizes if data[place : place + size] in self._ids), 1)
            if (token_id := self._ids.get(data[place : place + size])) is not None:
                token_ids.append(token_id)
            place += size
        return token_ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        hidden = {*self.special_token_ids, *self.eos_token_ids}
        return {token: index for index, token in enumerate(self.tokens) if token and index not in hidden}

    def trie(self) -> LLTokenizer:
        """The library's form of it."""
        # The library takes any object with these attributes; its type names one class of its own.
        return LLTokenizer(self, len(self.tokens), self.eos_token_ids)  # type: ignore[arg-type]


def limits() -> LLParserLimits:
    """How much work a grammar may make, in the library's own counts."""
    return LLParserLimits(verbose_errors=False)


class GrammarTrial:
    """The other process, started when it is needed first. For one thread at a time."""

    def __init__(self, vocabulary: VocabularyBytes) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.Queue[bytes] = queue.Queue()

    def run(self, source: str) -> str | None:
        """Try a grammar.

        Args:
            source: in the library's own language.

        Returns:
            Why it cannot be had; None if it can.

        Raises:
            RuntimeError: the other process does not start.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        if not self._send(source):  # it ended a moment ago
            self._end("")
            self._start()
            self._send(source)
        try:
            answer = self._answers.get(timeout=COMPILE_SECONDS)
        except queue.Empty:
            return self._end(TOO_SLOW)
        if not answer:
            return self._end("the compiler failed on it, or it takes too much memory")
        return pickle.loads(answer) or None

    def _start(self) -> None:
        program = _PROGRAM.format(root=str(Path(__file__).parents[2]))
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._process, self._answers = process, queue.Queue()
        weakref.finalize(self, _kill, process)
        reader = threading.Thread(target=_read_answers, args=(process.stdout, self._answers), daemon=True)
        reader.start()
        try:
            ready = self._send(self._vocabulary) and self._answers.get(timeout=START_SECONDS)
        except queue.Empty:
            ready = b""
        if not ready:
            self._end("")
            raise RuntimeError("the process that tries grammars does not start")

    def _send(self, message: Any) -> bool:
        """Whether the message went out."""
        if self._process is None or self._process.stdin is None:
            return False
        try:
            _write(self._process.stdin, message)
        except OSError:  # the process is gone
            return False
        return True

    def _end(self, reason: str) -> str:
        if self._process is not None:
            _kill(self._process)
        self._process = None
        return reason


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # of what could not be sent any more
                pipe.close()
    process.wait()


def _read_answers(pipe: IO[bytes], answers: queue.Queue[bytes]) -> None:
    """In a thread of its own: not every system can read a pipe with a time limit. Empty bytes are the end."""
    with contextlib.suppress(OSError, ValueError):  # it was closed on this side, which is an end like any other
        while (message := _read(pipe)) is not None:
            answers.put(message)
    answers.put(b"")


def _write(pipe: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message)
    pipe.write(len(data).to_bytes(_SIZE, "little") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    head = pipe.read(_SIZE)
    if len(head) < _SIZE:
        return None
    data = pipe.read(int.from_bytes(head, "little"))
    return data or None


def main() -> None:
    """The other process: a vocabulary comes in, then sources; a reason goes out for each, empty if all is well."""
    # Not there on Windows, whose memory is then not bounded; and refused where a lower limit is set already.
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    head = _read(requests)
    if head is None:
        return
    trie = pickle.loads(head).trie()
    _write(answers, "ready")
    while (data := _read(requests)) is not None:
        matcher = LLMatcher(trie, pickle.loads(data), log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        _write(answers, matcher.get_error() if matcher.is_error() else "")
