"""A Hugging Face model is pulled from the hub: whole, of one commit, checked, or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from store_helpers import COMMIT, MODEL_BYTES, LoopbackServer, everything_below, model_hub, serve

from mini_vllm.errors import DownloadError, InvalidConfigError, ModelNotFoundError, UnsupportedModelError
from mini_vllm.store import huggingface
from mini_vllm.store.model_store import ModelFiles, list_models, resolve_model

REPO = "mini-vllm-tests/Tiny-1.0"
WANTED = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "model-00001-of-00002.safetensors": MODEL_BYTES,
    "model-00002-of-00002.safetensors": MODEL_BYTES[:1000],
    "model.safetensors.index.json": b'{"weight_map": {}}',
}
UNWANTED = {
    "README.md": b"# Tiny",
    "vocab.json": b"{}",  # the tokenizer.json says the same
    "merges.txt": b"",
    "pytorch_model.bin": b"a pickle",
    "consolidated.safetensors": MODEL_BYTES,
    "onnx/model.safetensors": MODEL_BYTES,
    "original/config.json": b"{}",
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store, and none of this machine's settings for the hub."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MINI_VLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("time.sleep", lambda _: None)  # the hub's client waits between its tries
    return tmp_path / "home" / "models" / "huggingface"


@pytest.fixture
def hub(store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackServer]:
    with serve(model_hub(REPO, WANTED | UNWANTED)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_the_first_use_pulls_what_is_needed_and_later_ones_need_no_network(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(model_hub(REPO, WANTED | UNWANTED)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        files = resolve_model(REPO)
    assert files == ModelFiles(REPO, store / REPO / "main", "safetensors")
    stored = {path for path in files.path.rglob("*") if path.is_file()}
    assert {str(path.relative_to(files.path)): path.read_bytes() for path in stored} == WANTED
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        f"Pulling {REPO} from {server.url}: 9 files, 0 MB",
        f"Pulled {REPO} into {files.path}",
    ]

    assert resolve_model(REPO) == files  # the server is down now
    assert [(model.files, model.revision) for model in list_models()] == [(files, "main")]
    assert capsys.readouterr().err == ""


def test_all_files_are_fetched_at_the_one_commit_that_the_revision_stood_for(store: Path, hub: LoopbackServer) -> None:
    resolve_model(REPO)
    listing, *files = [request.split()[1] for request in hub.requests]
    assert listing.startswith(f"/api/models/{REPO}/revision/main?")
    assert {path.split("/resolve/")[1].split("/")[0] for path in files} == {COMMIT}


def test_each_revision_is_a_model_of_its_own(store: Path, hub: LoopbackServer) -> None:
    main, branch = resolve_model(REPO), resolve_model(REPO, revision="feature/x")
    assert main.path != branch.path
    assert branch.path.parent == main.path.parent
    assert [(model.files.path, model.revision) for model in list_models()] == [
        (branch.path, "feature/x"),
        (main.path, "main"),
    ]


@pytest.mark.parametrize("revision", ["", "..", "../other", "/etc", "a b", "-x"])
def test_a_revision_that_cannot_be_one_is_refused(store: Path, hub: LoopbackServer, revision: str) -> None:
    with pytest.raises(InvalidConfigError, match="revision must be a branch, tag or commit") as caught:
        resolve_model(REPO, revision=revision)
    assert (caught.value.field, hub.requests) == ("revision", [])


def test_the_users_token_is_sent(store: Path, hub: LoopbackServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    resolve_model(REPO)
    assert hub.tokens == {"Bearer hf_of_the_test"}


def test_an_unknown_repository_is_said_with_what_to_check(store: Path, hub: LoopbackServer) -> None:
    hub.faults.status, hub.faults.error_code = 404, "RepoNotFound"
    with pytest.raises(ModelNotFoundError, match=f"No model {REPO} at {hub.url}.*spelling.*No token was sent"):
        resolve_model(REPO)
    assert everything_below(store.parent) == []


def test_an_unknown_revision_is_named(store: Path, hub: LoopbackServer) -> None:
    hub.faults.status, hub.faults.error_code = 404, "RevisionNotFound"
    with pytest.raises(ModelNotFoundError, match="has no revision 'v9'"):
        resolve_model(REPO, revision="v9")


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_repository_says_where_to_accept_its_terms(store: Path, hub: LoopbackServer, status: int) -> None:
    hub.faults.status, hub.faults.error_code = status, "GatedRepo"
    with pytest.raises(DownloadError, match=f"is gated: accept its terms on {hub.url}/{REPO}, then set HF_TOKEN"):
        resolve_model(REPO)


def test_no_right_to_a_repository_says_that_the_token_has_none(
    store: Path, hub: LoopbackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    hub.faults.status = 403
    hub.faults.error_code = "Forbidden"
    with pytest.raises(DownloadError, match=r"refuses .* \(HTTP 403\).*The token that was sent has no right to it"):
        resolve_model(REPO)


def test_a_hub_that_is_down_is_said_with_its_status(store: Path, hub: LoopbackServer) -> None:
    hub.faults.status, hub.faults.error_code = 503, "Unavailable"
    with pytest.raises(DownloadError, match=r"could not serve .* \(HTTP 503\).*Try again later"):
        resolve_model(REPO)


def test_no_network_is_said_with_ways_out(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=r"could not be fetched from http://127\.0\.0\.1:9 .*network.*HF_ENDPOINT"):
        resolve_model(REPO)
    assert everything_below(store.parent) == []


def test_offline_mode_is_respected_and_named(store: Path, hub: LoopbackServer) -> None:
    # A process of its own, since the hub's client reads the variable when it is imported.
    program = f"from mini_vllm.store.model_store import resolve_model; resolve_model({REPO!r})"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert f"{REPO} (revision main) is not in the model store, and HF_HUB_OFFLINE forbids to fetch it" in ended.stderr
    assert hub.requests == []


def test_after_a_connection_cut_in_mid_file_the_next_pull_succeeds(store: Path, hub: LoopbackServer) -> None:
    hub.faults.cut_after = 100_000
    with pytest.raises(DownloadError, match=f"{REPO} could not be fetched from {hub.url}.*Nothing was kept"):
        resolve_model(REPO)
    assert list_models() == []
    assert [name for name in everything_below(store) if name.endswith("safetensors")] == []
    hub.faults.cut_after = None
    assert (resolve_model(REPO).path / "model-00001-of-00002.safetensors").read_bytes() == MODEL_BYTES


@pytest.mark.parametrize(
    ("served", "message"),
    [
        (
            MODEL_BYTES[:-1],
            r"model-00001-of-00002\.safetensors of .* was cut short: 150,003 bytes came, 150,004 expected",
        ),
        (MODEL_BYTES[:-1] + b"?", r"model-00001-of-00002\.safetensors of .* is not what the hub lists: its SHA-256"),
    ],
)
def test_a_file_that_is_not_what_the_hub_lists_is_refused(
    store: Path, monkeypatch: pytest.MonkeyPatch, served: bytes, message: str
) -> None:
    honest, lying = model_hub(REPO, WANTED), model_hub(REPO, WANTED | {"model-00001-of-00002.safetensors": served})
    with serve(lambda path: honest(path) if path.startswith("/api/") else lying(path)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(DownloadError, match=message):
            resolve_model(REPO)
    assert list_models() == []


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        (
            {"config.json": b"{}", "pytorch_model.bin": b"x"},
            UnsupportedModelError,
            r"pickles only \(pytorch_model\.bin\).*save_pretrained",
        ),
        ({"Tiny.Q4_0.gguf": b"GGUF", "README.md": b""}, ModelNotFoundError, rf"hf download {REPO} Tiny\.Q4_0\.gguf"),
        ({"adapter_model.safetensors": b"x"}, ModelNotFoundError, r"no config\.json.*adapter"),
        ({"README.md": b""}, ModelNotFoundError, r"holds no \.safetensors files"),
    ],
)
def test_a_repository_without_a_model_is_refused_before_any_download(
    store: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], error: type[Exception], message: str
) -> None:
    with serve(model_hub(REPO, files)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(error, match=message):
            resolve_model(REPO)
        assert len(server.requests) == 1
    assert not store.exists()


def test_too_little_room_is_said_before_any_download(
    store: Path, hub: LoopbackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(len(content) for content in WANTED.values())
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: usage(1_000_000, 0, needed - 1))
        with pytest.raises(
            DownloadError, match=f"for {REPO}: {needed:,} bytes are needed in .*, {needed - 1:,} are free"
        ):
            resolve_model(REPO)
    assert len(hub.requests) == 1
    resolve_model(REPO)


def test_a_disk_that_fills_up_meanwhile_is_said_with_both_numbers(
    store: Path, hub: LoopbackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(huggingface, "_fetch", no_room)
        with pytest.raises(DownloadError, match=rf"Not enough room on the disk for {REPO}: [\d,]+ bytes are needed"):
            resolve_model(REPO)
    assert list_models() == []
    resolve_model(REPO)


def test_a_home_that_cannot_be_written_to_is_named(store: Path, hub: LoopbackServer, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match=rf"could not be written into {store / REPO}: .*set MINI_VLLM_HOME"):
        resolve_model(REPO)


def test_two_pulls_at_once_both_end_with_the_model(store: Path, hub: LoopbackServer) -> None:
    both_are_in_the_middle = threading.Barrier(2, timeout=60)
    hub.faults.before_rest = both_are_in_the_middle.wait
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(resolve_model, [REPO, REPO])
    assert first == second
    assert everything_below(store) == sorted(
        ["mini-vllm-tests", REPO, f"{REPO}/main", f"{REPO}/main/additional_chat_templates"]
        + [f"{REPO}/main/{name}" for name in WANTED]
    )
