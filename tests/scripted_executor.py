"""A worker without a model, and an engine loop around it: what the tests of the scheduler run on.

`Histories` gives every text (a sequence of tokens from the first on) a number of its own. The scripted KV cache holds,
in each token slot, the number of the text that ends there: what a real cache holds is a function of exactly that. So
one comparison of integers says whether a slot still holds what a sequence is about to read, and any mistake in sharing,
copying, evicting or resuming shows as a wrong history at the step that reads it.

The next token is a function of the text and of the sample index, so every answer is known without running anything.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from mini_vllm.cache.block_manager import BlockManager
from mini_vllm.config import EngineConfig
from mini_vllm.engine import events
from mini_vllm.engine.request import Request
from mini_vllm.engine.scheduled_batch import ModelOutput, SampledToken, ScheduledBatch, split_batch
from mini_vllm.engine.scheduler import Scheduler
from mini_vllm.engine.sequence import Sequence as EngineSequence
from mini_vllm.engine.sequence import SequenceGroup
from mini_vllm.engine.sequence_change import SequenceChange
from mini_vllm.outputs import FinishReason, TokenLogprobs
from mini_vllm.sampling_params import SamplingParams

POISON = -1  # what a failed or interrupted forward leaves in a slot
UNWRITTEN = -2


class Histories:
    """Numbers for texts: equal numbers mean equal texts under equal salts."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, object], int] = {}
        self._parents: list[int] = [0]
        self._tokens: list[int] = [0]
        self._hashes: list[int] = [7]

    def root(self, salt: str | None) -> int:
        return self._child(0, ("salt", salt), 0, 7)  # the salt makes another text, but no other answer

    def extend(self, node: int, token: int) -> int:
        return self._child(node, token, token, (self._hashes[node] * 1_000_003 + token + 1) % (2**61 - 1))

    def parent(self, node: int) -> int:
        return self._parents[node]

    def token(self, node: int) -> int:
        return self._tokens[node]

    def next_token(self, node: int, sample_index: int, vocab_size: int) -> int:
        """The scripted model."""
        return (((self._hashes[node] + 31 * sample_index) * 2_654_435_761) >> 16) % vocab_size

    def logprob(self, node: int) -> float:
        return -float(self._hashes[node] % 1000)

    def _child(self, node: int, edge: object, token: int, new_hash: int) -> int:
        child = self._children.get((node, edge))
        if child is None:
            child = self._children[(node, edge)] = len(self._parents)
            self._parents.append(node)
            self._tokens.append(token)
            self._hashes.append(new_hash)
        return child


