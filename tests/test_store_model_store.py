"""What a name after MODEL means, and where its files and converted data are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mini_vllm.errors import (
    InvalidConfigError,
    MiniVLLMError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from mini_vllm.store.model_store import ModelFiles, home, list_models, resolve_model


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store and, beside it, an empty current folder; no network."""
    monkeypatch.setenv("MINI_VLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home" / "models"


def folder(path: str, *names: str) -> Path:
    """Make a folder with files of these names."""
    Path(path).mkdir(parents=True)
    for name in names:
        Path(path, name).write_bytes(b"GGUF...." if name.endswith(".gguf") else b"{}")
    return Path(path).absolute()


def test_a_directory_with_a_config_and_safetensors_is_used_where_it_lies() -> None:
    made = folder("my-model", "config.json", "model.safetensors", "pytorch_model.bin")
    expected = ModelFiles("my-model", made, "safetensors")
    assert [resolve_model(name) for name in ("my-model", "./my-model", str(made), "my-model/")] == [expected] * 4


def test_a_gguf_file_is_used_where_it_lies_whatever_its_name_ends_with() -> None:
    made = folder("files", "tiny.Q4_0.gguf")
    (made / "renamed").write_bytes(b"GGUF....")
    assert resolve_model("files/tiny.Q4_0.gguf") == ModelFiles("tiny.Q4_0", made / "tiny.Q4_0.gguf", "gguf")
    assert resolve_model("files/renamed") == ModelFiles("renamed", made / "renamed", "gguf")


def test_an_existing_path_wins_over_a_hugging_face_id() -> None:
    made = folder("org/name", "config.json", "model.safetensors")
    assert resolve_model("org/name") == ModelFiles("name", made, "safetensors")


def test_a_tilde_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    made = folder("my-model", "config.json", "model.safetensors")
    assert resolve_model("~/my-model").path == made


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["model.safetensors"], ModelNotFoundError, r"my-model holds no config\.json.*It holds: model\.safetensors\."),
        ([], ModelNotFoundError, r"holds no config\.json.*It holds: nothing\."),
        (["config.json"], ModelNotFoundError, r"has a config\.json but no \*\.safetensors files"),
        (
            ["config.json", "pytorch_model.bin"],
            UnsupportedModelError,
            r"pickles only \(pytorch_model\.bin\).*Convert them.*save_pretrained",
        ),
        (
            ["a.Q4_0.gguf", "b.Q8_0.gguf"],
            ModelNotFoundError,
            r"the one to use: .*/my-model/a\.Q4_0\.gguf \(or one of 1 more",
        ),
        (["config.json", "a.Q4_0.gguf"], ModelNotFoundError, r"the one to use: .*/my-model/a\.Q4_0\.gguf\."),
        ([f"{i}.txt" for i in range(11)], ModelNotFoundError, r"It holds: 0\.txt, .*, 6\.txt and 3 more\."),
    ],
)
def test_a_directory_without_a_model_says_what_is_missing(
    names: list[str], error: type[MiniVLLMError], message: str
) -> None:
    folder("my-model", *names)
    with pytest.raises(error, match=message):
        resolve_model("my-model")


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"<html>not found</html>", ModelLoadError, r"is not a GGUF file: it starts with b'<htm'.*\(22 bytes\)"),
        (b"GG", ModelLoadError, r"is not a GGUF file: it starts with b'GG'.*\(2 bytes\)"),
        (b"", ModelLoadError, r"is not a GGUF file: it starts with b''.*\(0 bytes\)"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            ModelLoadError,
            r"a Git LFS pointer of 43 bytes.*git lfs pull",
        ),
    ],
)
def test_a_gguf_file_that_is_none_says_what_it_is(content: bytes, error: type[MiniVLLMError], message: str) -> None:
    Path("broken.gguf").write_bytes(content)
    with pytest.raises(error, match=message):
        resolve_model("broken.gguf")


