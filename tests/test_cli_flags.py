"""Flags made from dataclass fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from mini_vllm import cli
from mini_vllm.commands.dataclass_flags import FlagGroup, field_texts, flags_from
from mini_vllm.config import EngineConfig
from mini_vllm.errors import InvalidRequestError
from mini_vllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class Options:
    """Options of a test.

    Args:
        whole: a whole
            number.
        part, other: they share this: a text with a colon.
        size: bytes or text.
        kind: one of two.
        is_on: a switch.
        texts: several.
        ids: several numbers.
        bias: pairs.

    Raises:
        Nothing: this is not an entry.
    """

    whole: int = 3
    part: float | None = None
    other: float = 0.5
    size: int | str | None = None
    kind: Literal["left", "right"] = "left"
    is_on: bool = True
    texts: str | Sequence[str] | None = None
    ids: Sequence[int] | None = None
    bias: Mapping[int, float] | None = None


@dataclass(frozen=True)
class More:
    """More options.

    Args:
        more: a thing of its own.
        whole: has the same name as another group's.
    """

    more: int = 1
    whole: int = 7


def run(*arguments: str) -> tuple[Options, More]:
    """What a command with these flags gets."""
    got: list[Any] = []
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @flags_from(options=FlagGroup(Options), more=FlagGroup(More, without=frozenset({"whole"})))
    def command(name: str = "", *, options: Options, more: More) -> None:
        got.extend([options, more])

    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    if result.exit_code:
        raise SystemExit(result.output)
    return got[0], got[1]


def test_without_flags_the_defaults_of_the_dataclass_stand() -> None:
    assert run() == (Options(), More())


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--whole", "5"], "whole", 5),
        (["--whole", "0"], "whole", 0),
        (["--part", "0"], "part", 0.0),
        (["--part", "-1.5"], "part", -1.5),
        (["--size", "2GiB"], "size", "2GiB"),
        (["--size", "1024"], "size", "1024"),
        (["--kind", "right"], "kind", "right"),
        (["--no-is-on"], "is_on", False),
        (["--is-on"], "is_on", True),
        (["--texts", "a", "--texts", "b c"], "texts", ["a", "b c"]),
        (["--ids", "1", "--ids", "2"], "ids", [1, 2]),
        (["--bias", "1=-5", "--bias", "2=0.5"], "bias", {"1": -5.0, "2": 0.5}),
    ],
)
def test_a_flag_sets_its_field_and_no_other(arguments: list[str], field: str, value: object) -> None:
    assert run(*arguments) == (dataclasses.replace(Options(), **{field: value}), More())


def test_a_field_left_out_of_one_group_is_the_flag_of_the_other() -> None:
    assert run("--whole", "9", "--more", "2") == (Options(whole=9), More(more=2))


@pytest.mark.parametrize("wrong", [["--whole", "x"], ["--whole", "1.5"], ["--part", "x"], ["--unknown", "1"]])
def test_what_is_no_value_of_the_type_is_a_usage_error(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        run(*wrong)


@pytest.mark.parametrize("wrong", ["5", "5=", "5=x"])
def test_a_pair_without_a_number_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(InvalidRequestError, match="bias takes ID=BIAS") as refused:
        run("--bias", wrong)
    assert refused.value.param == "bias"


def test_help_is_the_entry_of_the_docstring() -> None:
    shared = "they share this: a text with a colon."
    assert field_texts(Options) == {
        "whole": "a whole number.",
        "part": shared,
        "other": shared,
        "size": "bytes or text.",
        "kind": "one of two.",
        "is_on": "a switch.",
        "texts": "several.",
        "ids": "several numbers.",
        "bias": "pairs.",
    }


@pytest.mark.parametrize(("name", "text"), [("whole", "1.5"), ("whole", "many"), ("ids", "1e3"), ("part", "half")])
def test_what_is_no_number_is_shown(name: str, text: str) -> None:
    with pytest.raises(SystemExit, match=rf"Invalid value for '--{name}': must be a (whole )?number, got '{text}'"):
        run(f"--{name}", text)


@pytest.mark.parametrize(
    "command", [["generate", "Hi"], ["chat"], ["bench", "throughput"], ["bench", "latency"]], ids=str
)
def test_flags_come_from_the_environment_where_they_are_not_given(command: list[str]) -> None:
    def message_of(*flags: str) -> str:
        return str(CliRunner(env={"MINI_VLLM_THREADS": "0"}).invoke(cli.app, [*command, *flags]).exception)

    assert "threads must be a whole number of 1 or more, got 0" in message_of()
    assert "max_model_len must be 2 or more" in message_of("--threads", "1", "--max-model-len", "1")


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams])
def test_every_field_has_such_an_entry(kind: type[Any]) -> None:
    assert set(field_texts(kind)) >= {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("command", "without"),
    [
        ("generate", {"best_of", "structured_outputs"}),
        ("chat", {"n", "best_of", "logprobs", "prompt_logprobs", "structured_outputs"}),
    ],
)
def test_every_field_is_a_flag_in_help(command: str, without: set[str]) -> None:
    help_text = CliRunner().invoke(cli.app, [command, "--help"]).output
    fields = [*dataclasses.fields(EngineConfig), *dataclasses.fields(SamplingParams)]
    names = {field.name for field in fields}
    shown = {name for name in names if f"--{name.replace('_', '-')} " in help_text}
    assert shown == names - without
