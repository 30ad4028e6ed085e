"""Every command and every program in the README runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mini_vllm.config import DEFAULT_MODEL
from mini_vllm.store.model_store import KNOWN_MODELS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    """The lines of the shell blocks, but for the two that set everything up: CI runs those itself."""
    lines = [line.split("  #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(("make ", "source "))]


def run(command: list[str] | str) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command, shell=isinstance(command, str), capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_has_commands_and_programs() -> None:
    assert len(commands()) >= 5
    assert len(blocks("python")) == 2
    assert {"make demo", "make test"} <= {
        line.split("  #")[0].strip() for b in blocks("bash") for line in b.splitlines()
    }


@pytest.mark.parametrize("file", ["README.md", "examples/demo.py"])
def test_the_sizes_of_the_model_are_those_that_the_commands_show(file: str) -> None:
    source = KNOWN_MODELS[DEFAULT_MODEL]
    sizes = f"({source.wheel_bytes / 1e6:.0f} MB, unpacked {source.file_bytes / 1e6:.0f} MB)"
    assert sizes in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [c for c in commands() if " serve" not in c])
def test_a_command_of_the_readme_runs(command: str) -> None:
    run(command)


@pytest.mark.parametrize("program", blocks("python"), ids=["LLM", "LLMEngine"])
def test_a_program_of_the_readme_runs_and_prints_text(program: str) -> None:
    assert run([sys.executable, "-c", program]).strip()


@pytest.mark.parametrize("path", re.findall(r"`(mini_vllm/[\w/.]+|tests/[\w/.]+)`|\]\(([\w/.-]+)\)", README))
def test_a_file_that_the_readme_names_exists(path: tuple[str, str]) -> None:
    assert (ROOT / (path[0] or path[1])).exists()


def test_the_examples_run() -> None:
    for example in ("shortest_first_policy",):
        done = subprocess.run(
            [sys.executable, f"{example}.py"],
            cwd=ROOT / "examples",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