def test_another_kind_of_file_is_refused_with_what_would_do() -> None:
    made = folder("my-model", "config.json", "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="give the directory that holds them"):
        resolve_model(str(made / "model.safetensors"))


@pytest.mark.parametrize(
    "model", ["./no", "../no/where", "/no/such", "~/no-such", "no/such/model.gguf", "org/x.gguf", "a/b/c"]
)
def test_a_path_that_is_not_there_is_said_in_full(model: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(model)
    assert str(caught.value) == f"No such file or directory: {os.path.abspath(os.path.expanduser(model))}"


@pytest.mark.parametrize("model", ["smollm2", "SmolLM2-135M-Instruct", "smollm2-135m-instrukt"])
def test_an_unknown_name_lists_what_would_do_and_suggests_the_nearest(model: str) -> None:
    with pytest.raises(
        ModelNotFoundError, match=f"^No model '{model}'\\. Did you mean smollm2-135m-instruct\\?"
    ) as caught:
        resolve_model(model)
    assert "a Hugging Face id with its owner (TinyLlama/TinyLlama-1.1B-Chat-v1.0)" in str(caught.value)


def test_a_stored_hugging_face_model_is_suggested_when_its_owner_was_left_out(store: Path) -> None:
    folder(str(store / "huggingface" / "TinyLlama" / "TinyLlama-1.1B" / "main"), "config.json", "model.safetensors")
    with pytest.raises(ModelNotFoundError, match=r"Did you mean TinyLlama/TinyLlama-1\.1B\?"):
        resolve_model("tinyllama-1.1b")


@pytest.mark.parametrize("model", ["", " ", "a\0b", "x" * 5000, "日本語", "org/", "/", "a/../b", "-x"])
def test_any_other_text_is_a_clear_error_too(model: str) -> None:
    with pytest.raises(ModelNotFoundError):
        resolve_model(model)


@pytest.mark.parametrize("model", ["smollm2-135m-instruct", "my-model", "unknown"])
def test_a_revision_goes_with_a_hugging_face_id_only(model: str) -> None:
    folder("my-model", "config.json", "model.safetensors")
    with pytest.raises(InvalidConfigError, match="revision='main' goes with a Hugging Face id") as caught:
        resolve_model(model, revision="main")
    assert caught.value.field == "revision"


def test_the_store_lists_its_models_with_sizes_and_leaves_out_pulls_that_still_run(store: Path) -> None:
    hub = store / "huggingface" / "org" / "name"
    folder(str(hub / "feature%2Fx"), "config.json", "model.safetensors")
    folder(str(hub / ".main.unfinished-1"), "config.json", "model.safetensors")
    folder(str(store / ".smollm2-135m-instruct.unfinished-1"))
    listed = [(model.files, model.size, model.revision) for model in list_models()]
    assert listed == [(ModelFiles("org/name", hub / "feature%2Fx", "safetensors"), 4, "feature/x")]


def test_converted_data_has_another_place_as_soon_as_a_file_changes(tmp_path: Path) -> None:
    made = folder("my model", "config.json", "model.safetensors", "README.md")
    files = resolve_model("my model")
    before = files.cache_dir
    assert before.parent == tmp_path / "home" / "converted"
    assert before.name.startswith("my-model-")
    assert not before.exists()
    (made / "README.md").write_text("changed")
    assert files.cache_dir == before
    (made / "model.safetensors").write_bytes(b"longer")
    assert files.cache_dir != before
    assert resolve_model("my model").cache_dir == files.cache_dir


def test_two_files_of_one_name_and_content_do_not_share_converted_data() -> None:
    first, second = folder("a", "m.gguf") / "m.gguf", folder("b", "m.gguf") / "m.gguf"
    os.utime(second, ns=(first.stat().st_atime_ns, first.stat().st_mtime_ns))
    assert resolve_model(str(first)).cache_dir != resolve_model(str(second)).cache_dir
    os.utime(first, ns=(0, 0))
    assert resolve_model(str(first)).cache_dir != resolve_model(str(second)).cache_dir


def test_home_is_mini_vllm_home_or_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MINI_VLLM_HOME", "relative")
    assert home() == tmp_path / "here" / "relative"
    monkeypatch.setenv("MINI_VLLM_HOME", "~/models")
    assert home() == tmp_path / "models"
    monkeypatch.setenv("MINI_VLLM_HOME", "")
    assert home() == tmp_path / ".cache" / "mini-vllm"


def test_a_model_on_the_disk_is_found_without_loading_any_heavy_library() -> None:
    folder("my-model", "config.json", "model.safetensors")
    program = (
        "import sys; from mini_vllm.store.model_store import list_models, resolve_model; "
        "resolve_model('my-model').cache_dir; list_models(); "
        "print(sorted({'torch', 'huggingface_hub', 'rich', 'numpy'} & set(sys.modules)))"
    )
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "[]\n"
