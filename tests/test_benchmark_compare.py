"""Comparing engines: the project's own and transformers on a tiny model, a URL, and peers that misbehave."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from api_helpers import serving
from cli_helpers import CommandLine, build_cli_model
from engine_doubles import byte_tokenizer

from mini_vllm.benchmark import compare, peer_process
from mini_vllm.benchmark.compare import bench_compare, compare_table, phases_of
from mini_vllm.benchmark.options import CompareOptions, WorkloadOptions
from mini_vllm.benchmark.peer_model import huggingface_directory
from mini_vllm.benchmark.peers import check_starts, model_for, peers_of
from mini_vllm.benchmark.records import BenchmarkError
from mini_vllm.config import EngineConfig
from mini_vllm.errors import InvalidConfigError
from mini_vllm.store.model_store import resolve_model
from mini_vllm.tokenizer.tokenizer import load_tokenizer

SMALL = WorkloadOptions(num_prompts=5, input_len="4-12", output_len="3-6")
PHASES: dict[str, Any] = {"stream_input_len": 6, "stream_output_len": 5, "num_prefills": 2, "prefill_len": 20}
ENGINE: dict[str, Any] = {"num_kv_blocks": 64, "max_model_len": 64, "dtype": "float32", "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_cli_model(tmp_path_factory.mktemp("models") / "tiny")


def stand_in(folder: Path, label: str, body: str) -> str:
    """A "Python" that a peer is run with: a script that gets the job and the result file."""
    script = folder / f"{label.replace(':', '_')}.py"
    script.write_text(f"import json, sys\njob = json.load(open(sys.argv[2]))\n{body}\n")
    return f"{label}={sys.executable} {script}"


SHORT = {
    "version": "1",
    "load_seconds": 1,
    "first_token_seconds": 1,
    "phases": {"mixed": {"seconds": [1.0], "num_output_tokens": [1], "answers": [], "is_stable": True}},
}
MISBEHAVING = {
    "vllm:loud": "sys.exit('no such thing')",
    "vllm:silent": "sys.exit(3)",
    "vllm:short": f"json.dump({json.dumps(SHORT).replace('true', 'True')}, open(sys.argv[3], 'w'))",
}


@pytest.fixture(scope="module")
def report(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One comparison with all kinds of peers: every engine starts a process, so one is enough."""
    folder = tmp_path_factory.mktemp("peers")
    with serving() as server:
        peers = [f"transformers={sys.executable}", f"url={server.url}"]
        peers += [stand_in(folder, label, body) for label, body in MISBEHAVING.items()]
        return bench_compare(
            EngineConfig(model=str(model), **ENGINE), CompareOptions(peer=peers, **PHASES), SMALL, repeats=2
        )


def row_of(report: dict[str, Any], engine: str) -> tuple[str, ...]:
    return next(row for row in compare_table(report).rows if row[0] == engine)


def result_of(report: dict[str, Any], engine: str) -> dict[str, Any]:
    return next(result for result in report["results"] if result["engine"] == engine)


# ---- real engines ----------------------------------------------------------------------------------------------------


def test_both_engines_do_every_phase_and_give_the_same_answers(report: dict[str, Any]) -> None:
    ours, theirs = result_of(report, "mini-vllm"), result_of(report, "transformers")
    for name in ("mixed", "one stream", "prefill"):
        assert ours["phases"][name]["ratio"] == 1.0
        speeds = [one["phases"][name]["tokens_per_second"]["median"] for one in (ours, theirs)]
        assert theirs["phases"][name]["ratio"] == pytest.approx(speeds[0] / speeds[1])
    # float32, and an oracle that nobody here wrote: its greedy answers are ours.
    assert theirs["phases"]["mixed"]["num_equal"] == 5
    assert theirs["phases"]["one stream"]["num_equal"] == 1
    assert ours["first_token_seconds"] > ours["load_seconds"] > 0


def test_the_report_says_what_was_compared(report: dict[str, Any]) -> None:
    header = report["header"]
    assert (header["dtype"], header["threads"], header["repeats"]) == ("float32", 1, 2)
    assert (header["one_stream"], header["prefill"]) == ("6 in, 5 out", "2 x 20")
    assert row_of(report, "mini-vllm")[4] == "1.00"
    assert row_of(report, "transformers")[-1] == "5 of 5"


def test_a_url_is_a_peer(report: dict[str, Any]) -> None:
    theirs = result_of(report, "url")
    assert set(theirs["phases"]) == {"mixed", "one stream", "prefill"}
    assert theirs["phases"]["mixed"]["num_equal"] is None
    assert row_of(report, "url")[2] == "-"


# ---- peers that misbehave --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "message"),
    [("vllm:loud", "exit code 1: no such thing"), ("vllm:silent", "exit code 3: it said nothing")],
)
def test_a_peer_that_fails_has_its_last_words_in_the_table(report: dict[str, Any], engine: str, message: str) -> None:
    assert result_of(report, engine) == {"engine": engine, "error": message}
    assert row_of(report, engine)[1] == f"failed: {message}"


