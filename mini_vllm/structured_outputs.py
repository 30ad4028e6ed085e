"""`StructuredOutputsParams`: the form that a request wants its text to have.

Where it stands: a field of `SamplingParams`. `engine/grammar.py` compiles it; nobody behind that looks at it.

What always holds: an object that exists names exactly one form, within the bounds below, so that whoever compiles it
meets no megabytes and no nesting that overflows a stack. Whether the form makes sense is for the compiler to say. It is
hashable: it is the key of the compiler's cache.

In vLLM: `StructuredOutputsParams` in `vllm/sampling_params.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from mini_vllm.errors import InvalidRequestError
from mini_vllm.json_text import parse_json

MAX_FORM_LENGTH = 64 * 1024  # characters of a schema, regex or grammar, or of all choices together
MAX_FORM_DEPTH = 64  # brackets inside brackets
MAX_CHOICES = 1024
PARAM = "structured_outputs"
# Of JSON schema: what stands under these keys is no schema itself, and these values ask for nothing.
_KEYS_OF_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_KEYS_OF_DATA = frozenset({"const", "enum", "default", "example", "examples"})
_IDLE_KEYWORDS = MappingProxyType({"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True})
FORMS = ("json", "regex", "choice", "grammar", "json_object")


class _BadForm(ValueError):
    """What is wrong with a form."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """One of five forms.

    Args:
        json: a JSON schema, as an object or as its text; afterwards its text, without `x-guidance`.
        regex: the whole answer matches it.
        choice: the answer is one of these texts.
        grammar: the answer is a sentence of this grammar: EBNF with `::=` and a rule `root` (GBNF, as llama.cpp has
            it), or Lark with a rule `start`.
        json_object: true for any JSON object.
        origin: the request's field that the form came from, for errors; more about it may follow in brackets, as in
            `tools[3].function.parameters (of 'find')`.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    origin: str = field(default=PARAM, compare=False)

    def __post_init__(self) -> None:
        try:
            self._check()
        except _BadForm as error:
            raise refuse(str(error), self.origin) from error

    def _check(self) -> None:
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise _BadForm(f"needs exactly one of {', '.join(FORMS)}; got {' and '.join(given) or 'none'}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))  # only while the object is made
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.json_object is not None and self.json_object is not True:
            raise _BadForm(f"json_object must be true, or left out; got {self.json_object!r}")
        for name, text in (("regex", self.regex), ("grammar", self.grammar)):
            if text is not None:
                _check_text(name, text)
                _check_brackets(name, text)

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> StructuredOutputsParams:
        """A form from names and values; an unknown name is refused."""
        for name in fields:
            if name not in FORMS:
                raise refuse(f"has an unknown field {str(name)[:80]!r}; known ones: {', '.join(FORMS)}")
        return StructuredOutputsParams(**fields)


@dataclass(frozen=True)
class ToolCallForm:
    """The form of an answer that calls functions. The server makes it of a request's tools (`api/tools.py`).

    Args:
        grammar: in Lark, with a rule `start`; `@arguments_0`, ... stand for the arguments, `@answer` for the answer.
        arguments: the form of each function's arguments, a JSON schema.
        answer: the form of an answer that calls nothing, if the grammar names it.
        origin: the request's field that the form came from, for errors.
    """

    grammar: str
    arguments: tuple[StructuredOutputsParams, ...]
    answer: StructuredOutputsParams | None = None
    origin: str = field(default="tools", compare=False)

    def __post_init__(self) -> None:
        try:
            schemas = ".".join(str(arguments.json) for arguments in self.arguments)
            _check_text("the schemas of all functions together", schemas + ".")
        except _BadForm as error:
            raise refuse(str(error), self.origin) from error

    @property
    def parts(self) -> tuple[StructuredOutputsParams, ...]:
        """The forms that it is made of."""
        return self.arguments if self.answer is None else (*self.arguments, self.answer)


Form: TypeAlias = StructuredOutputsParams | ToolCallForm


def refuse(reason: str, origin: str = PARAM) -> InvalidRequestError:
    """The error of a form that cannot be had."""
    return InvalidRequestError(f"{origin}: {reason}", param=origin.partition(" (")[0])


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str) or not text.strip():
        raise _BadForm(f"{name} must be a text that is not empty; got {str(text)[:80]!r}")
    if len(text) > MAX_FORM_LENGTH:
        raise _BadForm(f"{name} has {len(text)} characters; at most {MAX_FORM_LENGTH} are allowed")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _BadForm(f"{name} holds half a surrogate pair, which is no character")


def _schema_text(schema: Any) -> str:
    """The text of a JSON schema, checked."""
    try:
        if isinstance(schema, str):
            _check_text("json", schema)
            schema = parse_json(schema)
        if not isinstance(schema, Mapping):
            raise _BadForm(f"json must be a JSON schema, an object; got {str(schema)[:80]!r}")
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)  # of whatever Python made of it
    except RecursionError:
        raise _BadForm(f"json is nested deeper than {MAX_FORM_DEPTH} levels") from None
    except _BadForm:
        raise
    except (ValueError, TypeError) as error:  # damaged JSON, or values that JSON does not have
        raise _BadForm(f"json is not a JSON schema: {str(error)[:200]}") from error
    _check_text("json", text)
    _check_depth(schema)
    # x-guidance would change our own settings of the compiler (white space, unknown keywords).
    schema = {key: value for key, value in schema.items() if key != "x-guidance"}
    return json.dumps(_without_idle_keywords(schema), ensure_ascii=False)


def _without_idle_keywords(schema: Any) -> Any:
    """A schema without keywords whose value asks for nothing: the compiler refuses them by their names."""
    if isinstance(schema, (list, tuple)):
        return [_without_idle_keywords(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _KEYS_OF_NAMED_SCHEMAS and isinstance(value, Mapping):
            kept[key] = {name: _without_idle_keywords(one) for name, one in value.items()}
        elif key in _KEYS_OF_DATA:
            kept[key] = value
        elif key not in _IDLE_KEYWORDS or value is not _IDLE_KEYWORDS[key]:
            kept[key] = _without_idle_keywords(value)
    return kept


def _check_depth(schema: Any) -> None:
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_FORM_DEPTH:
            raise _BadForm(f"json is nested deeper than {MAX_FORM_DEPTH} levels")
        inner = [item for item in level if isinstance(item, (Mapping, list, tuple))]
        level = [child for item in inner for child in (item.values() if isinstance(item, Mapping) else item)]


def _check_brackets(name: str, text: str) -> None:
    depth, is_escaped = 0, False
    for character in text:
        if is_escaped or character == "\\":
            is_escaped = not is_escaped
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth = max(0, depth - 1)
        if depth > MAX_FORM_DEPTH:
            raise _BadForm(f"{name} has brackets inside brackets deeper than {MAX_FORM_DEPTH} levels")


def _choices(choices: Any) -> tuple[str, ...]:
    if isinstance(choices, (str, bytes)) or not isinstance(choices, Sequence) or not choices:
        raise _BadForm(f"choice must be a list of texts, at least one; got {str(choices)[:80]!r}")
    if len(choices) > MAX_CHOICES:
        raise _BadForm(f"choice holds {len(choices)} texts; at most {MAX_CHOICES} are allowed")
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise _BadForm(f"choice must hold only texts that are not empty; got {str(choice)[:80]!r}")
    _check_text("choice", "".join(choices) + ".")
    return tuple(choices)
