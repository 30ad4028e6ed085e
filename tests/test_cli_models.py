"""`mini-vllm pull`, `models` and `doctor`."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_helpers import CommandLine

from mini_vllm.commands import doctor as doctor_module
from mini_vllm.commands.pull import format_bytes
from mini_vllm.config import DEFAULT_MODEL
from mini_vllm.model.architectures import ARCHITECTURES


@pytest.fixture
def mini_vllm(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> CommandLine:
    """The command over an empty store."""
    monkeypatch.setenv("MINI_VLLM_HOME", str(tmp_path / "home"))
    return CommandLine(monkeypatch, capfdbinary)


def put_hub_model(home: Path, name: str, revision: str) -> Path:
    """A model as a pull would leave it; its weights are 2,000,000 bytes."""
    directory = home / "models" / "huggingface" / name / revision
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"\0" * 2_000_000)
    return directory


def test_models_shows_known_names_that_are_not_here(mini_vllm: CommandLine) -> None:
    result = mini_vllm("models")
    assert (result.exit_code, result.stderr) == (0, "")
    name = DEFAULT_MODEL
    where = f"not here yet (the default model), 92.9 MB to fetch: mini-vllm pull {name}"
    assert result.stdout == f"{name}    98.4 MB  {where}\n"


def test_models_shows_what_is_here_with_size_revision_and_place(mini_vllm: CommandLine, tmp_path: Path) -> None:
    directory = put_hub_model(tmp_path / "home", "someone/something", "main")
    first, second = mini_vllm("models").stdout.splitlines()
    assert first.split() == ["someone/something@main", "2", "MB", str(directory)]
    assert second.startswith(DEFAULT_MODEL)


def test_supported_lists_every_native_architecture_with_its_models_and_what_the_extra_adds(
    mini_vllm: CommandLine,
) -> None:
    result = mini_vllm("models", "--supported")
    assert (result.exit_code, result.stderr) == (0, "")
    native, library, own = result.stdout.split("\n\n")
    names = [line.split()[0] for line in native.splitlines()[1:]]
    assert names == list(ARCHITECTURES)
    assert "  LlamaForCausalLM                Llama 2, 3 and 3.x, TinyLlama, SmolLM2\n" in native
    assert "pip install 'mini-vllm[hf]'" in library
    assert "register_model" in own


def test_pull_prints_the_place_alone(mini_vllm: CommandLine, tmp_path: Path) -> None:
    directory = put_hub_model(tmp_path / "home", "someone/something", "main")
    result = mini_vllm("pull", "someone/something")
    assert (result.exit_code, result.stdout) == (0, f"{directory}\n")
    assert result.stderr == "someone/something is here: 2 MB\n"


def test_doctor_says_what_would_be_used_and_leaves_with_0(mini_vllm: CommandLine, tmp_path: Path) -> None:
    result = mini_vllm("doctor")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith("A model can run here.\n")
    rows = dict(line.strip().split(maxsplit=1) for line in result.stdout.splitlines() if line.startswith("  "))
    assert {"python", "torch", "tokenizers", "processor", "features", "memory", "device"} <= set(rows)
    assert rows["folder"] == str(tmp_path / "home")
    assert rows["dtype"].split()[0] in ("bfloat16", "float32", "float16")
    assert "cache=paged" in rows["attention"]
    assert not (tmp_path / "home").exists()


def test_doctor_leaves_with_1_where_no_model_could_run(mini_vllm: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "_NEEDED_MEMORY", 10**18)
    result = mini_vllm("doctor")
    assert result.exit_code == 1
    assert "A model can run here" not in result.stdout
    assert result.stderr.startswith("error: ")
    assert "of memory are free, and the default model needs about 1e+06 TB" in result.stderr


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (999, "999 bytes"), (98_362_432, "98.4 MB"), (2 * 10**9, "2 GB")]
)
def test_sizes_are_written_to_be_read(count: int, text: str) -> None:
    assert format_bytes(count) == text