def test_a_long_error_is_short_in_its_cell_and_whole_below_the_table() -> None:
    error = "exit code 1: ImportError: " + "no such module, " * 20 + "the end"
    table = compare_table({"results": [{"engine": "vllm", "error": error}]})
    assert table.rows[0][1] == "failed: exit code 1: ImportError: no such ..."
    assert table.notes == (f"vllm failed: {error}",)
    assert table.markdown().endswith(f"|\n\nvllm failed: {error}\n")


def test_a_peer_that_brings_back_fewer_tokens_has_failed(report: dict[str, Any]) -> None:
    assert result_of(report, "vllm:short")["error"].startswith("1 tokens came back in mixed instead of")


def test_an_engine_of_ours_that_does_not_start_is_an_error(model: Path) -> None:
    config = EngineConfig(model=str(model), **{**ENGINE, "num_kv_blocks": 1})
    options = CompareOptions(peer="url=http://127.0.0.1:9", **PHASES)
    with pytest.raises(BenchmarkError, match=r"this engine failed: exit code 1: .*InvalidRequestError"):
        bench_compare(config, options, SMALL, repeats=1)


def test_a_phase_that_does_not_fit_is_refused_before_anything_runs(model: Path) -> None:
    options = CompareOptions(**{**PHASES, "prefill_len": 64})
    with pytest.raises(InvalidConfigError, match=r"^prefill_len: a prompt of 64 tokens and an answer of 1 are 65"):
        bench_compare(EngineConfig(model=str(model), **ENGINE), options, SMALL)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peer": "vllm"}, "peer is written NAME=VALUE, got 'vllm'"),
        ({"peer": "vllm='abc"}, "the command of peer 'vllm' cannot be read: No closing quotation"),
        ({"peer": "vllm= "}, "peer 'vllm' has no command; write vllm=/path/to/python"),
        ({"peer": ["vllm=a", "vllm=b"]}, "peer gives 'vllm' twice, 'a' and 'b'; a name may go on after a colon"),
        ({"peer": "url=http://"}, "a server's URL is written http://host:port"),
        ({"peer": "tgi=python"}, "peer must be one of vllm, transformers, openvino, llama-cpp, url, got 'tgi'"),
        ({"peer": "vllm=python", "peer_model": "openvino=x"}, "peer_model names 'openvino', which is no --peer"),
    ],
)
def test_wrong_peers_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        peers_of(CompareOptions(**fields))


def test_a_peer_has_a_kind_a_label_a_command_and_a_model() -> None:
    options = CompareOptions(
        peer=["openvino=env A=B /x/python", "openvino:int8=/x/python"], peer_model="openvino:int8=/models/int8"
    )
    plain, int8 = peers_of(options)
    assert (plain.label, plain.kind, plain.command, plain.model) == (
        *("openvino", "openvino", ("env", "A=B", "/x/python"), None),
    )
    assert (int8.label, int8.kind, int8.model) == ("openvino:int8", "openvino", "/models/int8")


def test_without_peers_those_of_this_python_are_taken() -> None:
    assert "transformers" in [peer.kind for peer in peers_of(CompareOptions())]


