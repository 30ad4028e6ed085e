"""JSON of others: whatever is wrong with it is one kind of error, wherever it is read."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mini_vllm
from mini_vllm.api.access_log import RequestLog, _JsonFormatter
from mini_vllm.api.streaming import encode_event
from mini_vllm.benchmark.workload_files import _parsed
from mini_vllm.commands.prompts import collect_prompts
from mini_vllm.errors import MiniVLLMError
from mini_vllm.json_text import json_line, parse_json
from mini_vllm.model.model_files import _read_json
from mini_vllm.model.safetensors_source import _read_weight_map
from mini_vllm.structured_outputs import StructuredOutputsParams
from mini_vllm.tokenizer.tokenizer_files import _read_json_object

DEEP = "[" * 100_000
BROKEN = [DEEP, '{"a":' * 100_000, DEEP + "]" * 100_000, "1" * 5000, "{", "", "\ud800"]


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: text[:6])
def test_what_cannot_be_read_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (each text has a reason of its own)
        parse_json(text)


def test_what_can_be_read_is_read_as_json_loads_does() -> None:
    text = '{"a": [1, 2.5, null, true, "\\ud83e\\udee0"], "b": {}}'
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)
    assert parse_json("[NaN]", parse_constant=lambda name: name) == ["NaN"]


def readers(directory: Path) -> dict[str, Callable[[str], Any]]:
    """Everything that reads JSON of others, each as a function of the text."""

    def from_file(read: Callable[[Path], Any], name: str = "some.json") -> Callable[[str], Any]:
        def read_text(text: str) -> Any:
            (directory / name).write_text(text, encoding="utf-8")
            return read(directory / name)

        return read_text

    return {
        "config.json": from_file(_read_json),
        "index": from_file(_read_weight_map),
        "tokenizer_config.json": from_file(_read_json_object),
        "prompts": from_file(lambda path: collect_prompts([], path), "prompts.jsonl"),
        "workload": lambda text: _parsed(text, "line 1"),
        "schema": lambda text: StructuredOutputsParams(json=text),
    }


@pytest.mark.parametrize("text", [DEEP, "1" * 5000], ids=lambda text: text[:6])
def test_every_reader_refuses_it_with_an_error_of_ours(tmp_path: Path, text: str) -> None:
    for read in readers(tmp_path).values():
        with pytest.raises(MiniVLLMError):
            read(text)


def test_nobody_reads_json_of_others_in_another_way() -> None:
    """A new place that calls json.loads or json.load fails here; it should call parse_json."""
    # These read what we, or a library for us, have just written; and of what a model writes, an error is no error.
    ours = {"json_text.py", "tokenizer_files.py", "grammar.py", "peers.py", "peer_process.py", "peer_model.py"}
    ours.add("base.py")
    folder = Path(mini_vllm.__file__).parent
    calls = {path.name for path in folder.rglob("*.py") if "json.load" in path.read_text(encoding="utf-8")}
    assert calls <= ours


# Everything at which `str.splitlines` breaks a line.
LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\u0085\u2028\u2029"
TEXT = f"é{LINE_BREAKS}龜 🫠"


def access_log_line(text: str) -> str:
    record = logging.LogRecord("mini_vllm.access", logging.INFO, "", 0, "", (), None)
    record.request = RequestLog("id", "POST", "/v1/completions", prompt=text)
    return _JsonFormatter().format(record)


@pytest.mark.parametrize(
    "line",
    [
        json_line({"prompt": TEXT}),
        access_log_line(TEXT),
        encode_event({"prompt": TEXT}).decode().removeprefix("data: ").removesuffix("\n\n"),
    ],
    ids=["json_line", "access log", "event"],
)
def test_what_is_written_as_a_line_is_one_however_lines_are_counted(line: str) -> None:
    assert line.splitlines() == [line]
    assert json.loads(line)["prompt"] == TEXT
    assert "é" in line and "龜 🫠" in line, "characters stay readable"


def test_a_line_has_no_infinity() -> None:
    with pytest.raises(ValueError, match="Out of range float values"):
        json_line({"a": float("inf")})
