"""Command-line flags made from the fields of a dataclass, so that a new field is a flag by itself.

Where it stands: between Typer and the commands. A command asks for whole dataclasses,

    @flags_from(sampling=FlagGroup(SamplingParams), engine=FlagGroup(EngineConfig))
    def generate(prompts: ..., *, sampling: SamplingParams, engine: EngineConfig) -> None: ...

and Typer sees a function that has one parameter a field in their place:

    max_tokens: int | None = None           --max-tokens N
    ignore_eos: bool = False                --ignore-eos / --no-ignore-eos
    dtype: Literal["auto", "float32"]       --dtype auto|float32
    stop: str | Sequence[str] | None        --stop TEXT, again for each more
    logit_bias: Mapping[int, float] | None  --logit-bias ID=BIAS, again for each more

The text of `--help` is the field's entry under `Args:` in the class's docstring.

What always holds: a flag that is not given is not passed on, so the dataclass's own default stands, and its own checks
are the only ones.

In vLLM: `EngineArgs.add_cli_args` in `vllm/engine/arg_utils.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from mini_vllm.errors import InvalidRequestError

# Of every command: what is not given may be in the environment, `--max-model-len` as MINI_VLLM_MAX_MODEL_LEN.
FLAGS_FROM_ENVIRONMENT: dict[str, Any] = {"auto_envvar_prefix": "MINI_VLLM"}
_SHORT = MappingProxyType({"model": "-m"})
_METAVARS: Mapping[type[Any], str | None] = MappingProxyType({str: "TEXT", float: "X", int: "N", bool: None})


@dataclass(frozen=True)
class FlagGroup:
    """The flags of one dataclass.

    Args:
        kind: the dataclass.
        without: fields that get no flag in this command.
    """

    kind: type[Any]
    without: frozenset[str] = frozenset()

    @property
    def fields(self) -> list[dataclasses.Field[Any]]:
        return [field for field in dataclasses.fields(self.kind) if field.name not in self.without]


def flags_from(**groups: FlagGroup) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace each named parameter of a command, which takes a dataclass, by one flag a field.

    Args:
        groups: parameter name -> its dataclass. Two groups may not have a flag in common.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**values: Any) -> None:
            for parameter, group in groups.items():
                given = {field.name: values.pop(field.name) for field in group.fields}
                values[parameter] = _build(group.kind, given)
            function(**values)

        parameters: list[inspect.Parameter] = []
        for own in inspect.signature(function, eval_str=True).parameters.values():
            parameters += _flags(groups[own.name]) if own.name in groups else [own.replace(kind=own.KEYWORD_ONLY)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _build(kind: type[Any], given: Mapping[str, Any]) -> Any:
    """The dataclass from the flags that were given; an absent flag is None, or empty if it can be repeated."""
    hints = get_type_hints(kind)
    fields = {name: value for name, value in given.items() if value is not None and value not in ([], ())}
    for name, value in fields.items():
        if Mapping in _kinds(hints[name]):
            fields[name] = dict(_key_and_number(name, item) for item in value)
    return kind(**fields)


def _key_and_number(name: str, text: str) -> tuple[str, float]:
    """`ID=BIAS`; whether the id is one is checked with the value's other rules."""
    key, _, number = text.partition("=")
    try:
        return key, float(number)
    except ValueError as error:
        raise InvalidRequestError(f"{name} takes ID=BIAS, such as 42=-5.5; got {text!r}", param=name) from error


def _flags(group: FlagGroup) -> list[inspect.Parameter]:
    hints, texts = get_type_hints(group.kind), field_texts(group.kind)
    return [_flag(field, hints[field.name], texts[field.name]) for field in group.fields]


def _flag(field: dataclasses.Field[Any], hint: Any, text: str) -> inspect.Parameter:
    """One field as a Typer parameter that is None unless the flag is given."""
    flag = "--" + field.name.replace("_", "-")
    value_type, metavar = _value_type(hint)
    names = [f"{flag}/--no-{flag[2:]}"] if value_type is bool else [flag]
    names += [_SHORT[field.name]] if field.name in _SHORT else []
    text = text[0].upper() + text[1:]
    if get_origin(value_type) is list:
        text += " Give it again for more."
    elif isinstance(field.default, bool):
        text += " [default: on]" if field.default else ""
    elif field.default is not None:
        text += f" [default: {field.default}]"
    parser = _PARSERS.get(get_args(value_type)[0] if get_origin(value_type) is list else value_type)
    option = typer.Option(*names, help=text, metavar=metavar, show_default=False, parser=parser)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[value_type | None, option]
    )


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise typer.BadParameter(f"must be a whole number, got {text[:80]!r}") from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(f"must be a number, got {text[:80]!r}") from error


# Typer's own messages do not show what was given.
_PARSERS: Mapping[Any, Callable[[str], Any]] = MappingProxyType({int: _whole_number, float: _number})


def _kinds(hint: Any) -> dict[Any, tuple[Any, ...]]:
    """The members of a type: `str | Sequence[str] | None` -> {str: (), Sequence: (str,)}."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return {get_origin(member) or member: get_args(member) for member in members if member is not NoneType}


def _value_type(hint: Any) -> tuple[Any, str | None]:
    """The type Typer reads a flag as, and the placeholder of its value in `--help`."""
    kinds = _kinds(hint)
    if Mapping in kinds:
        return list[str], "ID=BIAS"
    if Sequence in kinds:
        (item,) = kinds[Sequence]
        return list[item], _METAVARS[item]  # type: ignore[valid-type]
    if Literal in kinds:
        return str, "|".join(kinds[Literal])  # the dataclass checks it, with a better message
    # Text first: what may be a number or a text is read as a text, and the dataclass understands numbers in it.
    kind = next(kind for kind in _METAVARS if kind in kinds)
    return kind, _METAVARS[kind]


def field_texts(kind: type[Any]) -> dict[str, str]:
    """The entries under `Args:` in a class's docstring, each on one line.

    Entries that share one (`prompt, answer: ...`) share the text.
    """
    section = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[2]
    texts: dict[str, str] = {}
    _, *entries = re.split(r"\n {4}(?=\S)", "\n" + section.split("\n\n")[0])
    for entry in entries:
        names, _, text = entry.partition(": ")
        texts.update((name, " ".join(text.split())) for name in names.split(", "))
    return texts