@pytest.mark.parametrize(("peer", "message"), [("openvino=py", "optimum-cli export"), ("llama-cpp=py", "reads GGUF")])
def test_a_model_that_a_peer_cannot_read_is_refused_before_anything_runs(model: Path, peer: str, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        bench_compare(EngineConfig(model=str(model), **ENGINE), CompareOptions(peer=peer), SMALL)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peer": "vllm=/nope/python"}, "peer 'vllm' cannot start: '/nope/python' is no program that can be run here"),
        ({"peer": "vllm:b=no-such-program x"}, "write vllm:b=/path/to/python, the Python that it is installed in"),
        ({"peer": "vllm=env A=B /nope/python"}, "peer 'vllm' cannot start: '/nope/python'"),
        ({"peer": f"vllm={sys.executable}", "peer_model": "vllm=/nope"}, "peer_model of 'vllm' is not there: '/nope'"),
        ({"peer": f"llama-cpp={sys.executable}", "peer_model": "llama-cpp=no.gguf"}, "'llama-cpp' is not there"),
    ],
)
def test_a_peer_that_plainly_cannot_start_is_refused_before_anything_runs(
    model: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(compare, "run_process", lambda *_: pytest.fail("something was measured"))
    with pytest.raises(InvalidConfigError, match=message) as error:
        bench_compare(EngineConfig(model=str(model), **ENGINE), CompareOptions(**{**PHASES, **fields}), SMALL)
    assert error.value.field in fields


@pytest.mark.parametrize("command", ["env A=B python3", "env -u A /x/python", f"env A=B {sys.executable} -u"])
def test_a_peer_that_may_start_is_not_refused(command: str) -> None:
    (peer,) = peers_of(CompareOptions(peer=f"vllm={command}", peer_model="vllm=some/name"))
    check_starts(peer)


class Llama:
    """llama-cpp-python's class, as far as the adapter uses it: tokens count up from the prompt's sum, without end."""

    made: ClassVar[list[Llama]] = []

    def __init__(self, model_path: str, **options: Any) -> None:
        self.model_path, self.options, self.cached = model_path, options, False
        Llama.made.append(self)

    def reset(self) -> None:
        self.cached = False

    def generate(self, tokens: list[int], *, temp: float, repeat_penalty: float) -> Iterator[int]:
        assert (temp, repeat_penalty) == (0.0, 1.0)
        assert not self.cached, "the prompt before would be found"
        self.cached = True
        return itertools.count(sum(tokens))


def test_llama_cpp_takes_the_gguf_file_and_answers_one_prompt_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter itself, beside a stand-in for its engine, which takes minutes to build."""
    files = resolve_model("smollm2-135m-instruct")
    (peer,) = peers_of(CompareOptions(peer="llama-cpp=python"))
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama))
    monkeypatch.setattr(peer_process.importlib.metadata, "version", lambda name: f"version of {name}")
    phases = {
        "mixed": {"prompts": [[1], [2]], "output_lens": [3, 4], "is_batch": True},
        "prefill": {"prompts": [[5, 6], [7, 8]], "output_lens": [1, 2], "is_batch": False},
    }
    sizes = {"threads": 2, "max_model_len": 64, "max_num_seqs": 8, "repeats": 2, "started_at": 0.0}
    result = peer_process.run(
        {"engine": peer.kind, "model": model_for(peer, files, "bfloat16"), "phases": phases, **sizes}
    )
    assert [llama.model_path for llama in Llama.made] == [str(files.path)]
    assert Llama.made[0].options == {"n_ctx": 64, "n_threads": 2, "n_threads_batch": 2, "verbose": False}
    assert result["version"] == "version of llama-cpp-python"
    assert set(result["phases"]) == {"prefill"}
    prefill = result["phases"]["prefill"]
    assert (prefill["answers"], prefill["num_output_tokens"]) == ([[11], [15, 16]], [3, 3])
    assert prefill["is_stable"]


# ---- workloads and models --------------------------------------------------------------------------------------------


def test_the_phases_have_their_sizes() -> None:
    phases = phases_of(byte_tokenizer(), CompareOptions(**PHASES), SMALL)
    assert [len(phase.items) for phase in phases.values()] == [5, 1, 2]
    assert [len(item.prompt_token_ids) for item in phases["prefill"].items] == [20, 20]
    assert phases["one stream"].items[0].num_output_tokens == 5


def test_a_gguf_model_is_written_out_for_others_and_reads_back_equal() -> None:
    """transformers reads the directory: the same greedy token as the engine gives for the same prompt."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mini_vllm import LLM, SamplingParams

    files = resolve_model("smollm2-135m-instruct")
    directory = huggingface_directory(files, "float32")
    prompt = load_tokenizer(files).encode("The capital of France is")
    assert AutoTokenizer.from_pretrained(directory)("The capital of France is")["input_ids"] == prompt
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        token = int(theirs(torch.tensor([prompt])).logits[0, -1].argmax())
    params = SamplingParams(temperature=0.0, max_tokens=1)
    (ours,) = LLM(files.name, dtype="float32", num_kv_blocks=8).generate(prompt, params)
    assert ours.outputs[0].token_ids == [token]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_shows_a_table_and_writes_a_file(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path, model: Path
) -> None:
    file = tmp_path / "report.json"
    result = CommandLine(monkeypatch, capfdbinary)(
        *("bench", "compare", "-m", model, "--peer", f"transformers={sys.executable}", "--num-prompts", "3"),
        *("--input-len", "4", "--output-len", "3", "--stream-output-len", "3", "--num-prefills", "1"),
        *("--prefill-len", "16", "--repeats", "1", "--num-kv-blocks", "64", "--max-model-len", "256", "--json", file),
    )
    assert (result.exit_code, result.stderr) == (0, "")
    assert "This engine and others" in result.stdout
    assert [one["engine"] for one in json.loads(file.read_text())["results"]] == ["mini-vllm", "transformers"]


def test_a_peer_without_figures_makes_the_command_fail_after_its_table(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path, model: Path
) -> None:
    failed = {"engine": "vllm", "error": "exit code 1: there is no such thing"}
    monkeypatch.setattr(compare, "bench_compare", lambda *_, **__: {"header": {}, "results": [failed]})
    result = CommandLine(monkeypatch, capfdbinary)("bench", "compare", "-m", model, "--peer", "vllm=python")
    assert result.exit_code == 1
    assert result.stdout.endswith("\nvllm failed: exit code 1: there is no such thing\n")
    assert result.stderr == "error: no figures from vllm; the reason stands below the table\n"
