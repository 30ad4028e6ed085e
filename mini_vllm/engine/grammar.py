"""Grammars: which tokens may come next, so that an answer has the form that its request asks for.

Where it stands: the input processor compiles a request's form once; every sequence walks through it with a state of its
own. The scheduler asks the state for a mask when it schedules a draw, and moves it on when it commits the token:

    form -> GrammarTrial -> GrammarCompiler -> CompiledGrammar -> GrammarState, one a sequence
            if it may be slow  (off the loop)     (Request)        mask() -> Draw -> sampler -> advance(token)

    regex  ab?   state    allowed                 finished
                 ""       a                       no
                 "a"      b, end of sequence      no: the model chooses
                 "ab"     end of sequence         yes: nothing else can come, so nobody waits for it

What always holds: an end of sequence is allowed exactly where the answer is complete; an id without text, or beyond the
tokenizer's vocabulary, is never allowed; a form that cannot be compiled, or only in part, is refused with the reason.

The work is done by the `llguidance` library (an Earley parser over derivative-based regular expressions that walks the
vocabulary as a trie). In vLLM: `vllm/v1/structured_output/`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.numpy import fill_next_token_bitmask

from mini_vllm.engine.grammar_trial import COMPILE_SECONDS, GrammarTrial, VocabularyBytes, limits
from mini_vllm.errors import InvalidRequestError
from mini_vllm.structured_outputs import Form, ToolCallForm, refuse
from mini_vllm.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # exists for type checkers only

Bitmask = npt.NDArray[np.int32]

CACHED_GRAMMARS = 64
_SLOW_WORDS = ('"pattern', '"format"', '"multipleOf"', '"allOf"')
MAX_REASON = 300  # characters of the library's explanation that a message shows
# A model must not write blanks for ever, and a keyword that the library does not enforce is an error.
JSON_OVERRIDES: Mapping[str, Any] = MappingProxyType(
    {"whitespace_flexible": True, "whitespace_pattern": r"[ \n]{0,2}", "lenient": False, "coerce_one_of": False}
)


class GrammarState:
    """How far one sequence is in its grammar.

    Args:
        matcher: the library's state, at the beginning, this object's own.
        ends: [ceil(vocabulary / 32)] int32, bits of the ids that end a sequence.
    """

    def __init__(self, matcher: LLMatcher, ends: Bitmask) -> None:
        self._matcher = matcher
        self._ends = ends
        self._mask: Bitmask | None = None

    @property
    def error(self) -> str | None:
        """Why the grammar cannot go on (it became too complex); None as long as it can."""
        return _reason(self._matcher.get_error()) if self._matcher.is_error() else None

    def mask(self) -> Bitmask:
        """Tokens that may come next: [ceil(vocabulary / 32)] int32, bit t % 32 of word t // 32 set for token t.

        No bit is set after an error. The array is the caller's to keep and not to change.
        """
        if self._mask is None:
            mask = np.zeros((1, len(self._ends)), np.int32)
            fill_next_token_bitmask(self._matcher, mask)
            # After an error the library allows an end of sequence, as if all were well.
            self._mask = np.zeros_like(mask[0]) if self._matcher.is_error() else mask[0]
        return self._mask

    def advance(self, token_id: int) -> None:
        """Take the token that was drawn."""
        self._mask = None
        self._matcher.consume_token(token_id)

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing but an end of sequence can follow."""
        if self._matcher.is_error():
            return False
        if self._matcher.is_stopped():
            return True
        return self._matcher.is_accepting() and not (self.mask() & ~self._ends).any()


class CompiledGrammar:
    """A form, ready for any number of sequences. It never changes, so threads may share it."""

    def __init__(self, matcher: LLMatcher, ends: Bitmask) -> None:
        self._matcher = matcher
        self._ends = ends

    def new_state(self) -> GrammarState:
        """The state of a sequence that has no output yet."""
        return GrammarState(self._matcher.deep_copy(), self._ends)


