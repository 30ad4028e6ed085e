"""`SamplingParams`: how one request wants its tokens chosen, and when it wants them to end.

Where it stands: made by the user (or from an HTTP body), resolved once by the input processor, read by everything
behind.

What always holds: an object that exists is valid. A bad value raises `InvalidRequestError` at construction, with the
field's name in `param`. None means *unset* for every field: the engine then takes the model's generation_config, and
then its own default; an explicit 0 or 1.0 is a value like any other.

In vLLM: `vllm/sampling_params.py`.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mini_vllm.errors import InvalidRequestError
from mini_vllm.structured_outputs import Form, StructuredOutputsParams, ToolCallForm

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_BAD_WORDS = 1024
MAX_N = 128
MAX_LOGIT_BIAS = 100.0
GREEDY_BELOW = 1e-5  # a temperature under this is greedy
# Kernels compute in float32, which has no number for 1e300 or 1e-300. Under these bounds no logit overflows.
MAX_TEMPERATURE = 1e6  # here the draw is uniform to five digits
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
MAX_WHOLE = 2**63 - 1

_OUR_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
)
# Fields for which null means the same as leaving them out.
_NEVER_NONE = ("n", "min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    The order in which they work on the logits: raw logprobs are taken; allowed tokens, bad words, min_tokens,
    logit_bias; penalties; temperature; min_p; top_k; top_p; the draw.

    Args:
        n: answers to one prompt, each with its own random stream.
        best_of: accepted where it equals n.
        temperature: logits are divided by it; 0 (and anything under 1e-5) takes the most likely token; up to 1e6.
        top_p: keep the most likely tokens until their probability reaches it, the crossing one included; in (0, 1].
        top_k: keep the k most likely tokens; 0 and -1 keep all, and so does any k from the vocabulary's size on.
        min_p: keep tokens with at least this share of the best one's probability; in [0, 1].
        repetition_penalty: logits of tokens in prompt and output are divided (positive) or multiplied (negative) by it;
            in [1e-6, 1e6] (Keskar et al. 2019, CTRL).
        presence_penalty: subtracted from the logits of tokens that the output has; in [-2, 2].
        frequency_penalty: subtracted once for each time the output has the token; in [-2, 2].
        logit_bias: token id -> what is added to its logit, in [-100, 100].
        bad_words: texts that must not be generated.
        allowed_token_ids: the only tokens that may be generated.
        max_tokens: tokens to generate at most; unset, a completion gets 16 and a chat the rest of the context; 0 only
            with prompt_logprobs.
        min_tokens: no stop of any kind before so many tokens.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end the text, beside the model's own.
        ignore_eos: go on after an end of sequence.
        include_stop_str_in_output: keep the stop string (or the ending token) in the text.
        skip_special_tokens: special tokens add no text.
        seed: any 64-bit integer; None draws one from the operating system.
        logprobs: log-probabilities of each output token and of so many alternatives, 0 to 20.
        prompt_logprobs: the same for the prompt's tokens.
        structured_outputs: the form that the answer must have. The answer ends where the form does, also with
            ignore_eos and before min_tokens; one that max_tokens or a stop string cuts is incomplete.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Form | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in _NEVER_NONE:
            if getattr(self, name) is None:
                self._set(name, type(self).__dataclass_fields__[name].default)
        self._check_counts()
        self._check_numbers()
        self._check_token_ids()
        self._check_texts()
        self._check_structured_outputs()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "true or false")

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> SamplingParams:
        """Parameters from names and values; an unknown name is refused with the list of known ones."""
        known = [field.name for field in dataclasses.fields(SamplingParams)]
        for name in fields:
            if name not in known:
                raise InvalidRequestError(
                    f"unknown sampling parameter {name!r}; known ones: {', '.join(known)}", param=str(name)
                )
        return SamplingParams(**fields)

    def resolve(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The same request with no open question: its own values, then `defaults`, then ours.

        Args:
            defaults: sampling fields of the model's generation_config.
        """
        unset = {name: value for name, value in {**_OUR_DEFAULTS, **defaults}.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **unset)

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes a logit. Of resolved parameters only."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def adjusts_logits(self) -> bool:
        """Whether anything but temperature and truncation changes the logits. Of resolved parameters only."""
        masks = (self.allowed_token_ids, self.bad_words, self.logit_bias, self.min_tokens, self.structured_outputs)
        return self.has_penalties or any(masks)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have."""
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token_id in getattr(self, name) or ():
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(
                        f"{name} holds token id {token_id}, but the model's ids go from 0 to {vocab_size - 1}",
                        param=name,
                    )

    # ---- checks: one function a kind of value -----------------------------------------------------------------

    def _check_counts(self) -> None:
        self._set("n", _whole("n", self.n, 1, MAX_N))
        if self.best_of is not None and _whole("best_of", self.best_of, 1, MAX_N) != self.n:
            raise InvalidRequestError(
                f"best_of={self.best_of} is only supported where it equals n ({self.n}); leave it out", param="best_of"
            )
        self._set("min_tokens", _whole("min_tokens", self.min_tokens, 0))
        for name, low, high in (
            ("top_k", -1, MAX_WHOLE),
            ("max_tokens", 0, MAX_WHOLE),
            ("seed", -(2**63), 2**64 - 1),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ):
            if getattr(self, name) is not None:
                self._set(name, _whole(name, getattr(self, name), low, high))
        if self.top_k == -1:
            self._set("top_k", 0)
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InvalidRequestError(
                "max_tokens=0 generates nothing and needs prompt_logprobs; ask for at least 1 token", param="max_tokens"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}", param="min_tokens"
            )

    def _check_numbers(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, MAX_TEMPERATURE),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            value = getattr(self, name)
            if value is not None:
                self._set(name, _number(name, value, low, high, above=name == "top_p"))
        if self.temperature is not None and self.temperature < GREEDY_BELOW:
            self._set("temperature", 0.0)

    def _check_token_ids(self) -> None:
        for name in ("allowed_token_ids", "stop_token_ids"):
            value = getattr(self, name)
            if value is not None:
                if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
                    raise _refuse(name, value, "a list of token ids")
                self._set(name, _token_ids(name, value))
        if self.allowed_token_ids == ():
            raise InvalidRequestError(
                "allowed_token_ids is empty, so no token could be generated; leave it out", param="allowed_token_ids"
            )
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise _refuse("logit_bias", self.logit_bias, "an object of token ids and numbers")
            limit = MAX_LOGIT_BIAS
            bias = {
                _token_key(key): _number("logit_bias", value, -limit, limit) for key, value in self.logit_bias.items()
            }
            self._set("logit_bias", bias)

    def _check_texts(self) -> None:
        self._set("stop", _texts("stop", (self.stop,) if isinstance(self.stop, str) else self.stop, MAX_STOP_STRINGS))
        self._set("bad_words", _texts("bad_words", self.bad_words, MAX_BAD_WORDS))

    def _check_structured_outputs(self) -> None:
        form = self.structured_outputs
        if isinstance(form, Mapping):
            self._set("structured_outputs", StructuredOutputsParams.from_fields(form))
        elif form is not None and not isinstance(form, (StructuredOutputsParams, ToolCallForm)):
            raise _refuse("structured_outputs", form, "an object with one of json, regex, choice, grammar, json_object")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # only while the object is made


def _whole(name: str, value: Any, low: int, high: int = MAX_WHOLE) -> int:
    """A whole number in [low, high]; NumPy's count, booleans and 1.0 do not."""
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        number = int(value)
        if low <= number <= high:
            return number
    raise _refuse(name, value, f"a whole number from {low} to {'2**63 - 1' if high == MAX_WHOLE else high}")


