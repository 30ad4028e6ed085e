"""The peers of a comparison: which there are, what they run, and how one is made to run it.

Where it stands: below `compare.py`. An engine is started as `peer_process.py` under the Python that it is installed in;
a peer that is a URL is loaded over HTTP.

What always holds: a peer that fails gives `{"error": its last words}` and nothing else stops.

In vLLM: nothing.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_vllm.benchmark import peer_process
from mini_vllm.benchmark.http_stream import Server
from mini_vllm.benchmark.load_client import LoadClient, served_model
from mini_vllm.benchmark.options import CompareOptions, ServingOptions
from mini_vllm.benchmark.peer_model import huggingface_directory
from mini_vllm.benchmark.progress import NoProgress
from mini_vllm.benchmark.records import BenchmarkError
from mini_vllm.benchmark.workload import Workload
from mini_vllm.errors import InvalidConfigError
from mini_vllm.store.model_store import ModelFiles
from mini_vllm.tokenizer.tokenizer import Tokenizer

_MODULES = {"vllm": "vllm", "transformers": "transformers", "openvino": "openvino_genai", "llama-cpp": "llama_cpp"}
_READ_FILES_ONLY = ("openvino", "llama-cpp")
_LONGEST_ERROR = 1000  # characters of a peer's last words that are shown


@dataclass(frozen=True)
class Peer:
    """One engine to compare with.

    Args:
        label: what the table calls it, such as `vllm` or `openvino:int8`.
        kind: a key of `peer_process.ENGINES`, or `url`.
        command: how to start its Python, in words; for `url` the URL alone.
        model: where its model is; None takes the one that is compared.
    """

    label: str
    kind: str
    command: tuple[str, ...]
    model: str | None


def peers_of(options: CompareOptions) -> list[Peer]:
    """The peers that were asked for; if none were, those that this Python has installed.

    Raises:
        InvalidConfigError: a peer is not written NAME=COMMAND, or its name is not known.
    """
    given = _named("peer", options.peer)
    if not given:
        given = {kind: sys.executable for kind, module in _MODULES.items() if importlib.util.find_spec(module)}
    models = _named("peer_model", options.peer_model)
    if unknown := sorted(set(models) - set(given)):
        raise InvalidConfigError(f"peer_model names {unknown[0]!r}, which is no --peer", field="peer_model")
    return [_peer(label, command, models.get(label)) for label, command in given.items()]


def _named(field: str, texts: Sequence[str] | None) -> dict[str, str]:
    """The values by name of NAME=VALUE, NAME=VALUE, ..."""
    values: dict[str, str] = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        if not name or not value:
            raise InvalidConfigError(f"{field} is written NAME=VALUE, got {text!r}", field=field)
        if name in values:
            raise InvalidConfigError(
                f"{field} gives {name!r} twice, {values[name]!r} and {value!r}; a name may go on after a colon: "
                f"{name}:other",
                field=field,
            )
        values[name] = value
    return values


def _peer(label: str, command: str, model: str | None) -> Peer:
    kind = label.partition(":")[0]
    known = (*_MODULES, "url")
    if kind not in known:
        raise InvalidConfigError(f"peer must be one of {', '.join(known)}, got {label!r}", field="peer")
    if kind == "url":
        Server.at(command)  # now, and not after this engine was measured
    return Peer(label, kind, (command,) if kind == "url" else _words_of(command, label), model)


def _words_of(command: str, label: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise InvalidConfigError(
            f"the command of peer {label!r} cannot be read: {error}; got {command!r}", field="peer"
        ) from None
    if not words:
        raise InvalidConfigError(f"peer {label!r} has no command; write {label}=/path/to/python", field="peer")
    return words


def model_for(peer: Peer, files: ModelFiles, dtype: str) -> str:
    """What a peer runs: its own model, else the compared one in the form that it reads.

    Raises:
        InvalidConfigError: it does not exist in this form, and is not made here.
    """
    if peer.model is not None or peer.kind == "url":
        return peer.model or ""
    if peer.kind == "openvino":
        directory = huggingface_directory(files, dtype)
        raise InvalidConfigError(
            f"OpenVINO runs exported models only: optimum-cli export openvino -m {directory} --task "
            "text-generation-with-past --weight-format fp16 OUT, then give --peer-model openvino=OUT",
            field="peer_model",
        )
    if peer.kind == "llama-cpp":
        if files.format != "gguf":
            raise InvalidConfigError(
                f"llama.cpp reads GGUF and {files.name} is none: give --peer-model llama-cpp=FILE", field="peer_model"
            )
        return str(files.path)
    return str(huggingface_directory(files, dtype))


def check_starts(peer: Peer) -> None:
    """Refuse a peer that plainly cannot start: only what can be seen without starting it.

    Raises:
        InvalidConfigError: the program, or the model that it reads from this disk, is not there.
    """
    if peer.kind != "url":
        for program in _programs_of(peer.command):
            if shutil.which(program) is None:
                raise InvalidConfigError(
                    f"peer {peer.label!r} cannot start: {program!r} is no program that can be run here; write "
                    f"{peer.label}=/path/to/python, the Python that it is installed in",
                    field="peer",
                )
    if peer.model is None or peer.kind == "url" or Path(peer.model).exists():
        return
    if peer.kind in _READ_FILES_ONLY or Path(peer.model).is_absolute():  # else it may be a name at Hugging Face
        raise InvalidConfigError(
            f"peer_model of {peer.label!r} is not there: {peer.model!r}; write {peer.label}=PATH of what it runs",
            field="peer_model",
        )


def _programs_of(command: Sequence[str]) -> list[str]:
    """The program, and behind `env A=B` the one that it starts, unless `env` has flags or sets where to look for it."""
    programs = [command[0]]
    if Path(command[0]).name == "env":
        behind = next((word for word in command[1:] if "=" not in word), "-")
        programs += [behind] if "/" in behind and not behind.startswith("-") else []
    return programs


def run_process(command: Sequence[str], job: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """The result of a job, or `{"error": its last words}`."""
    with tempfile.TemporaryDirectory(prefix="mini-vllm-bench-") as name:
        job_file, result_file, log_file = (Path(name) / part for part in ("job.json", "result.json", "log.txt"))
        job_file.write_text(json.dumps({**job, "started_at": time.time()}), encoding="utf-8")
        words = [*command, peer_process.__file__, str(job_file), str(result_file)]
        with log_file.open("w") as log:
            try:
                code = subprocess.run(words, stdout=log, stderr=log, check=False, timeout=timeout).returncode
            except subprocess.TimeoutExpired:
                return {"error": f"not done within {timeout:g} s"}
            except OSError as error:
                return {"error": f"{command[0]} does not start: {error}"}
        if not result_file.exists():
            lines = [line for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
            return {"error": f"exit code {code}: {lines[-1][:_LONGEST_ERROR] if lines else 'it said nothing'}"}
        result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
        return result


async def load_url(
    peer: Peer, tokenizer: Tokenizer, phases: Mapping[str, Workload], repeats: int, timeout: float
) -> dict[str, Any]:
    """The phases over HTTP, in the form of `peer_process.run`.

    What start and load cost is not to be seen there, and the tokens are counted, not kept.
    """
    serving = ServingOptions(url=peer.command[0], served_model=peer.model, timeout=timeout)
    server = Server.at(serving.url)
    try:
        client = LoadClient(server, serving, await served_model(server, serving), tokenizer, NoProgress())
        await client.warm_up(next(iter(phases.values())))
    except BenchmarkError as error:
        return {"error": str(error)}
    measured = {}
    for name, phase in phases.items():
        runs = [await client.run(phase, [0.0] * len(phase.items), name) for _ in range(repeats)]
        if failed := [one.error for run in runs for one in run if one.error is not None]:
            return {"error": failed[0]}
        measured[name] = {
            "seconds": [max(one.token_times[-1] for one in run) - run[0].arrival for run in runs],
            "num_output_tokens": [sum(one.num_output_tokens for one in run) for run in runs],
            "answers": None,
        }
    return {"version": None, "load_seconds": None, "first_token_seconds": None, "phases": measured}
