"""`mini-vllm serve`: what its flags and environment variables come to, and that the page on serving knows them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
import pytest
import typer

from mini_vllm import cli
from mini_vllm.api import process
from mini_vllm.api.server_config import ServerConfig
from mini_vllm.config import EngineConfig
from mini_vllm.errors import InvalidConfigError

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
FIELDS = {field.name: field for kind in (ServerConfig, EngineConfig) for field in dataclasses.fields(kind)}

# A value for each field that is not its default, as text and as what it comes to.
VALUES: dict[str, tuple[str, Any]] = {
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("8123", 8123),
    "api_key": ("one two", ["one", "two"]),
    "allowed_origins": ("https://a.example https://b.example", ["https://a.example", "https://b.example"]),
    "max_queue_size": ("7", 7),
    "max_body_size": ("4096", 4096),
    "request_timeout": ("2.5", 2.5),
    "shutdown_timeout": ("0", 0.0),
    "step_timeout": ("9", 9.0),
    "heartbeat": ("1.5", 1.5),
    "log_format": ("json", "json"),
    "log_prompts": ("1", True),
    "model": ("some/model", "some/model"),
    "revision": ("v1", "v1"),
    "model_impl": ("native", "native"),
    "served_model_name": ("mine", "mine"),
    "dtype": ("float32", "float32"),
    "device": ("cpu", "cpu"),
    "load_format": ("dummy", "dummy"),
    "max_model_len": ("512", 512),
    "max_num_seqs": ("8", 8),
    "max_num_batched_tokens": ("64", 64),
    "cache": ("contiguous", "contiguous"),
    "scheduling": ("static", "static"),
    "policy": ("priority", "priority"),
    "block_size": ("32", 32),
    "num_kv_blocks": ("99", 99),
    "kv_cache_memory": ("1GiB", 2**30),
    "kv_cache_memory_fraction": ("0.25", 0.25),
    "attention_backend": ("paged_reference", "paged_reference"),
    "enable_prefix_caching": ("false", False),
    "enable_chunked_prefill": ("0", False),
    "generation_config": ("none", "none"),
    "chat_template": ("chat.jinja", "chat.jinja"),
    "seed": ("5", 5),
    "threads": ("2", 2),
    "trace": ("trace.json", "trace.json"),
    "debug_checks": ("true", True),
}


class Started(Exception):
    """Stands for the server's start."""

    def __init__(self, server: ServerConfig, engine: EngineConfig) -> None:
        self.config = {**dataclasses.asdict(server), **dataclasses.asdict(engine)}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `mini-vllm serve` up to where it would start; returns the options that it would start with."""
    monkeypatch.setattr("mini_vllm.engine.llm_engine.LLMEngine", lambda config: config)

    def stop(server: ServerConfig, load: Any) -> int:
        raise Started(server, load())

    monkeypatch.setattr(process, "run_server", stop)

    def run(*arguments: str) -> dict[str, Any]:
        with pytest.raises(Started) as started:
            cli.app(["serve", *arguments], standalone_mode=False)
        return started.value.config

    return run


def flags() -> dict[str, str]:
    """Each option of the command, by the name of its environment variable."""
    command = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    with click.Context(command, auto_envvar_prefix="MINI_VLLM"):
        return {
            "MINI_VLLM_" + parameter.name.upper(): parameter.name
            for parameter in command.params
            if parameter.param_type_name == "option" and parameter.name != "help"
        }


def value_of(name: str) -> tuple[str, Any]:
    """Of a field without an entry above: another one of its choices, if it has choices."""
    if name in VALUES:
        return VALUES[name]
    kind = next(kind for kind in (ServerConfig, EngineConfig) if name in kind.__dataclass_fields__)
    choices = get_args(get_type_hints(kind)[name])
    other = next((one for one in choices if isinstance(one, str) and one != FIELDS[name].default), None)
    if other is not None:  # a Literal
        return other, other
    pytest.fail(f"{name} is a new option: say in VALUES what to try")


def test_every_field_is_a_flag() -> None:
    assert set(flags().values()) == set(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_every_flag_can_come_from_the_environment(serve: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    text, value = value_of(name)
    before = serve()[name]
    monkeypatch.setenv("MINI_VLLM_" + name.upper(), text)
    if name == "cache":
        monkeypatch.setenv("MINI_VLLM_ENABLE_PREFIX_CACHING", "0")
    got = serve()[name]
    assert got == value and got != before


def test_a_flag_wins_over_the_environment(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINI_VLLM_PORT", "8001")
    monkeypatch.setenv("MINI_VLLM_MODEL", "from/environment")
    assert serve("--port", "8002", "--model", "from/flag")["port"] == 8002
    assert serve("--model", "from/flag")["model"] == "from/flag"


def test_the_page_names_each_flag_of_the_server_and_none_that_there_is_not() -> None:
    page = PAGE.read_text(encoding="utf-8")
    known = {"--help", *(prefix + name.replace("_", "-") for name in FIELDS for prefix in ("--", "--no-"))}
    ours = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(ServerConfig)}
    parts = re.findall(r"mini-vllm serve[^`\n]*|`--[^`]*`|ENTRYPOINT.*", page)
    named = {flag for part in parts for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", part)}
    assert named <= known and ours <= named
    variables = set(re.findall(r"MINI_VLLM_[A-Z_]+", page)) - {"MINI_VLLM_HOME"}
    assert variables and variables <= set(flags())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("host", value) for value in ("", 5, None)),
        *(("port", value) for value in (-1, 65536, "8000", True, 1.0)),
        *(("max_queue_size", value) for value in (-1, "1", 1.5)),
        *(("max_body_size", value) for value in (1023, None)),
        *(("request_timeout", value) for value in (0, -1, "5", float("nan"), float("inf"))),
        *(("step_timeout", value) for value in (0, None)),
        *(("heartbeat", value) for value in (0, True)),
        *(("shutdown_timeout", value) for value in (-1, float("inf"))),
        *(("log_format", value) for value in ("xml", ["json"], None)),
        ("log_prompts", "yes"),
        *(("api_key", value) for value in ("sesame", [""], ["a b"], ["ä"], [5], 5)),
        *(("allowed_origins", value) for value in ("*", [None], ["a\n"])),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidConfigError) as error:
        ServerConfig(**{name: value})
    assert error.value.field == name