def _token_ids(name: str, values: Sequence[Any]) -> tuple[int, ...]:
    """Whole numbers of 0 or more. There may be a whole vocabulary of them, so the usual case has no loop."""
    if set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_WHOLE:
        return tuple(values)
    return tuple(_whole(name, value, 0) for value in values)


def _number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    """A number in [low, high], or in (low, high] with `above`; NumPy's count, booleans do not."""
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:  # an integer of hundreds of digits
            number = math.inf
        if low <= number <= high and not (above and number == low):  # false for NaN
            return number
    wanted = f"over {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
    raise _refuse(name, value, f"a number {wanted}")


def _texts(name: str, value: Any, most: int) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise _refuse(name, value, "a list of texts")
    if len(value) > most:
        raise InvalidRequestError(f"{name} holds {len(value)} texts; at most {most} are allowed", param=name)
    for text in value:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
            raise _refuse(name, text, f"made of texts of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(value)


def _token_key(key: Any) -> int:
    """A key of logit_bias: JSON has no integer keys, so digits count as well."""
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= len(str(MAX_WHOLE)):
        key = int(key)
    if isinstance(key, bool) or not isinstance(key, numbers.Integral) or not 0 <= int(key) <= MAX_WHOLE:
        raise _refuse("a key of logit_bias", key, "a token id, a whole number from 0 to 2**63 - 1", param="logit_bias")
    return int(key)


def _refuse(name: str, value: Any, wanted: str, *, param: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {wanted}; got {_shown(value)}", param=param or name)


def _shown(value: Any) -> str:
    """The value for a message, cut short."""
    try:
        shown = repr(value)
    except ValueError:  # Python does not print integers of more than 4300 digits
        shown = f"a {type(value).__name__} too long to show"
    return shown if len(shown) <= 80 else shown[:77] + "..."
