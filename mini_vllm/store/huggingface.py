"""A model from the Hugging Face hub, fetched with `huggingface_hub`.

Where it stands: `model_store.py` calls `pull_from_hub` for an id `org/name` that is not in the store yet.

    list of the repository's files, with sizes and hashes     one request, at one commit
    choose: config, tokenizer, safetensors                    refused here, before any download, if they are not there
    fetch them one by one into a hidden folder
    check sizes, and SHA-256 of the large files
    rename the folder to its place in the store

`HF_ENDPOINT` (a mirror), `HF_TOKEN` (or `hf auth login`) and `HF_HUB_OFFLINE` mean what they always mean. A file that
the hub's own cache already has at this commit is copied from there, and checked like any other.

What always holds: all files of a stored model are of one commit, and no pickle is fetched.

In vLLM: `vllm/model_executor/model_loader/weight_utils.py` (`download_weights_from_hf`).
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mini_vllm.errors import DownloadError, MiniVLLMError, ModelNotFoundError, UnsupportedModelError
from mini_vllm.store.atomic_write import atomic_directory
from mini_vllm.store.disk_errors import is_disk_error, writing_into
from mini_vllm.store.progress import announce

_DEFAULT_ENDPOINT = "https://huggingface.co"
_CHUNK_BYTES = 1 << 20
_WANTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
)
# Read only where there is no tokenizer.json.
_SECOND_CHOICE = ("vocab.json", "merges.txt")
# Mistral repositories hold every weight twice: as Hugging Face names them, and in one file in Mistral's own format.
_UNWANTED_WEIGHTS = "consolidated*"


@dataclass(frozen=True)
class HubFile:
    """A file of a repository.

    Args:
        name: its path in the repository.
        size: in bytes; None if the hub does not say.
        sha256: its hash, which the hub keeps for large files only.
    """

    name: str
    size: int | None
    sha256: str | None


def pull_from_hub(repo_id: str, revision: str, directory: Path) -> None:
    """Fetch a model into `directory`, which appears only when all of it is there and right.

    Args:
        repo_id: "org/name".
        revision: branch, tag or commit.
        directory: its place in the store.

    Raises:
        ModelNotFoundError: no such repository or revision, or it holds no model in the Hugging Face layout.
        UnsupportedModelError: its weights are PyTorch pickles only.
        DownloadError: no network, offline mode, no access, a file cut short or altered, no room on the disk.
    """
    with _explained_hub_errors(repo_id, revision):
        commit, repository = _list_files(repo_id, revision)
    files = _choose(repo_id, repository)
    total_bytes = sum(file.size or 0 for file in files)
    with writing_into(directory.parent, total_bytes, repo_id):
        announce(f"Pulling {repo_id} from {_endpoint()}: {len(files)} files, {total_bytes / 1e6:.0f} MB")
        with atomic_directory(directory) as unfinished:
            for file in files:
                with _explained_hub_errors(repo_id, revision):
                    _fetch(repo_id, commit, file, unfinished)
                _check(repo_id, file, unfinished / file.name)
            shutil.rmtree(unfinished / ".cache", ignore_errors=True)  # the hub's own notes on these files
    announce(f"Pulled {repo_id} into {directory}")


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")


def _list_files(repo_id: str, revision: str) -> tuple[str, list[HubFile]]:
    """The commit that the revision stands for now, and the repository's files at it."""
    from huggingface_hub import HfApi

    info = HfApi(endpoint=_endpoint()).model_info(repo_id, revision=revision, files_metadata=True)
    files = [
        HubFile(sibling.rfilename, sibling.size, sibling.lfs.sha256 if sibling.lfs else None)
        for sibling in info.siblings or ()
    ]
    return info.sha or revision, files


def _choose(repo_id: str, repository: Sequence[HubFile]) -> list[HubFile]:
    """The files that are needed, the small ones first."""
    names = [file.name for file in repository]
    unneeded = _SECOND_CHOICE if "tokenizer.json" in names else ()
    wanted = [file for file in repository if _is_wanted(file.name) and file.name not in unneeded]
    if not any(file.name.endswith(".safetensors") for file in wanted):
        raise _no_weights(repo_id, names)
    if "config.json" not in names:
        raise ModelNotFoundError(
            f"{repo_id} holds weights but no config.json, so it is not a whole model (an adapter, or a part of one)."
        )
    return sorted(wanted, key=lambda file: (file.name.endswith(".safetensors"), file.name))