class GrammarCompiler:
    """Compiles forms for one tokenizer, and remembers the latest. Threads may call it at the same time.

    Args:
        tokenizer: the model's.
        vocab_size: width of the logits; ids from the tokenizer's size on are never allowed.
        eos_token_ids: every id that ends a sequence.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._ends = np.zeros(-(-vocab_size // 32), np.uint32)
        for token_id in self._eos_token_ids:
            self._ends[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._trie: LLTokenizer | None = None
        self._trial: GrammarTrial | None = None
        self._trial_lock = threading.Lock()
        self._trie_lock = threading.Lock()
        self._cache: OrderedDict[Form, CompiledGrammar] = OrderedDict()
        self._refused: OrderedDict[Form, str] = OrderedDict()  # forms that failed their trial, and why
        self._cache_lock = threading.Lock()

    def compile(self, form: Form) -> CompiledGrammar:
        """The grammar of a form.

        Raises:
            InvalidRequestError: with the reason, for a form that makes no sense, is not supported, or is too complex.
        """
        with self._cache_lock:
            if form in self._cache:
                self._cache.move_to_end(form)
                return self._cache[form]
        if not self._eos_token_ids:
            raise refuse(
                "this model has no end-of-sequence token, so no answer could end where its form does", form.origin
            )
        try:
            grammar = self._compile(form)
        except InvalidRequestError:
            self._blame_a_part(form)
            raise
        with self._cache_lock:
            self._cache[form] = grammar
            if len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return grammar

    def _blame_a_part(self, form: Form) -> None:
        """Raise the error of the function whose arguments are at fault, where a form of several has failed."""
        if not isinstance(form, ToolCallForm):
            return
        deadline = time.monotonic() + COMPILE_SECONDS
        for part in form.parts:
            self._compile(part)
            if time.monotonic() > deadline:
                return

    def _compile(self, form: Form) -> CompiledGrammar:
        source = _grammar_source(form)
        if _may_be_slow(form):
            self._try(form, source)
        matcher = LLMatcher(self._vocabulary(), source, log_level=0, limits=limits())
        ends = self._ends.view(np.int32)
        grammar = CompiledGrammar(matcher, ends)
        state = grammar.new_state()
        if matcher.is_error():
            raise refuse(_reason(matcher.get_error()), form.origin)
        if warnings := matcher.get_grammar_warnings():
            raise refuse(f"not all of it can be enforced: {_reason('; '.join(warnings))}", form.origin)
        if not state.mask().any() or state.error is not None:
            raise refuse(state.error or "no token of this model can begin such an answer", form.origin)
        if state.is_finished:
            raise refuse("no answer but the empty one has this form; it must allow some text", form.origin)
        return grammar

    def _try(self, form: Form, source: str) -> None:
        """Refuse a form that does not compile, or not in time; what was refused is remembered."""
        with self._trial_lock:  # whoever waits here with the same form finds it refused
            reason = self._refused.get(form) or self._trial_process().run(source)
            if reason is not None:
                self._refused[form] = reason
                if len(self._refused) > CACHED_GRAMMARS:
                    self._refused.popitem(last=False)
        if reason is not None:
            raise refuse(_reason(reason), form.origin)

    def _vocabulary(self) -> LLTokenizer:
        """The vocabulary as the library's trie, made when the first grammar needs it."""
        with self._trie_lock:
            if self._trie is None:
                words = self._bytes()
                self._trie = _OwnVocabulary(
                    words.tokens, words.special_token_ids, words.eos_token_ids, self._tokenizer
                ).trie()
            return self._trie

    def _trial_process(self) -> GrammarTrial:
        if self._trial is None:
            self._trial = GrammarTrial(self._bytes())
        return self._trial

    def _bytes(self) -> VocabularyBytes:
        special = self._tokenizer.special_token_ids.union(self._eos_token_ids)
        return VocabularyBytes(
            tokens=[self._tokenizer.token_bytes(token_id) for token_id in range(self._vocab_size)],
            special_token_ids=sorted(token_id for token_id in special if token_id < self._vocab_size),
            eos_token_ids=self._eos_token_ids,
        )


@dataclass(frozen=True)
class _OwnVocabulary(VocabularyBytes):
    """The vocabulary with the model's own way of tokenizing, which the library asks where only one text can follow."""

    tokenizer: Tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        return self.tokenizer.encode(text, add_special_tokens=False)


def _may_be_slow(form: Form) -> bool:
    """Whether compiling could take long: regular expressions can, and grammars and some keywords of schemas have them.

    A word may also be a property's name; then a form is tried that need not be.
    """
    if isinstance(form, ToolCallForm):
        return any(_may_be_slow(part) for part in form.parts)
    if form.regex is not None or form.grammar is not None:
        return True
    return isinstance(form.json, str) and any(word in form.json for word in _SLOW_WORDS)


def _grammar_source(form: Form) -> str:
    """The form in the library's own language: a list of grammars, of which the first is the whole."""
    if isinstance(form, ToolCallForm):
        return _calls_source(form)
    if isinstance(form.json, str) or form.json_object:
        schema = form.json if isinstance(form.json, str) else '{"type": "object"}'
        overrides = cast("JsonCompileOptions", dict(JSON_OVERRIDES))
        try:
            return LLMatcher.grammar_from_json_schema(schema, overrides=overrides)
        except ValueError as error:  # numbers that JSON knows and the library does not: 1e999, 10**400
            raise refuse(f"the schema cannot be read: {_reason(str(error))}", form.origin) from error
    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.choice is not None:
        texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in form.choice)
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(form.grammar or ""))
    except Exception as error:  # the converter raises this very class for a rule that is missing
        raise refuse(f"the grammar cannot be read: {_reason(str(error))}", form.origin) from error


def _calls_source(form: ToolCallForm) -> str:
    """Grammars name each other with `@`: the calls' own one, then those of the arguments, then that of an answer."""
    named = {f"arguments_{index}": _grammar_source(arguments) for index, arguments in enumerate(form.arguments)}
    if form.answer is not None:
        named["answer"] = _grammar_source(form.answer)
    grammars = [{"name": "calls", "lark_grammar": form.grammar}]
    for name, source in named.items():
        (one,) = json.loads(source)["grammars"]
        grammars.append({**one, "name": name})
    return json.dumps({"grammars": grammars})


def _reason(message: str) -> str:
    """The library's explanation, without what it adds on its own state."""
    message = " ".join(message.partition("<state>")[0].replace("<non-verbose/>", "").split())
    if message.startswith("NoExtension"):
        return "no text satisfies it"
    return message if len(message) <= MAX_REASON else message[: MAX_REASON - 3] + "..."
