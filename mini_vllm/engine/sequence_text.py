"""The text of one sequence, made when somebody reads it.

Where it stands: the output processor keeps one for each sequence and puts it into the outputs as their `Answer`. Here
the tokens go through the detokenizer and the matcher of stop strings:

    tokens so far        T0    T1    T2    T3   (end)
    pieces               "A "  ""    "龜"             T1 is half a character; T3 has come, but nobody has asked for it
                         '---- made -----'  '-- not yet --'

Who reads: a stream at every step, the matcher of a request with stop strings too, everyone else at the end. Pieces are
made in order, one a token, and then kept. So it makes no difference to a text when it is read, or in how many goes.

What always holds: pieces depend on the tokens and on how the answer ended, which is known before its last token is
handed out. Any thread may read, while the engine's own adds tokens.

In vLLM: `vllm/v1/engine/detokenizer.py`, at every step.
"""

from __future__ import annotations

import threading
from typing import Any

from mini_vllm.engine.sequence import Sequence
from mini_vllm.engine.stop_strings import StopStringMatcher
from mini_vllm.outputs import CompletionOutput, FinishReason, TokenLogprobs
from mini_vllm.tokenizer.detokenizer import IncrementalDetokenizer
from mini_vllm.tokenizer.tokenizer import Tokenizer


class SequenceText:
    """See the module; the methods without a docstring are those of `Answer`.

    Attributes:
        times: seconds on the engine's clock, one an output token.
    """

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        request = sequence.group.request
        self._sequence = sequence
        self._params = request.params
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, request.prompt_token_ids, skip_special_tokens=self._params.skip_special_tokens
        )
        self._matcher = StopStringMatcher(self._params.stop or (), include_stop=self._params.include_stop_str_in_output)
        self._lock = threading.Lock()
        self._token_texts: list[str] = []
        self._rest = ""  # what the detokenizer still had at the end; it belongs to the last token
        self._pieces: list[str] = []  # of the text that may be shown: one a token, and one for the end
        self._num_reported = 0
        self.times: list[float] = []

    def find_stop(self) -> str | None:
        """The stop string that the tokens so far have completed, if any."""
        self._make_pieces(self._length)
        return self._matcher.matched

    def new_output(self) -> CompletionOutput:
        """The answer as it is now. What was added since the last call is its delta."""
        sequence, start, end = self._sequence, self._num_reported, self._length
        self._num_reported = end
        return CompletionOutput(sequence.index, sequence.finish_reason, sequence.stop_reason, self, start, end)

    def text(self, start: int, end: int) -> str:
        self._make_pieces(end)
        return "".join(self._pieces[start:end])

    def token_ids(self, start: int, end: int) -> list[int]:
        first = self._sequence.num_prompt_tokens
        return self._sequence.token_ids[first + start : first + end]

    def logprobs(self, start: int, end: int) -> list[TokenLogprobs] | None:
        return None if self._params.logprobs is None else self._sequence.logprobs[start:end]

    def token_texts(self, start: int, end: int) -> list[str] | None:
        if self._params.logprobs is None:
            return None
        self._make_pieces(end)
        texts = self._token_texts[start:end]
        if texts and end > self._sequence.num_output_tokens:
            texts[-1] += self._rest
        return texts

    def token_times(self, start: int, end: int) -> list[float]:
        return self.times[start:end]

    @property
    def _length(self) -> int:
        """What an `Answer` counts in: the tokens, and one more for the end."""
        return self._sequence.num_output_tokens + (self._sequence.finish_reason is not None)

    def _make_pieces(self, end: int) -> None:
        """Make all pieces before `end` that are not there yet."""
        if len(self._pieces) >= end:
            return
        with self._lock:
            for place in range(len(self._pieces), end):
                is_token = place < self._sequence.num_output_tokens
                self._pieces.append(self._piece_of_token(place) if is_token else self._piece_of_end())

    def _piece_of_token(self, place: int) -> str:
        sequence = self._sequence
        token_id = sequence.token_ids[sequence.num_prompt_tokens + place]
        text = "" if self._is_silent_end(token_id, place) else self._detokenizer.push(token_id)
        self._token_texts.append(text)
        return self._matcher.push(text, may_stop=place + 1 > self._params.min_tokens)

    def _is_silent_end(self, token_id: int, place: int) -> bool:
        """Whether it is the end of sequence or stop id that ended the answer: it has no text unless that is wanted.

        A grammar that is finished also ends an answer, with a token that is text.
        """
        sequence = self._sequence
        if sequence.finish_reason is not FinishReason.STOP or self._params.include_stop_str_in_output:
            return False
        return place + 1 == sequence.num_output_tokens and token_id in sequence.group.request.stop_token_ids

    def _piece_of_end(self) -> str:
        """No token follows: what was held back, unless a stop string has cut it off."""
        if self._matcher.matched is not None:
            return ""
        self._rest = self._detokenizer.flush()
        shown = self._matcher.push(self._rest, may_stop=self._sequence.num_output_tokens > self._params.min_tokens)
        return shown if self._matcher.matched is not None else shown + self._matcher.flush()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: all pieces are made now, and what makes them stays behind."""
        self._make_pieces(self._length)
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_detokenizer")}