class ScriptedExecutor:
    """Takes batches as the real executor does, over the scheduler's sequence table.

    Args:
        scheduler: read for its table, and for the salt of each row.
        stores: False for `cache="none"`, whose backend keeps nothing between steps.
    """

    def __init__(self, scheduler: Scheduler, vocab_size: int, *, stores: bool = True) -> None:
        blocks = scheduler.block_manager
        self.histories = Histories()
        self.slots = [UNWRITTEN] * (blocks.num_blocks * blocks.block_size)
        self.vocab_size = vocab_size
        self._scheduler = scheduler
        self._block_size = blocks.block_size
        self._stores = stores

    def execute(
        self, batch: ScheduledBatch, *, failing: Collection[int] = (), failing_draws: Collection[int] = ()
    ) -> ModelOutput:
        """One step.

        Args:
            failing: sequences of the batch whose computation fails: they write rubbish and report an error.
            failing_draws: draws that give an error instead of a token.
        """
        self._copy(batch)
        for index, scheduled in enumerate(batch.sequences):
            assert scheduled.num_new_tokens > 0, "a sequence is scheduled for nothing"
            self._write(scheduled.row, scheduled.start, scheduled.end, poison=index in failing)
        last = [
            POISON if index in failing else self._read(scheduled.row, scheduled.start, scheduled.end)
            for index, scheduled in enumerate(batch.sequences)
        ]
        tokens = [
            SampledToken(-1, error="scripted failure")
            if place in failing_draws or draw.sequence in failing
            else SampledToken(self.histories.next_token(last[draw.sequence], draw.sample_index, self.vocab_size))
            for place, draw in enumerate(batch.draws)
        ]
        prompt_logprobs = [
            [] if span.sequence in failing else self._entries(batch.sequences[span.sequence].row, span.start, span.end)
            for span in batch.prompt_logprobs
        ]
        return ModelOutput(tokens, prompt_logprobs, dict.fromkeys(failing, "scripted failure"))

    def execute_one_by_one(self, batch: ScheduledBatch, *, failing: Collection[int]) -> ModelOutput:
        """As the engine does: the whole batch raised after it had written, so each sequence runs alone once more."""
        self.execute(batch, failing=failing)
        tokens: dict[int, SampledToken] = {}
        spans: dict[int, list[TokenLogprobs]] = {}
        for index, part in enumerate(split_batch(batch)):
            output = self.execute(part.batch, failing={0} if index in failing else ())
            tokens.update(zip(part.draws, output.tokens, strict=True))
            spans.update(zip(part.spans, output.prompt_logprobs, strict=True))
        return ModelOutput(
            [tokens[place] for place in range(len(batch.draws))],
            [spans[place] for place in range(len(batch.prompt_logprobs))],
            dict.fromkeys(failing, "scripted failure"),
        )

    def interrupt(self, batch: ScheduledBatch) -> None:
        """The step is cut off in the middle: the copies are made, the slots to write hold rubbish."""
        self._copy(batch)
        for scheduled in batch.sequences:
            self._write(scheduled.row, scheduled.start, scheduled.end, poison=True)

    def slot(self, row: int, position: int) -> int:
        block = int(self._scheduler.table.block_tables[row, position // self._block_size])
        return block * self._block_size + position % self._block_size

    def _copy(self, batch: ScheduledBatch) -> None:
        size = self._block_size
        copied = [self.slots[copy.source * size : (copy.source + 1) * size] for copy in batch.block_copies]
        for copy, content in zip(batch.block_copies, copied, strict=True):
            self.slots[copy.target * size : (copy.target + 1) * size] = content

    def _write(self, row: int, start: int, end: int, *, poison: bool) -> None:
        if not self._stores:
            return
        for position, node in enumerate(self._texts(row, end)):
            if position >= start:
                self.slots[self.slot(row, position)] = POISON if poison else node

    def _read(self, row: int, start: int, end: int) -> int:
        """Attend to everything up to `end`: each slot must hold the history of this very sequence."""
        texts = self._texts(row, end)
        if not self._stores:
            assert start == 0, "without a cache everything is computed in every step"
            return texts[-1]
        for position, node in enumerate(texts):
            found = self.slots[self.slot(row, position)]
            assert found == node, f"row {row}, position {position}: slot holds history {found}, should be {node}"
        return texts[-1]

    def _texts(self, row: int, end: int) -> list[int]:
        """The history at each of the first `end` positions of a row."""
        sequence = next(sequence for sequence in self._scheduler.running if sequence.row == row)
        node, texts = self.histories.root(sequence.group.request.cache_salt), []
        for token in self._scheduler.table.token_ids[row, :end].tolist():
            node = self.histories.extend(node, token)
            texts.append(node)
        return texts

    def _entries(self, row: int, start: int, end: int) -> list[TokenLogprobs]:
        texts = self._texts(row, end + 1)
        return [
            TokenLogprobs(self.histories.token(texts[position + 1]), self.histories.logprob(texts[position]))
            for position in range(start, end)
        ]


@dataclass(frozen=True)
class Answer:
    """What one choice of a request must come to."""

    token_ids: list[int]
    finish_reason: FinishReason


@dataclass
class ScriptedEngine:
    """`LLMEngine.step` without text: schedule, execute, commit, finish. Keeps what it streamed and all events.

    Args:
        num_blocks, block_size, max_model_len: of the pool; for other caches than `paged` a block is a whole slot.
        vocab_size: tokens are below it.
        options: fields of `EngineConfig`.
    """

    num_blocks: int = 64
    block_size: int = 4
    max_model_len: int = 64
    vocab_size: int = 1000
    options: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = EngineConfig(block_size=self.block_size, debug_checks=True, **self.options)  # type: ignore[arg-type]
        if config.cache != "paged":
            self.block_size = self.max_model_len
        self.config = config.with_model_limits(min(self.max_model_len, self.num_blocks * self.block_size))
        self.blocks = BlockManager(
            self.num_blocks, self.block_size, enable_prefix_caching=bool(config.enable_prefix_caching)
        )
        self.events: list[events.Event] = []
        self.scheduler = Scheduler(self.config, self.blocks, self.events.append, clock=lambda: 0.0)
        self.executor = ScriptedExecutor(self.scheduler, self.vocab_size, stores=config.cache != "none")
        self.groups: dict[str, SequenceGroup] = {}
        self.streamed: dict[tuple[str, int], list[int]] = {}
        self.stop_strings: dict[str, tuple[int, int]] = {}  # request id -> two tokens that end it like a stop string
        self.num_added = 0

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        n: int = 1,
        max_tokens: int = 4,
        prompt_logprobs: int | None = None,
        min_tokens: int = 0,
        stop_token_ids: Collection[int] = (),
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> SequenceGroup:
        params = SamplingParams(n=n, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs, min_tokens=min_tokens)
        self.num_added += 1
        request = Request(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=list(prompt),
            params=params.resolve({}),
            seed=0,
            max_tokens=max_tokens,
            stop_token_ids=frozenset(stop_token_ids),
            arrival_index=self.num_added,
            priority=priority,
            cache_salt=cache_salt,
        )
        group = self.groups[request_id] = SequenceGroup(request)
        self.scheduler.add(group)
        return group

    def step(self, *, failing: Collection[str] = (), failing_draws: Collection[str] = ()) -> list[str]:
        """One step, as a list of what it computed: `a[0:5]` is positions 0 to 4 of request a, `a.1[5:6]` of sibling 1.

        Args:
            failing: names of sequences (`a`, `a.1`) whose forward fails.
            failing_draws: names of sequences for which no token can be drawn.
        """
        batch = self.scheduler.schedule()
        described = self.describe(batch)
        if batch.is_empty:
            return described
        names = [entry.split("[")[0] for entry in described]
        bad = [index for index, name in enumerate(names) if name in failing]
        bad_draws = [
            place
            for place, draw in enumerate(batch.draws)
            if sibling_name(names[draw.sequence].split(".")[0], draw.sample_index) in failing_draws
        ]
        execute = self.executor.execute_one_by_one if bad else self.executor.execute
        output = self.executor.execute(batch, failing_draws=bad_draws) if bad_draws else execute(batch, failing=bad)
        self.commit(batch, output)
        return described

    def commit(self, batch: ScheduledBatch, output: ModelOutput) -> list[SequenceChange]:
        changes = self.scheduler.commit(batch, output)
        for change in changes:
            sequence, count = change.sequence, change.num_new_tokens
            new = sequence.token_ids[len(sequence.token_ids) - count :]
            self.streamed.setdefault((sequence.group.request.request_id, sequence.index), []).extend(new)
            pair = self.stop_strings.get(sequence.group.request.request_id)
            if sequence.finish_reason is None and pair == tuple(sequence.output_token_ids[-2:]):
                sequence.finish_reason = FinishReason.STOP
        self.scheduler.finish([change.sequence for change in changes if change.sequence.finish_reason is not None])
        return changes

    def run(self, max_steps: int = 1000) -> list[list[str]]:
        """Step until nothing is left; returns what each step computed."""
        steps = []
        while self.scheduler.num_running or self.scheduler.num_waiting:
            assert len(steps) < max_steps, f"not done after {max_steps} steps"
            steps.append(self.step())
            assert steps[-1], "a step without work although there is some"
        return steps

    def describe(self, batch: ScheduledBatch) -> list[str]:
        rows = {sequence.row: sequence for sequence in self.scheduler.running}
        return [f"{name_of(rows[s.row])}[{s.start}:{s.end}]" for s in batch.sequences]

    def expected(self, group: SequenceGroup, sample_index: int) -> Answer:
        """The answer of one choice, from the script alone."""
        request = group.request
        node, output = self.executor.histories.root(request.cache_salt), []
        for token in request.prompt_token_ids:
            node = self.executor.histories.extend(node, token)
        while len(output) < request.max_tokens:
            token = self.executor.histories.next_token(node, sample_index, self.vocab_size)
            node = self.executor.histories.extend(node, token)
            output.append(token)
            if token in request.stop_token_ids and len(output) > request.params.min_tokens:
                return Answer(output, FinishReason.STOP)
            if len(output) < request.max_tokens and self.stop_strings.get(request.request_id) == tuple(output[-2:]):
                return Answer(output, FinishReason.STOP)
        return Answer(output, FinishReason.LENGTH)

    def expected_prompt_logprobs(self, group: SequenceGroup) -> list[TokenLogprobs | None]:
        node, entries = self.executor.histories.root(group.request.cache_salt), []
        for token in group.request.prompt_token_ids:
            entries.append(TokenLogprobs(token, self.executor.histories.logprob(node)))
            node = self.executor.histories.extend(node, token)
        return [None, *entries[1:]]

    def check_answers(self, group: SequenceGroup) -> None:
        """All choices of a finished request are what the script says, each token streamed exactly once."""
        assert len(group.sequences) == group.request.params.n
        for index, sequence in enumerate(group.sequences):
            expected = self.expected(group, index)
            assert sequence.index == index
            assert sequence.output_token_ids == expected.token_ids
            assert self.streamed.get((group.request.request_id, index), []) == expected.token_ids
            assert sequence.finish_reason is expected.finish_reason
        if group.request.params.prompt_logprobs is not None:
            assert group.prompt_logprobs == self.expected_prompt_logprobs(group)

    def check_all_free(self) -> None:
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        self.scheduler.check()
        self.blocks.check([])
        assert self.blocks.num_free_blocks == self.num_blocks


def sibling_name(request_id: str, index: int) -> str:
    return request_id if index == 0 else f"{request_id}.{index}"


def name_of(sequence: EngineSequence) -> str:
    return sibling_name(sequence.group.request.request_id, sequence.index)


class InterleavedSiblings:
    """A policy for tests: first choices before second ones, so siblings do not stand side by side."""

    def key(self, sequence: EngineSequence) -> tuple[int, int]:
        return (sequence.index, sequence.group.request.arrival_index)


class ShortestPromptFirst:
    """A policy for tests: newcomers may go before everybody who runs."""

    def key(self, sequence: EngineSequence) -> tuple[int, int, int]:
        request = sequence.group.request
        return (len(request.prompt_token_ids), request.arrival_index, sequence.index)
