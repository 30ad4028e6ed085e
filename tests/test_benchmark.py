"""Benchmarks: their arithmetic against a clock that the model moves, what they refuse, and the files they write."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from cli_helpers import CommandLine, build_cli_model
from engine_doubles import ScriptedModel, parts_for, tiny_transformer
from torch import Tensor

from mini_vllm.benchmark import ladder
from mini_vllm.benchmark.equality import count_near_ties
from mini_vllm.benchmark.ladder import bench_ladder, ladder_table, rungs
from mini_vllm.benchmark.ladder_plot import chart_format, plot_ladder
from mini_vllm.benchmark.latency import bench_latency, latency_table
from mini_vllm.benchmark.options import LadderOptions, LatencyOptions
from mini_vllm.benchmark.progress import BarProgress, Named, open_progress
from mini_vllm.benchmark.records import BenchmarkError, RequestRecord, RunRecord
from mini_vllm.benchmark.report import Spread, percentiles, write_json
from mini_vllm.benchmark.runner import Bench, PartsLoader, open_bench, run_workload
from mini_vllm.benchmark.runner import measure as measure_after_warm_up
from mini_vllm.benchmark.step_times import StepObserver, StepTimes
from mini_vllm.benchmark.throughput import bench_throughput, throughput_table
from mini_vllm.benchmark.workload import WorkItem, Workload
from mini_vllm.cache.block_manager import BlockStats
from mini_vllm.config import EngineConfig
from mini_vllm.engine import events
from mini_vllm.engine.llm_engine import EngineParts
from mini_vllm.errors import InvalidConfigError, KernelBuildError
from mini_vllm.model.attention import StepAttention

FORWARD, SAMPLE = 2.0, 0.5  # seconds that the slow model takes
STEP = FORWARD + SAMPLE


class Clock:
    """Stands still until someone moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowModel(ScriptedModel):
    """Says `script`, and moves the clock while it works."""

    def __init__(self, clock: Clock, script: Callable[[int, int], Mapping[int, float]]) -> None:
        super().__init__(script)
        self._clock = clock

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        self._clock.now += FORWARD
        return super().__call__(input_ids, positions, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        self._clock.now += SAMPLE
        return super().logits(hidden)


def slow_parts(clock: Clock) -> PartsLoader:
    return lambda config: parts_for(SlowModel(clock, lambda _, position: {position % 200: 5.0}), config)


def tiny_parts(config: EngineConfig) -> EngineParts:
    return parts_for(tiny_transformer(), config)


def workload_of(*lengths: tuple[int, int], late: int = 0) -> Workload:
    """Requests of (prompt, output) tokens; the last one comes after `late` steps."""
    items = [WorkItem(tuple(range(1, n + 1)), out) for n, out in lengths]
    items[-1] = WorkItem(items[-1].prompt_token_ids, items[-1].num_output_tokens, late)
    return Workload("test", tuple(items), None)


def measure(bench: Bench, workload: Workload, repeats: int) -> list[RunRecord]:
    return measure_after_warm_up(bench, workload, repeats=repeats, warm_up=workload)


def slow_bench(**options: Any) -> tuple[Bench, Clock]:
    clock = Clock()
    config = EngineConfig(**{"num_kv_blocks": 64, "debug_checks": True, **options})
    return open_bench(config, slow_parts(clock), clock), clock


# ---- the runner's arithmetic -----------------------------------------------------------------------------------------


def test_times_of_a_run_are_those_of_the_scripted_clock() -> None:
    bench, _ = slow_bench()
    run = run_workload(bench, workload_of((3, 4), (5, 2)))
    assert run.seconds == 4 * STEP
    first, second = run.requests
    assert (first.time_to_first_token, first.gaps, first.end_to_end) == (STEP, [STEP] * 3, 4 * STEP)
    assert (second.time_to_first_token, second.gaps, second.end_to_end) == (STEP, [STEP], 2 * STEP)
    assert (run.num_prompt_tokens, run.num_output_tokens) == (8, 6)
    assert run.output_tokens_per_second == 6 / (4 * STEP)


def test_a_step_is_split_into_its_parts() -> None:
    bench, _ = slow_bench()
    run = run_workload(bench, workload_of((3, 2)))
    assert run.steps == (
        StepTimes(0.0, 0.0, FORWARD, SAMPLE, 0.0, num_tokens=3, num_decodes=0, num_prefills=1),
        StepTimes(0.0, 0.0, FORWARD, SAMPLE, 0.0, num_tokens=1, num_decodes=1, num_prefills=0),
    )


def test_the_time_before_the_model_is_called_is_that_of_preparing() -> None:
    clock = Clock()
    observer = StepObserver(clock)
    one = events.SequenceScheduled("r", 0, 4, 1, is_prefill=False)
    blocks = BlockStats(1, 0, 1)
    for seconds, event in (
        (0.0, events.StepStarted()),
        (1.0, events.StepScheduled((one,), 0, 1, blocks)),
        (2.0, "forward"),
        (4.0, "logits"),
        (0.0, "logits"),
        (8.0, events.StepExecuted()),
        (16.0, events.StepFinished(31.0, 0, 1, blocks)),
    ):
        clock.now += seconds
        observer.mark(event) if isinstance(event, str) else observer(event)
    assert observer.steps == [StepTimes(1.0, 2.0, 4.0, 8.0, 16.0, num_tokens=1, num_decodes=1, num_prefills=0)]
    assert observer.steps[0].total == 31.0


def test_a_step_that_draws_nothing_has_no_time_of_sampling() -> None:
    bench, _ = slow_bench(max_num_batched_tokens=4)
    run = run_workload(bench, workload_of((8, 1)))
    assert [(s.forward, s.sample) for s in run.steps] == [(FORWARD, 0.0), (FORWARD, SAMPLE)]
    assert run.requests[0].time_to_first_token == 2 * FORWARD + SAMPLE


def test_a_late_request_comes_after_its_steps_and_waits_from_then_on() -> None:
    bench, _ = slow_bench()
    run = run_workload(bench, workload_of((3, 5), (4, 1), late=2))
    assert run.requests[1].arrival == run.requests[0].arrival + 2 * STEP
    assert run.requests[1].time_to_first_token == STEP


def test_a_late_request_is_not_waited_for_when_nobody_runs() -> None:
    bench, _ = slow_bench()
    assert run_workload(bench, workload_of((3, 1), (4, 1), late=50)).seconds == 2 * STEP


def test_memory_held_and_wasted_is_that_of_the_blocks_between_two_steps() -> None:
    bench, _ = slow_bench(block_size=16)
    run = run_workload(bench, workload_of((20, 3)))
    block_bytes = bench.engine.pool.block_bytes
    assert run.held_bytes == (2 * block_bytes, 2 * block_bytes, 0)  # the last step has given them back
    assert run.wasted_bytes == (12 * block_bytes // 16, 11 * block_bytes // 16, 0)
    assert run.wasted_share == pytest.approx(23 / 64)


def test_every_run_begins_with_an_empty_prefix_cache() -> None:
    bench, _ = slow_bench()
    runs = measure(bench, workload_of((40, 2)), repeats=2)
    assert [run.num_cached_tokens for run in runs] == [0, 0]


class Told:
    """A progress that remembers what it was told."""

    def __init__(self) -> None:
        self.runs: list[list[Any]] = []

    def begin(self, title: str, total: int) -> None:
        self.runs.append([title, total, 0])

    def advance(self, count: int) -> None:
        self.runs[-1][2] += count


def test_the_progress_is_told_of_every_token_of_every_run() -> None:
    told, clock = Told(), Clock()
    bench = open_bench(EngineConfig(num_kv_blocks=64), slow_parts(clock), clock, Named(told, "rung 1"))
    measure(bench, workload_of((3, 4), (5, 2)), repeats=2)
    assert told.runs == [["rung 1, warm-up", 6, 6], ["rung 1, run 1 of 2", 6, 6], ["rung 1, run 2 of 2", 6, 6]]


def test_the_bar_starts_anew_with_each_run() -> None:
    with open_progress(is_shown=True) as progress:
        assert isinstance(progress, BarProgress)
        for title, total in (("one", 5), ("two", 7)):
            progress.begin(title, total)
            progress.advance(3)
            (task,) = progress._bar.tasks
            assert (task.description, task.completed, task.total) == (title, 3, total)


def test_nothing_is_drawn_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with open_progress(is_shown=False) as progress:
        progress.begin("one", 5)
        progress.advance(3)
    assert capsys.readouterr().err == ""


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_runs_of_one_workload_that_give_other_tokens_are_refused() -> None:
    clock, answers = Clock(), iter([*[1] * 4, *[2] * 4])
    bench = open_bench(
        EngineConfig(num_kv_blocks=8), lambda c: parts_for(SlowModel(clock, lambda *_: {next(answers): 5.0}), c), clock
    )
    with pytest.raises(BenchmarkError, match="run 2 gave other tokens than run 1"):
        measure(bench, workload_of((3, 2)), repeats=3)


def test_a_request_that_fails_makes_the_run_void() -> None:
    clock = Clock()
    bench = open_bench(
        EngineConfig(num_kv_blocks=8), lambda c: parts_for(SlowModel(clock, lambda *_: {5: float("nan")}), c), clock
    )
    with pytest.raises(BenchmarkError, match="request 1 of 1 came back with 0 tokens instead of 2"):
        run_workload(bench, workload_of((3, 2)))


def test_modes_that_part_where_the_best_token_is_clear_are_refused() -> None:
    bench, _ = slow_bench()
    with pytest.raises(BenchmarkError, match="'a' and 'b' give different answers: request 1, output token 1: 3 and 9"):
        count_near_ties(bench, workload_of((3, 2)), [(2, 3)], [(2, 9)], ("a", "b"))


def test_modes_that_part_at_a_near_tie_are_counted() -> None:
    clock = Clock()
    tied = SlowModel(clock, lambda *_: {3: 5.0, 9: 5.0005})
    bench = open_bench(EngineConfig(num_kv_blocks=8), lambda config: parts_for(tied, config), clock)
    same, other = (2, 3), (2, 9)
    names = ("a", "b")
    assert count_near_ties(bench, workload_of((3, 2), (4, 2)), [same, same], [other, same], names) == 1
    assert count_near_ties(bench, workload_of((3, 2), (4, 2)), [same, same], [same], names) == 0


def test_the_mean_gap_is_the_time_after_the_first_token_over_the_tokens_after_it() -> None:
    assert RequestRecord(1.0, (2.0, 3.0, 6.0), (1, 2, 3), 4, 0).time_per_output_token == 2.0
    assert RequestRecord(1.0, (2.0,), (1,), 4, 0).time_per_output_token == 0.0


def test_the_ladder_is_refused_when_a_rung_answers_otherwise() -> None:
    def load(config: EngineConfig) -> EngineParts:
        return parts_for(tiny_transformer(seed=1 if config.scheduling == "static" else 0), config)

    with pytest.raises(BenchmarkError, match="'contiguous, one at a time' and 'static batches' give different answers"):
        bench_ladder(EngineConfig(), TINY_LADDER, repeats=1, load=load)


# ---- reports ---------------------------------------------------------------------------------------------------------


def test_percentiles_and_spread() -> None:
    assert percentiles([float(i) for i in range(101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([]) == {}
    assert Spread.of([3.0, 1.0, 2.5]) == Spread(2.5, 1.0, 3.0)
    assert Spread.of([3.0, 1.0, 2.5]).text() == "2.5 (1.0 to 3.0)"


HEADER = {"processor", "cores", "threads", "torch", "mini_vllm", "dtype", "seed", "prefix_cache_hit_tokens", "model"}


def test_throughput_report() -> None:
    clock = Clock()
    report = bench_throughput(
        EngineConfig(num_kv_blocks=64), lambda _: workload_of((3, 4), (5, 2)), load=slow_parts(clock), clock=clock
    )
    assert set(report["header"]) >= HEADER | {"pool_tokens"}
    assert report["header"]["dtype"] == "float32"
    assert len(report["runs"]) == 3
    assert report["runs"][0]["output_tokens_per_second"] == 0.6
    assert report["runs"][0]["total_tokens_per_second"] == 1.4
    assert ("output tokens per second", "0.60") in throughput_table(report).rows


def test_latency_report() -> None:
    clock = Clock()
    report = bench_latency(
        EngineConfig(num_kv_blocks=64),
        LatencyOptions(batch_sizes="1,3", input_len="8,16", output_len=4),
        load=slow_parts(clock),
        clock=clock,
    )
    assert set(report["header"]) >= HEADER | {"pool_tokens"}
    swept = [(result["batch_size"], result["input_len"]) for result in report["results"]]
    assert swept == [(1, 8), (3, 8), (1, 16), (3, 16)]
    for result in report["results"]:
        assert set(result["inter_token"].values()) == {STEP}
        assert set(result["end_to_end"].values()) == {4 * STEP}
        parts = {"schedule": 0, "prepare": 0, "forward": FORWARD, "sample": SAMPLE, "output": 0}
        assert result["step_time"] == {**parts, "total": STEP}
    assert latency_table(report).rows[1][:3] == ("3", "8", "2500.0 / 2500.0 / 2500.0")


TINY_LADDER = LadderOptions(
    num_requests=4,
    num_one_at_a_time=2,
    input_len="4-12",
    output_len="4-8",
    max_model_len=128,
    num_slots=3,
    prefix_len=32,
    long_prompt_len=100,
    num_long_prompts=2,
    chunk=24,
)


@pytest.fixture(scope="module")
def ladder_report() -> dict[str, Any]:
    return bench_ladder(EngineConfig(debug_checks=True), TINY_LADDER, repeats=1, load=tiny_parts)


def test_every_rung_of_the_ladder_runs_and_agrees(ladder_report: dict[str, Any]) -> None:
    results = ladder_report["results"]
    assert [result["rung"] for result in results] == [rung.name for rung in rungs(TINY_LADDER, 16)]
    assert set(ladder_report["header"]) >= HEADER | {"pool_tokens", "repeats", "size"}
    assert {result["num_differing"] for result in results} == {0}
    assert all(result["output_tokens_per_second"]["median"] > 0 for result in results)


def test_the_ladder_shows_memory_and_cache_hits(ladder_report: dict[str, Any]) -> None:
    by_name = {(result["rung"], result["workload"]): result for result in ladder_report["results"]}
    assert by_name["no cache", "mixed"]["peak_held_bytes"] == 0
    assert by_name["paged", "mixed"]["wasted_share"] < by_name["continuous", "mixed"]["wasted_share"]
    assert by_name["paged", "shared prefix"]["num_cached_tokens"] == 0
    assert by_name["+ prefix cache", "shared prefix"]["num_cached_tokens"] == 3 * 32


@pytest.mark.parametrize(
    ("sizes", "origin"),
    [
        ({"output_len": "100"}, "prefix_len, input_len and output_len"),
        ({"input_len": "100", "output_len": "40", "prefix_len": 1}, "input_len and output_len"),
        ({"long_prompt_len": 200}, "long_prompt_len"),
    ],
)
def test_lengths_of_any_rung_that_do_not_fit_are_refused_before_the_first_is_measured(
    sizes: dict[str, Any], origin: str
) -> None:
    told = Told()
    with pytest.raises(InvalidConfigError, match=rf"^{origin}: .* max_model_len is 128 here"):
        bench_ladder(EngineConfig(), dataclasses.replace(TINY_LADDER, **sizes), load=tiny_parts, progress=told)
    assert told.runs == []


def test_all_pairs_of_a_sweep_fit_before_the_first_is_measured() -> None:
    told, options = Told(), LatencyOptions(batch_sizes="1", input_len="8,5000", output_len=4)
    with pytest.raises(InvalidConfigError, match=r"^input_len and output_len: a prompt of 5,000 tokens"):
        bench_latency(EngineConfig(num_kv_blocks=8), options, load=tiny_parts, progress=told)
    assert told.runs == []


def test_one_slots_worth_of_blocks_holds_the_longest_sequence() -> None:
    sizes = dataclasses.replace(TINY_LADDER, num_slots=1, max_model_len=120)
    assert {rung.options["num_kv_blocks"] for rung in rungs(sizes, 16) if rung.options["cache"] == "paged"} == {8}


def test_on_a_gpu_the_rungs_of_the_kernels_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "resolve_device", lambda _: torch.device("cuda"))
    report = bench_ladder(EngineConfig(), TINY_LADDER, repeats=1, load=tiny_parts)
    assert "the C++ kernels compute on the CPU" in report["header"]["skipped"]["+ fast kernels (mixed)"]


def test_without_the_kernels_their_rungs_are_left_out_and_the_report_says_why() -> None:
    def load(config: EngineConfig) -> EngineParts:
        if config.kernels == "cpu":
            raise KernelBuildError("there is no compiler")
        return tiny_parts(config)

    report = bench_ladder(EngineConfig(), TINY_LADDER, repeats=1, load=load)
    assert "+ fast kernels" not in [result["rung"] for result in report["results"]]
    assert report["header"]["skipped"]["+ fast kernels (mixed)"] == "there is no compiler"


def test_the_ladder_as_markdown_and_json(ladder_report: dict[str, Any], tmp_path: Path) -> None:
    lines = ladder_table(ladder_report).markdown().splitlines()
    assert lines[0].startswith("| rung | workload | requests | output tok/s |")
    assert len(lines) == 2 + 12 and len({line.count("|") for line in lines}) == 1
    write_json(tmp_path / "ladder.json", ladder_report)
    assert json.loads((tmp_path / "ladder.json").read_text()) == ladder_report


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_ladder_as_a_chart(ladder_report: dict[str, Any], tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"ladder.{ending}"
    plot_ladder(ladder_report, file)
    content = file.read_bytes()
    if ending == "png":
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        return
    root = ElementTree.fromstring(content)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    # Text is drawn as shapes, and matplotlib leaves the words beside them as comments.
    for result in ladder_report["results"]:
        assert f"<!-- {result['rung']} -->".encode() in content
    plot_ladder(ladder_report, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == content, "the same report must give the same file"


@pytest.mark.parametrize("name", ["ladder.xyz", "ladder", "ladder."])
def test_a_chart_of_no_known_format_is_refused_with_those_that_there_are(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidConfigError, match=rf"one of .*\bpng, .*\bsvg, .*; got '{name}'"):
        chart_format(tmp_path / name)
    assert chart_format(tmp_path / "ladder.SVG") == "svg"


def test_a_chart_that_cannot_be_written_is_refused(ladder_report: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ladder.svg").mkdir()
    with pytest.raises(InvalidConfigError, match="the chart cannot be written to"):
        plot_ladder(ladder_report, tmp_path / "ladder.svg")


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_cli_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def mini_vllm(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> CommandLine:
    return CommandLine(monkeypatch, capfdbinary)


SMALL = ("--input-len", "8", "--output-len", "3", "--num-kv-blocks", "64", "--max-model-len", "64")


@pytest.mark.parametrize("what", [("throughput", "--num-prompts", "3"), ("latency", "--batch-sizes", "1,2")])
def test_the_command_shows_a_table_and_writes_a_file(
    mini_vllm: CommandLine, model: Path, tmp_path: Path, what: tuple[str, ...]
) -> None:
    file = tmp_path / "report.json"
    result = mini_vllm("bench", *what, "-m", model, *SMALL, "--repeats", "1", "--json", file)
    assert (result.exit_code, result.stderr) == (0, "")
    assert what[0].title() in result.stdout
    assert json.loads(file.read_text())["benchmark"] == what[0]


def test_the_ladder_runs_as_a_command_and_writes_its_three_files(
    mini_vllm: CommandLine, model: Path, tmp_path: Path
) -> None:
    files = {flag: tmp_path / f"ladder.{flag}" for flag in ("json", "markdown")}
    plot = tmp_path / "ladder.svg"
    sizes = {field.name: getattr(TINY_LADDER, field.name) for field in dataclasses.fields(TINY_LADDER)}
    flags = [text for name, value in sizes.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    outputs = [text for flag, file in files.items() for text in (f"--{flag}", str(file))]
    result = mini_vllm("bench", "ladder", "-m", model, *flags, *outputs, "--plot", plot, "--repeats", "1")
    assert result.exit_code == 0, result.stderr
    rungs_of_file = [one["rung"] for one in json.loads(files["json"].read_text())["results"]]
    assert rungs_of_file[:9] == [rung.name for rung in rungs(TINY_LADDER, 16)][:9]
    assert files["markdown"].read_text().startswith("| rung | workload |")
    assert plot.read_bytes().startswith(b"<?xml")


def test_a_configuration_without_weights_can_be_measured(mini_vllm: CommandLine, model: Path, tmp_path: Path) -> None:
    config = tmp_path / "shape" / "config.json"
    config.parent.mkdir()
    config.write_bytes((model / "config.json").read_bytes())
    flags = ("--num-prompts", "3", "--repeats", "1", "--load-format", "dummy")
    result = mini_vllm("bench", "throughput", "-m", config, *SMALL, *flags)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "model=shape" in result.stdout.replace("\n", "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("throughput", "--input-len", "x"), "input_len is written 128, 32-256, chat:120 or chat:120,0.8"),
        (
            ("ladder", "--output-len", "9-3"),
            "output_len goes from 1 to 10,000,000 tokens, the smaller first, got",
        ),
        (
            ("throughput", "--max-model-len", "64", "--input-len", "60", "--output-len", "5"),
            "shared_prefix_len, input_len and output_len: a prompt of 60 tokens and an answer of 5 are 65, and "
            "max_model_len is 64 here; shorten them, or raise max_model_len",
        ),
        (
            ("ladder", "--dtype", "float16"),
            "all rungs of the ladder run in one dtype, float32 or bfloat16, got 'float16'",
        ),
        (("latency", "--batch-sizes", "1,0"), "batch_sizes is written 1,4,16"),
        (("latency", "--batch-sizes", "9" * 20), "batch_sizes is written 1,4,16"),
        (("latency", "--batch-sizes", "4,1,4"), "batch_sizes gives 4 twice, got '4,1,4'; write each once"),
        (
            ("latency", "--max-num-seqs", "2", "--batch-sizes", "1,4"),
            "batch_sizes asks for 4 requests at once, and max_num_seqs=2 runs 2; leave batch sizes over 2 out, or "
            "raise max_num_seqs",
        ),
        (
            ("latency", "--scheduling", "sequential", "--batch-sizes", "2"),
            "batch_sizes asks for 2 requests at once, and scheduling='sequential' runs 1; leave",
        ),
        (
            ("latency", "--cache", "none"),
            "batch_sizes asks for 64 requests at once, and scheduling='sequential' (from cache='none') runs 1; leave",
        ),
        (
            ("throughput", "--attention-backend", "cpu", "--kernels", "none"),
            "attention_backend='cpu' is one of the C++ kernels, and kernels='none' runs plain PyTorch alone; take",
        ),
        (("latency", "--seed", "-1"), "seed must be 0 or more, got -1"),
        (("throughput", "--num-prompts", "9" * 20), "a workload has 1 to 1,000,000 requests"),
        (("throughput", "--shared-prefix-len", "9" * 20), "shared_prefix_len must be at most 10,000,000"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(
    mini_vllm: CommandLine, model: Path, flags: tuple[str, ...], message: str
) -> None:
    result = mini_vllm("bench", *flags, "-m", model)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")


def test_a_chart_without_matplotlib_is_refused_before_anything_runs(
    mini_vllm: CommandLine, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = mini_vllm("bench", "ladder", "-m", model, "--plot", tmp_path / "ladder.svg")
    assert result.exit_code == 2
    assert "pip install 'mini-vllm[plot]'" in result.stderr


COMMANDS = ("throughput", "latency", "serving", "ladder", "compare")
FILES = [(command, flag) for command in COMMANDS for flag in ("--json", "--markdown")] + [("ladder", "--plot")]


@pytest.mark.parametrize(("command", "flag"), FILES)
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    mini_vllm: CommandLine, tmp_path: Path, command: str, flag: str
) -> None:
    (tmp_path / "a.svg").mkdir()
    (tmp_path / "b").write_text("old")
    model = ("--url", "http://127.0.0.1:9") if command == "serving" else ("-m", "no-such-model")
    for file, reason in (("a.svg", "it is there and is no file"), ("b/c.svg", "Not a directory")):
        result = mini_vllm("bench", command, *model, flag, tmp_path / file)
        assert result.exit_code == 2
        assert result.stderr == (
            f"error: {flag[2:]} cannot be written to {tmp_path / file}: {reason}; choose another file\n"
        )
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.svg", "b"]
    assert (tmp_path / "b").read_text() == "old"


def test_two_reports_in_one_file_are_refused(mini_vllm: CommandLine, tmp_path: Path) -> None:
    result = mini_vllm("bench", "throughput", "--json", tmp_path / "a", "--markdown", tmp_path / "a")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: json and markdown are both ")
