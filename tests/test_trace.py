"""The trace: a file that Perfetto opens; its slices nest, its rows end, it survives a crash and a full disk."""

from __future__ import annotations

import json
import logging
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from seeing_helpers import FakeClock, WrittenAnswers, run, written_engine

from mini_vllm.engine import events
from mini_vllm.engine.trace import TraceWriter
from mini_vllm.errors import InvalidConfigError

Entry = dict[str, Any]
SEQUENCES = 2  # the process of the sequences' rows


def load(path: Path) -> list[Entry]:
    entries: list[Entry] = json.loads(path.read_text())
    return entries


def rows(entries: list[Entry], process: int = SEQUENCES) -> dict[str, list[str]]:
    """The slices of each row, by name of row, as `name(` when they begin and `)` when they end."""
    names = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name" and e["pid"] == process}
    slices: dict[str, list[str]] = {name: [] for name in names.values()}
    for entry in entries:
        if entry["pid"] == process and entry["ph"] in "BE":
            slices[names[entry["tid"]]].append(f"{entry['name']}(" if entry["ph"] == "B" else ")")
    return slices


def assert_well_formed(entries: list[Entry]) -> None:
    """Times never go back; every slice ends, in its row, before the one around it does."""
    open_slices: dict[int, list[str]] = defaultdict(list)
    last = 0
    for entry in entries:
        assert set(entry) <= {"ph", "pid", "tid", "ts", "name", "args"}
        assert entry["ts"] >= last
        last = entry["ts"]
        if entry["ph"] == "B":
            open_slices[entry["tid"]].append(entry["name"])
        elif entry["ph"] == "E":
            assert open_slices[entry["tid"]].pop() == entry["name"]
    assert not any(open_slices.values())


def traced_run(path: Path) -> list[Entry]:
    """A chunked prefill, three siblings, a prefix hit, a preemption."""
    answers = {"The cat sat": ("down", "up", "by"), "The cat is": "in the garden"}
    with TraceWriter(path, clock=FakeClock()) as trace:
        engine = written_engine(answers, trace, max_num_batched_tokens=8, num_kv_blocks=6)
        engine.add_request("The cat sat", request_id="A", n=3, max_tokens=5)
        engine.step()
        engine.add_request("The cat is", request_id="B", max_tokens=3)
        run(engine)
    return load(path)


def test_each_sequence_has_a_row_with_its_phases(tmp_path: Path) -> None:
    entries = traced_run(tmp_path / "trace.json")
    assert_well_formed(entries)
    assert {name: " ".join(slices) for name, slices in rows(entries).items()} == {
        "A": "waiting( ) prefill( 0 to 7( ) 8 to 10( ) ) decode( )",
        "A.1": "decode( )",
        "A.2": "decode( ) preempted( ) prefill( 8 to 12( ) )",
        "B": "waiting( ) prefill( 8 to 9( ) ) decode( ) preempted( ) prefill( 8 to 11( ) )",
    }


def test_the_row_of_the_engine_has_every_step_with_its_parts(tmp_path: Path) -> None:
    entries = traced_run(tmp_path / "trace.json")
    first_step = [e["ts"] for e in entries if e["name"] == "step 1"]
    assert first_step == [2000, 6000]  # microseconds: the clock goes on by a millisecond an event
    steps = " ".join(rows(entries, process=1)["steps"]).split(" step ")
    assert steps[0] == "step 1( schedule( ) forward( ) commit( ) )"
    assert steps[1] == "2( schedule( ) forward( ) commit( ) )"
    assert {part.split("( ", 1)[1] for part in steps} == {"schedule( ) forward( ) commit( ) )"}


def test_what_a_slice_says(tmp_path: Path) -> None:
    entries = traced_run(tmp_path / "trace.json")
    hit = next(e for e in entries if e["name"] == "prefill" and e["args"]["cached tokens"])
    assert hit["args"] == {
        "tokens": 10,
        "cached tokens": 8,
        "shared blocks": [0, 1],
        "new blocks": [3],
        "again, after a preemption": False,
    }
    copies = [e["args"]["copied"] for e in entries if e["ph"] == "i" and "copied" in e["args"]]
    assert copies == ["2 to 4", "2 to 5"]
    forwards = [e["args"] for e in entries if e["name"] == "forward" and e["ph"] == "B"]
    assert forwards[:2] == [
        {"sequences": 1, "prefill tokens": 8, "decode tokens": 0},
        {"sequences": 2, "prefill tokens": 5, "decode tokens": 0},
    ]
    reasons = [e["args"]["finish reason"] for e in entries if e["ph"] == "E" and "args" in e]
    assert sorted(reasons) == ["length", "stop", "stop", "stop"]