def _is_wanted(name: str) -> bool:
    """Same depth as the pattern: `*` alone would also match the copies of a model in `onnx/` or `original/`."""
    return not fnmatch.fnmatchcase(name, _UNWANTED_WEIGHTS) and any(
        fnmatch.fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in _WANTED
    )


def _no_weights(repo_id: str, names: Sequence[str]) -> MiniVLLMError:
    """The error for a repository without safetensors, with a way out where there is one."""
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        return ModelNotFoundError(
            f"{repo_id} holds GGUF files and no safetensors. Fetch one of them and give its path: `hf download "
            f"{repo_id} {gguf[0]} --local-dir .` ({len(gguf)} to choose from)."
        )
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        return UnsupportedModelError(
            f"{repo_id} holds its weights as PyTorch pickles only ({pickles[0]}), which can run code when they are "
            "opened, so they are not read. Look for a revision or a copy with .safetensors files, or convert it with "
            f"transformers: AutoModelForCausalLM.from_pretrained({repo_id!r}).save_pretrained(DIR), and the same with "
            "AutoTokenizer."
        )
    return ModelNotFoundError(f"{repo_id} holds no .safetensors files, so there is no model in it to run.")


def _fetch(repo_id: str, commit: str, file: HubFile, folder: Path) -> None:
    """One file; on a terminal the hub's client shows its own progress bar."""
    from huggingface_hub import hf_hub_download

    hf_hub_download(repo_id, file.name, revision=commit, local_dir=folder, endpoint=_endpoint())


def _check(repo_id: str, file: HubFile, path: Path) -> None:
    """Compare a fetched file with what the hub says about it."""
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        raise DownloadError(
            f"{file.name} of {repo_id} was cut short: {size:,} bytes came, {file.size:,} expected. Nothing was kept; "
            "try again."
        )
    if file.sha256 is None:
        return
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != file.sha256:
        raise DownloadError(
            f"{file.name} of {repo_id} is not what the hub lists: its SHA-256 is {digest.hexdigest()}, expected "
            f"{file.sha256}. Nothing was kept; try again. If it stays, a mirror or proxy alters files (HF_ENDPOINT is "
            f"{_endpoint()})."
        )


@contextmanager
def _explained_hub_errors(repo_id: str, revision: str) -> Iterator[None]:
    """Turn whatever the hub's client raises into one of our errors, with what to do.

    `except Exception` is meant: the client's versions sit on different HTTP libraries, each with errors of its own. An
    error of the disk is left to `writing_into`.
    """
    try:
        yield
    except Exception as error:
        if is_disk_error(error):
            raise
        raise _explain(error, repo_id, revision) from error


def _explain(error: Exception, repo_id: str, revision: str) -> MiniVLLMError:
    from huggingface_hub import errors, get_token

    causes = [error, error.__cause__, error.__context__]
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    page = f"{_endpoint()}/{repo_id}"
    token = "The token that was sent has no right to it" if get_token() else "No token was sent"
    if any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in causes):
        return DownloadError(
            f"{repo_id} (revision {revision}) is not in the model store, and HF_HUB_OFFLINE forbids to fetch it. Unset "
            "HF_HUB_OFFLINE, or give a directory or .gguf file that is on this disk."
        )
    if isinstance(error, errors.GatedRepoError):
        return DownloadError(
            f"{repo_id} is gated: accept its terms on {page}, then set HF_TOKEN to a token of that account or run "
            f"`hf auth login`. ({token}.)"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"No model {repo_id} at {_endpoint()}. Check the spelling; if it is a private one, set HF_TOKEN to a token "
            f"that may read it or run `hf auth login`. ({token}.)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{repo_id} has no revision {revision!r}. Its branches and tags: {page}/tree/main.")
    if isinstance(error, errors.HFValidationError):
        return ModelNotFoundError(f"{repo_id!r} is no Hugging Face id: {first_line}")
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if status in (401, 403):
        return DownloadError(
            f"{_endpoint()} refuses {repo_id} (HTTP {status}): {first_line} Set HF_TOKEN to a token that may read it, "
            f"or run `hf auth login`. ({token}.)"
        )
    if status is not None:
        return DownloadError(f"{_endpoint()} could not serve {repo_id} (HTTP {status}): {first_line} Try again later.")
    return DownloadError(
        f"{repo_id} could not be fetched from {_endpoint()} ({type(error).__name__}: {first_line}). Nothing was kept. "
        "Check the network and the proxy, or set HF_ENDPOINT to a mirror; then try again. Without a network, use the "
        "default model (it comes through pip's package index), or a directory or .gguf file on this disk."
    )
