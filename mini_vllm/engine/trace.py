"""`TraceWriter`: the engine's events as a timeline that Perfetto (https://ui.perfetto.dev) opens.

Where it stands: a listener of the engine (`engine/events.py`), attached by `--trace FILE`.

    engine      | step 7 ------------------------------ | step 8 ---
                | schedule | forward        | commit |  | schedule |
    sequences   A  waiting | prefill  ------------------ | decode -------- | preempted | prefill | decode
                             | 0 to 511 | 512 to 700 |       (the chunks of a prefill, one a step)
    counters    blocks: used, cached but free, free;  sequences: running, waiting;  tokens: prefill, decode

What always holds:
- Slices of one row nest, and times never go back, in the order of the file.
- A row ends when its sequence does; what is kept in memory is one small entry a live sequence, and one step's events.
- The file can be opened while the engine runs and after it was killed. The format is the Trace Event Format's *array*,
  whose closing bracket may be missing, so events are only ever appended, a step at a time. That is also why there is no
  temporary file and no rename at the end, as the model store has it: of a run that dies, the trace is what one wants.
- A full disk ends the trace, with an error in the log, and not the engine.

In vLLM: `vllm/tracing` sends spans of whole requests to OpenTelemetry; for a step's inside it has the PyTorch profiler.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from mini_vllm.cache.block_manager import BlockStats
from mini_vllm.engine import events
from mini_vllm.errors import InvalidConfigError

logger = logging.getLogger(__name__)

_ENGINE_PROCESS, _SEQUENCES_PROCESS = 1, 2  # Perfetto shows rows in groups that it calls processes
_ENGINE_ROW = 1
_FIRST_SEQUENCE_ROW = 3  # row ids differ from each other and from the process ids, which would make a row "main"
_MAX_PENDING = 512  # events kept back at most, where no step comes to write them

Args = dict[str, object]


@dataclass
class _Row:
    """A row of the timeline, and the slices that are open in it, outermost first."""

    process: int
    row: int
    open_slices: list[str] = field(default_factory=list)
    prefill_end: int = 0  # tokens that are known at admission: with them computed, the prefill is over
    is_prefilled: bool = False

    @property
    def phase(self) -> str | None:
        return self.open_slices[0] if self.open_slices else None


class TraceWriter:
    """Writes one trace file. Use it as a listener, and close it (or use it in `with`).

    Args:
        path: the file; one that is there is overwritten.
        clock: seconds, monotonic.

    Raises:
        InvalidConfigError: the file cannot be written.
    """

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            self._file = open(path, "wb")  # noqa: SIM115 (it stays open as long as the engine runs)
        except OSError as error:
            raise InvalidConfigError(
                f"the trace cannot be written to {path}: {error.strerror}; give a path that can be written",
                field="trace",
            ) from error
        self._path = path
        self._clock = clock
        self._origin = clock()
        self._now = 0  # microseconds since the start
        self._is_open = True
        self._separator = b"[\n"
        self._pending: list[bytes] = []
        self._engine = _Row(_ENGINE_PROCESS, _ENGINE_ROW)
        self._rows: dict[tuple[str, int], _Row] = {}
        self._num_rows = 0
        self._num_steps = 0
        self._computing: list[_Row] = []  # rows with a chunk of a prefill in this step
        self._counters: dict[str, Args] = {}
        self._name_row(self._engine, "process_name", "engine")
        self._name_row(self._engine, "thread_name", "steps")
        self._name_row(_Row(_SEQUENCES_PROCESS, 0), "process_name", "sequences")

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, event: events.Event) -> None:
        """Take one event of the engine."""
        if not self._is_open:
            return
        self._tick()
        if isinstance(event, events.StepEvent):
            self._on_step(event)
        else:
            self._on_sequence(event)
        if isinstance(event, events.StepFinished) or len(self._pending) >= _MAX_PENDING:
            self._write_pending()

    def close(self) -> None:
        """End every row and the file. Events that come later are ignored; closing twice is allowed."""
        if not self._is_open:
            return
        self._tick()
        for row in (*self._rows.values(), self._engine):
            self._end_all(row)
        self._pending.append(b"\n]\n")
        self._write_pending()
        if self._is_open:
            self._is_open = False
            self._file.close()

    # ---- the row of the engine ----------------------------------------------------------------------------------

    def _on_step(self, event: events.StepEvent) -> None:
        engine = self._engine
        if isinstance(event, events.StepStarted):
            self._end_all(engine)  # a step that was interrupted has had no end
            self._computing.clear()
            self._num_steps += 1
            self._begin(engine, f"step {self._num_steps}")
            self._begin(engine, "schedule")
        elif isinstance(event, events.StepScheduled):
            self._end(engine)
            self._on_scheduled(event)
        elif isinstance(event, events.StepExecuted):
            self._end(engine)
            self._begin(engine, "commit")
            self._end_chunks()
        else:
            self._end_all(engine)
            self._begin_decodes()
            self._count_queues(event.num_running, event.num_waiting, event.blocks)
            self._count("tokens", {"prefill": 0, "decode": 0})

    def _on_scheduled(self, event: events.StepScheduled) -> None:
        num_tokens = {"prefill": 0, "decode": 0}
        for scheduled in event.sequences:
            num_tokens["prefill" if scheduled.is_prefill else "decode"] += scheduled.num_new_tokens
            row = self._rows.get((scheduled.request_id, scheduled.index))
            if row is not None and row.phase == "prefill":
                end = scheduled.start + scheduled.num_new_tokens
                row.is_prefilled = end >= row.prefill_end
                self._begin(row, f"{scheduled.start} to {end - 1}", {"tokens": scheduled.num_new_tokens})
                self._computing.append(row)
        self._count_queues(event.num_running, event.num_waiting, event.blocks)
        self._count("tokens", {**num_tokens})
        self._begin(
            self._engine,
            "forward",
            {"sequences": len(event.sequences), **{f"{k} tokens": n for k, n in num_tokens.items()}},
        )

    def _end_chunks(self) -> None:
        for row in self._computing:
            self._end(row)

    def _begin_decodes(self) -> None:
        for row in self._computing:
            if row.is_prefilled and row.phase == "prefill":  # it may have finished with its first token
                self._begin_phase(row, "decode")
        self._computing.clear()

    # ---- the rows of the sequences ------------------------------------------------------------------------------

    def _on_sequence(self, event: events.SequenceEvent) -> None:
        row = self._row_of(event.request_id, event.index)
        if isinstance(event, events.Queued):
            self._begin_phase(row, "waiting", {"tokens": event.num_tokens})
        elif isinstance(event, events.Admitted):
            row.prefill_end, row.is_prefilled = event.num_tokens, False
            args: Args = {
                "tokens": event.num_tokens,
                "cached tokens": event.num_cached_tokens,
                "shared blocks": list(event.shared_blocks),
                "new blocks": list(event.new_blocks),
                "again, after a preemption": event.is_resumed,
            }
            self._begin_phase(row, "prefill", args)
        elif isinstance(event, events.BlocksAppended):
            copied = {} if event.copy is None else {"copied": f"{event.copy.source} to {event.copy.target}"}
            self._mark(row, "block", {"new blocks": list(event.new_blocks), **copied})
        elif isinstance(event, events.Forked):
            self._begin_phase(row, "decode", {"shared blocks": list(event.blocks)})
        elif isinstance(event, events.Preempted):
            self._begin_phase(row, "preempted", {"tokens": event.num_tokens, "freed blocks": list(event.freed_blocks)})
        else:
            self._end_all(row, {"finish reason": str(event.reason)})
            del self._rows[event.request_id, event.index]

    def _row_of(self, request_id: str, index: int) -> _Row:
        row = self._rows.get((request_id, index))
        if row is None:
            row = _Row(_SEQUENCES_PROCESS, _FIRST_SEQUENCE_ROW + self._num_rows)
            self._rows[request_id, index] = row
            self._num_rows += 1
            self._name_row(row, "thread_name", events.sequence_name(request_id, index))
            self._put("M", row, "thread_sort_index", {"sort_index": self._num_rows})
        return row

    def _begin_phase(self, row: _Row, phase: str, args: Args | None = None) -> None:
        self._end_all(row)
        self._begin(row, phase, args)

    # ---- what a trace is made of --------------------------------------------------------------------------------

    def _begin(self, row: _Row, name: str, args: Args | None = None) -> None:
        row.open_slices.append(name)
        self._put("B", row, name, args)

    def _end(self, row: _Row, args: Args | None = None) -> None:
        self._put("E", row, row.open_slices.pop(), args)

    def _end_all(self, row: _Row, args: Args | None = None) -> None:
        while row.open_slices:
            self._end(row, args if len(row.open_slices) == 1 else None)

    def _mark(self, row: _Row, name: str, args: Args) -> None:
        self._put("i", row, name, args)

    def _name_row(self, row: _Row, kind: str, name: str) -> None:
        self._put("M", row, kind, {"name": name})

    def _count_queues(self, num_running: int, num_waiting: int, blocks: BlockStats) -> None:
        self._count("blocks", {"used": blocks.used, "cached but free": blocks.cached_free, "free": blocks.free})
        self._count("sequences", {"running": num_running, "waiting": num_waiting})

    def _count(self, name: str, values: Args) -> None:
        if self._counters.get(name) != values:
            self._counters[name] = values
            self._put("C", self._engine, name, values)

    def _put(self, kind: str, row: _Row, name: str, args: Args | None = None) -> None:
        entry: Args = {"ph": kind, "pid": row.process, "tid": row.row, "ts": self._now, "name": name}
        if args:
            entry["args"] = args
        self._pending.append(self._separator + json.dumps(entry, separators=(",", ":")).encode())
        self._separator = b",\n"

    def _tick(self) -> None:
        self._now = max(self._now, round((self._clock() - self._origin) * 1e6))

    def _write_pending(self) -> None:
        """One write of whole events, so that a killed process leaves no half of one."""
        try:
            self._file.write(b"".join(self._pending))
            self._file.flush()
        except OSError as error:
            logger.error("the trace %s ends here, it cannot be written: %s", self._path, error)
            self._is_open = False
            with suppress(OSError):
                self._file.close()
        self._pending.clear()