def test_the_counters_add_up(tmp_path: Path) -> None:
    entries = [e for e in traced_run(tmp_path / "trace.json") if e["ph"] == "C"]
    blocks = [e["args"] for e in entries if e["name"] == "blocks"]
    assert all(sum(one.values()) == 6 for one in blocks)
    assert max(one["used"] for one in blocks) == 6
    assert blocks[-1]["used"] == 0
    assert blocks[-1]["cached but free"] > 0
    assert max(e["args"]["waiting"] for e in entries if e["name"] == "sequences") == 2
    assert [e["args"] for e in entries if e["name"] == "tokens"][:2] == [
        {"prefill": 8, "decode": 0},
        {"prefill": 0, "decode": 0},
    ]


def test_after_every_step_the_file_lacks_only_its_bracket(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path)
    engine = written_engine({"Hello": "world"}, trace)
    engine.add_request("Hello")
    num_seen = 0
    while engine.has_unfinished_requests():
        engine.step()
        entries = json.loads(path.read_text() + "]")  # nobody has closed it: as after a kill
        assert len(entries) > num_seen
        num_seen = len(entries)
    trace.close()
    assert_well_formed(load(path))


def test_closing_in_the_middle_ends_every_row(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceWriter(path)
    engine = written_engine({"Hello": "world", "Bye": "now"}, trace, max_num_seqs=1)
    engine.add_request("Hello", request_id="A")
    engine.add_request("Bye", request_id="B")
    engine.step()
    trace.close()
    run(engine)  # nobody listens any more
    trace.close()
    assert_well_formed(load(path))
    assert {name: " ".join(slices) for name, slices in rows(load(path)).items()} == {
        "A": "waiting( ) prefill( 0 to 4( ) ) decode( )",
        "B": "waiting( )",
    }


def test_an_abort_while_waiting_ends_the_row(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.json") as trace:
        engine = written_engine({"Hello": "world"}, trace)
        engine.add_request("Hello", request_id="A")
        engine.abort_request("A")
    entries = load(tmp_path / "trace.json")
    assert rows(entries) == {"A": ["waiting(", ")"]}
    assert entries[-1]["args"] == {"finish reason": "abort"}


def test_an_interrupted_step_does_not_spoil_the_next_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TraceWriter(tmp_path / "trace.json") as trace:
        engine = written_engine({"Hello": "world"}, trace)
        engine.add_request("Hello", request_id="A")
        with monkeypatch.context() as patch:
            patch.setattr(WrittenAnswers, "execute", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        run(engine)
    entries = load(tmp_path / "trace.json")
    assert_well_formed(entries)
    assert " ".join(rows(entries)["A"]) == (
        "waiting( ) prefill( 0 to 4( ) ) preempted( ) prefill( 0 to 4( ) ) decode( )"
    )
    assert rows(entries, process=1)["steps"][:6] == ["step 1(", "schedule(", ")", "forward(", ")", ")"]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_memory_is_bounded_by_the_live_sequences(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.json") as trace:
        for number in range(2000):  # nobody steps, so nothing but the limit makes it write
            trace(events.Queued(f"r{number}", 0, 5))
        assert len(trace._pending) < 512
        assert (tmp_path / "trace.json").stat().st_size > 100_000
        engine = written_engine({"Hello": "world"}, trace)
        for _ in range(20):
            engine.add_request("Hello")
            run(engine)
        assert len(trace._rows) == 2000  # those of the 20 are gone
        assert trace._pending == []


def test_any_request_id_makes_valid_json(tmp_path: Path) -> None:
    request_id = 'a "quoted"\n\u2028 id \ud83d'
    with TraceWriter(tmp_path / "trace.json") as trace:
        engine = written_engine({"Hello": "world"}, trace)
        engine.add_request("Hello", request_id=request_id)
        run(engine)
    assert list(rows(load(tmp_path / "trace.json"))) == [request_id]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is a Linux device")
def test_a_full_disk_ends_the_trace_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    with TraceWriter("/dev/full") as trace:
        engine = written_engine({"Hello": "world"}, trace)
        engine.add_request("Hello", request_id="A")
        with caplog.at_level(logging.ERROR):
            assert run(engine)["A"].outputs[0].text == "world"
    assert [record.message for record in caplog.records] == [
        "the trace /dev/full ends here, it cannot be written: [Errno 28] No space left on device"
    ]


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="No such file or directory") as error:
        TraceWriter(tmp_path / "missing" / "trace.json")
    assert error.value.field == "trace"


def test_several_listeners_hear_the_same_events() -> None:
    first: list[events.Event] = []
    second: list[events.Event] = []
    engine = written_engine({"Hello": "world"}, events.fan_out(first.append, None, second.append))
    engine.add_request("Hello")
    run(engine)
    assert first == second != []
    assert events.fan_out(None, None) is None
    only = first.append
    assert events.fan_out(None, only) is only
