"""Scheduler, block manager and prefix cache under anything that can happen, in any order, with any options.

Hypothesis plays the users and the accidents: requests that share beginnings arrive, are aborted, fail, steps are
interrupted, the prefix cache is reset. The scripted executor holds, in every token slot, the history it was computed
from, and compares each slot that is read with the history it should hold. After every action the invariants are checked
from the outside; at the end everybody must have got exactly the answer they get alone, and every block must be free.

    MINI_VLLM_STATE_MACHINE_EXAMPLES=5000 pytest tests/test_scheduler_state_machine.py     a longer run
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import HealthCheck, Phase, event, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scripted_executor import ScriptedEngine, name_of, sibling_name

from mini_vllm.cache.prefix_cache import block_key, root_key
from mini_vllm.engine import events
from mini_vllm.engine.scheduled_batch import ScheduledBatch
from mini_vllm.engine.sequence import SequenceGroup, SequenceStatus
from mini_vllm.outputs import FinishReason

VOCAB_SIZE = 3  # so small that prompts often begin alike
CACHES_AND_SCHEDULINGS = [
    *[("paged", "continuous")] * 6,
    ("paged", "static"),
    ("paged", "sequential"),
    ("contiguous", "continuous"),
    ("contiguous", "static"),
    ("none", "sequential"),
]
POLICIES = [
    "fcfs",
    "fcfs",
    "priority",
    "scripted_executor:InterleavedSiblings",
    "scripted_executor:ShortestPromptFirst",
]


@dataclass(frozen=True)
class RequestSpec:
    """A request before it is known which engine it meets: what does not fit there is cut to size."""

    beginning: int
    length_of_beginning: int
    new_tokens: list[int]
    longest_prompt: int  # quarters of max_model_len
    n: int
    max_tokens: int
    prompt_logprobs: int | None
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_string: tuple[int, int] | None
    priority: int
    cache_salt: str | None


TOKENS = st.sampled_from(range(VOCAB_SIZE))
PLACES = st.sampled_from(range(12))
REQUESTS = st.builds(
    RequestSpec,
    beginning=st.sampled_from(range(7)),
    length_of_beginning=st.sampled_from(range(24)),
    new_tokens=st.lists(TOKENS, min_size=1, max_size=9),
    longest_prompt=st.sampled_from([1, 2, 2, 3, 3, 4]),
    n=st.sampled_from([1, 1, 2, 3]),
    max_tokens=st.sampled_from([0, 1, 2, 4, 8, 12, 16, 24, 24]),
    prompt_logprobs=st.sampled_from([None, None, None, 0, 2]),
    min_tokens=st.sampled_from([0, 0, 2]),
    stop_token_ids=st.sampled_from([(), (), (), (), (), (), (), (1,)]),
    stop_string=st.sampled_from([None, None, None, None, None, None, None, (0, 1), (2, 2)]),
    priority=st.sampled_from([0, -1, 1]),
    cache_salt=st.sampled_from([None, None, "a", "b"]),
)


@st.composite
def engines(draw: st.DrawFn) -> ScriptedEngine:
    """An engine with any coherent options and a pool that is often too small."""
    cache, scheduling = draw(st.sampled_from(CACHES_AND_SCHEDULINGS))
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    max_model_len = draw(st.sampled_from(range(6, 25)))
    spare_blocks = draw(st.sampled_from(range(7)))
    num_blocks = -(-max_model_len // block_size) + spare_blocks if cache == "paged" else 1 + spare_blocks // 2
    chunked = draw(st.booleans()) if cache != "none" else True
    budget = draw(st.sampled_from([1, 2, 3, 4, 6, 9, 12])) if chunked else max_model_len + draw(st.integers(0, 12))
    return ScriptedEngine(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        options={
            "cache": cache,
            "scheduling": scheduling,
            "policy": draw(st.sampled_from(POLICIES)),
            "max_num_seqs": draw(st.sampled_from([1, 2, 3, 4, 5, 6])),
            "max_num_batched_tokens": budget,
            "enable_chunked_prefill": chunked,
            "enable_prefix_caching": cache == "paged" and draw(st.sampled_from([True, True, True, False])),
        },
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(engine=engines(), specs=st.lists(REQUESTS, min_size=2, max_size=5))
    def start(self, engine: ScriptedEngine, specs: list[RequestSpec]) -> None:
        self.engine = engine
        self.scheduler = engine.scheduler
        self.key = engine.scheduler._policy.key
        self.live: list[SequenceGroup] = []
        self.texts = [[], [0, 1, 2] * 8]  # beginnings of prompts; what was said before is among them
        self.failed: set[str] = set()
        self.blocks_by_events: dict[str, list[int]] = {}
        self.num_events_seen = 0
        self.last_batch_admitted = False
        note(f"{engine.config}")
        self.add(specs)

    # ---- what users do --------------------------------------------------------------------------------------------

    @rule(specs=st.lists(REQUESTS, min_size=1, max_size=3))
    def add(self, specs: list[RequestSpec]) -> None:
        for spec in specs:
            limit = self.engine.config.max_model_len
            beginning = self.texts[spec.beginning % len(self.texts)][: spec.length_of_beginning]
            prompt = (beginning + spec.new_tokens)[: max(1, limit * spec.longest_prompt // 4)]
            room = limit - len(prompt)
            # A request for no tokens is one for prompt logprobs.
            prompt_logprobs = 0 if room == 0 and spec.prompt_logprobs is None else spec.prompt_logprobs
            max_tokens = max(1 if prompt_logprobs is None else 0, min(spec.max_tokens, room))
            request_id = f"r{self.engine.num_added}"
            if spec.stop_string is not None:
                self.engine.stop_strings[request_id] = spec.stop_string
            group = self.engine.add(
                request_id,
                prompt,
                n=min(spec.n, self.engine.config.max_num_seqs),
                max_tokens=max_tokens,
                prompt_logprobs=prompt_logprobs,
                min_tokens=min(spec.min_tokens, max_tokens),
                stop_token_ids=spec.stop_token_ids,
                priority=spec.priority,
                cache_salt=spec.cache_salt,
            )
            self.live.append(group)

    @rule(which=PLACES)
    def abort(self, which: int) -> None:
        if not self.live:
            return
        group = self.live[which % len(self.live)]
        finished_before = {s.index: s.finish_reason for s in group.sequences if s.status is SequenceStatus.FINISHED}
        self.scheduler.abort(group)
        assert group.is_finished
        assert len(group.sequences) == group.request.params.n
        for sequence in group.sequences:
            assert sequence.finish_reason is finished_before.get(sequence.index, FinishReason.ABORT)
            answer = self.engine.expected(group, sequence.index)
            assert sequence.output_token_ids == answer.token_ids[: sequence.num_output_tokens]
        self.forget_finished()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.blocks.reset_prefix_cache()

    # ---- steps, and what can go wrong in them -----------------------------------------------------------------------

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
            self.everything_is_in_order()

    @rule(count=st.sampled_from(range(5, 21)))
    def many_steps(self, count: int) -> None:
        self.steps(count)

    def step(self) -> None:
        batch = self.schedule()
        if not batch.is_empty:
            self.engine.commit(batch, self.engine.executor.execute(batch))
            self.forget_finished()

    @rule()
    def interrupted_step(self) -> None:
        batch = self.schedule()
        self.engine.executor.interrupt(batch)
        self.scheduler.preempt_all()
        self.last_batch_admitted = False
        assert self.scheduler.num_running == 0
        assert self.engine.blocks.num_free_blocks == self.engine.num_blocks

    @rule(which=PLACES)
    def step_with_a_failing_sequence(self, which: int) -> None:
        batch = self.schedule()
        if batch.is_empty:
            return
        failing = {which % len(batch.sequences)}
        rows = {sequence.row: sequence for sequence in self.scheduler.running}
        group = rows[batch.sequences[min(failing)].row].group
        was_forked = group.is_forked
        self.failed.add(group.request.request_id)
        self.engine.commit(batch, self.engine.executor.execute_one_by_one(batch, failing=failing))
        if not was_forked:  # the prompt failed, so all choices have
            assert group.is_finished
            assert {sequence.finish_reason for sequence in group.sequences} == {FinishReason.ERROR}
        self.forget_finished()

    @rule(which=PLACES)
    def step_with_a_failing_draw(self, which: int) -> None:
        batch = self.schedule()
        if batch.is_empty:
            return
        failing = {which % len(batch.draws)} if batch.draws else set()
        rows = {sequence.row: sequence for sequence in self.scheduler.running}
        self.failed.update(
            rows[batch.sequences[batch.draws[place].sequence].row].group.request.request_id for place in failing
        )
        changes = self.engine.commit(batch, self.engine.executor.execute(batch, failing_draws=failing))
        assert sum(change.error is not None for change in changes) == len(failing)
        self.forget_finished()

    # ---- what a batch must be -------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch:
        running_before = list(self.scheduler.running)
        num_waiting_before = self.scheduler.num_waiting
        first_event = len(self.engine.events)
        batch = self.scheduler.schedule()
        new_events = self.engine.events[first_event:]
        running = self.scheduler.running
        assert batch.is_empty == (not running_before and not num_waiting_before), "an idle step with work to do"
        if batch.block_copies:
            event("copy on write")
        if any(isinstance(one, events.Admitted) and one.shared_blocks for one in new_events):
            event("prefix cache hit")
        if any(isinstance(one, events.Admitted) and one.shared_blocks and one.is_resumed for one in new_events):
            event("resumed from the prefix cache")
        self.check_preemptions(running_before, new_events)
        self.check_limits(batch)
        by_row = {sequence.row: sequence for sequence in running}
        scheduled = [by_row[entry.row] for entry in batch.sequences]
        assert len(set(map(id, scheduled))) == len(scheduled)
        self.check_blocks(batch, scheduled)
        self.check_draws(batch, scheduled)
        self.check_who_advances(batch, scheduled, running_before)
        return batch

    def check_preemptions(self, running_before: list, new_events: list[events.Event]) -> None:
        preempted = [s for s in running_before if s.status is SequenceStatus.PREEMPTED]
        if preempted:
            event("preempted")
            if max(sequence.group.num_preemptions for sequence in preempted) >= 3:
                event("a request preempted three times")
            if any(sequence.index > 0 for sequence in preempted):
                event("a sibling preempted")
            if any(sequence.num_output_tokens == 0 for sequence in preempted):
                event("preempted before its first token")
            assert not any(isinstance(one, events.Admitted) for one in new_events), "admitted in a step that preempted"
            assert running_before[-len(preempted) :] == preempted, "the victims are the last ones"
            assert list(self.scheduler.running) == running_before[: -len(preempted)]

    def check_limits(self, batch: ScheduledBatch) -> None:
        config = self.engine.config
        if config.cache != "none":
            assert batch.num_tokens <= config.max_num_batched_tokens
        seats = sum(
            group.request.params.n
            - len(group.sequences)
            + sum(s.status is SequenceStatus.RUNNING for s in group.sequences)
            for group in {id(s.group): s.group for s in self.scheduler.running}.values()
        )
        assert seats <= config.max_num_seqs
        if config.scheduling == "sequential":
            assert len({id(sequence.group) for sequence in self.scheduler.running}) <= 1

    def check_blocks(self, batch: ScheduledBatch, scheduled: list) -> None:
        """Nothing runs without its blocks, and nobody writes where another one reads."""
        size, cache = self.engine.block_size, self.engine.blocks.prefix_cache
        holders = Counter(block for sequence in self.scheduler.running for block in sequence.block_table.blocks)
        for entry, sequence in zip(batch.sequences, scheduled, strict=True):
            blocks = sequence.block_table.blocks
            assert entry.start == sequence.num_computed_tokens
            assert len(blocks) * size >= sequence.num_tokens >= entry.end
            assert self.scheduler.table.block_tables[entry.row, : len(blocks)].tolist() == blocks
            assert self.scheduler.table.token_ids[entry.row, : sequence.num_tokens].tolist() == sequence.token_ids
            if self.engine.config.cache == "none":
                continue
            for block in blocks[entry.start // size : (entry.end - 1) // size + 1]:
                assert holders[block] == 1, "a shared block is written"
                assert cache is None or block not in cache, "a block is written that others can find"

    def check_draws(self, batch: ScheduledBatch, scheduled: list) -> None:
        """Tokens are drawn where the last known token is computed, for this sequence or for all siblings, else not."""
        for index, (entry, sequence) in enumerate(zip(batch.sequences, scheduled, strict=True)):
            drawn = [draw for draw in batch.draws if draw.sequence == index]
            request, expected = sequence.group.request, []
            if entry.end == sequence.num_tokens and request.max_tokens > 0:
                expected = [sequence.index] if sequence.group.is_forked else list(range(request.params.n))
            assert [draw.sample_index for draw in drawn] == expected
            assert all(draw.position == sequence.num_tokens for draw in drawn)

    def check_who_advances(self, batch: ScheduledBatch, scheduled: list, running_before: list) -> None:
        """The first one in policy order advances in every step; without chunks, at least in every second one."""
        if batch.is_empty:
            return
        admitted = [sequence for sequence in scheduled if sequence not in running_before]
        if self.engine.config.enable_chunked_prefill:
            assert self.scheduler.running[0] in scheduled
        elif admitted:
            assert not (running_before and self.last_batch_admitted), "decodes starve behind prefills"
        else:
            assert self.scheduler.running[0] in scheduled
        if not self.engine.config.enable_chunked_prefill:
            assert not admitted or admitted == scheduled, "prefills and decodes alternate"
            assert all(
                entry.end == sequence.num_tokens for entry, sequence in zip(batch.sequences, scheduled, strict=True)
            )
        self.last_batch_admitted = bool(admitted)

    # ---- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def everything_is_in_order(self) -> None:
        self.scheduler.check()
        self.check_pool()
        self.check_prefix_cache()
        self.check_queues()
        self.check_events()

    def check_pool(self) -> None:
        holders = Counter(block for sequence in self.scheduler.running for block in sequence.block_table.blocks)
        stats = self.engine.blocks.stats
        assert stats.used == len(holders)
        assert stats.used + stats.cached_free + stats.free == stats.total == self.engine.num_blocks
        assert stats.free >= 0
        assert self.engine.blocks.num_free_blocks == stats.free + stats.cached_free
        cache = self.engine.blocks.prefix_cache
        free_queue = list(self.engine.blocks._free)
        cached = [cache is not None and block in cache for block in free_queue]
        assert cached == sorted(cached), "blocks without known content come first in the free queue"

    def check_prefix_cache(self) -> None:
        """Every entry leads to a block whose slots hold the tokens, and the beginnings, that its key is made of."""
        cache, histories, size = self.engine.blocks.prefix_cache, self.engine.executor.histories, self.engine.block_size
        if cache is None:
            return
        keys: dict[int, bytes] = {}
        roots = {histories.root(salt): root_key(salt) for salt in (None, "a", "b")}

        def key_of(node: int) -> bytes:
            """The key of the text that ends at `node`, a block boundary, built from its tokens."""
            if node in roots:
                return roots[node]
            if node not in keys:
                tokens, parent = [], node
                for _ in range(size):
                    tokens.append(histories.token(parent))
                    parent = histories.parent(parent)
                keys[node] = block_key(key_of(parent), tokens[::-1])
            return keys[node]

        for block in range(self.engine.num_blocks):
            if block in cache:
                slots = self.engine.executor.slots[block * size : (block + 1) * size]
                assert slots[-1] >= 0, "a block that was not computed with success can be found"
                assert all(histories.parent(right) == left for left, right in pairwise(slots))
                assert cache.key_of(block) == key_of(slots[-1])
                assert cache.longest_prefix([key_of(slots[-1])]) == [block]
        assert cache.stats.hit_tokens <= cache.stats.queried_tokens

    def check_queues(self) -> None:
        running = list(self.scheduler.running)
        assert running == sorted(running, key=self.key)
        statuses = Counter(sequence.status for group in self.live for sequence in group.sequences)
        assert statuses[SequenceStatus.RUNNING] == len(running) == self.scheduler.num_running
        waiting = statuses[SequenceStatus.WAITING] + statuses[SequenceStatus.PREEMPTED]
        assert waiting == self.scheduler.num_waiting
        assert len({sequence.row for sequence in running}) == len(running)
        for group in self.live:
            for sequence in group.sequences:
                if sequence.status is SequenceStatus.RUNNING:
                    continue
                assert (sequence.row, sequence.block_table.blocks) == (-1, [])
                if sequence.status is not SequenceStatus.FINISHED:
                    assert sequence.num_computed_tokens == 0
            if group.num_cached_tokens is not None:
                assert group.num_cached_tokens < len(group.request.prompt_token_ids)

    def check_events(self) -> None:
        """A listener that only hears the events knows every block table."""
        tables = self.blocks_by_events
        for one in self.engine.events[self.num_events_seen :]:
            if isinstance(one, events.Admitted):
                tables[event_name(one)] = [*one.shared_blocks, *one.new_blocks]
            elif isinstance(one, events.Forked):
                tables[event_name(one)] = list(one.blocks)
            elif isinstance(one, events.BlocksAppended):
                table = tables[event_name(one)]
                if one.copy is not None:
                    table[table.index(one.copy.source)] = one.copy.target
                table += one.new_blocks
            elif isinstance(one, events.Preempted | events.Finished):
                assert tables.pop(event_name(one), []) == list(one.freed_blocks)
        self.num_events_seen = len(self.engine.events)
        assert tables == {name_of(sequence): sequence.block_table.blocks for sequence in self.scheduler.running}

    def forget_finished(self) -> None:
        for group in [group for group in self.live if group.is_finished]:
            self.live.remove(group)
            reasons = {sequence.finish_reason for sequence in group.sequences}
            if group.request.request_id in self.failed:
                assert FinishReason.ERROR in reasons or FinishReason.ABORT in reasons
            elif FinishReason.ABORT not in reasons:
                self.engine.check_answers(group)
            self.texts = [*self.texts[:2], *self.texts[-4:], list(group.sequences[-1].token_ids)]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.live:
                break
            self.step()
            self.everything_is_in_order()
        assert not self.live, "somebody never finishes"
        self.engine.check_all_free()


def event_name(
    one: events.Admitted | events.Forked | events.BlocksAppended | events.Preempted | events.Finished,
) -> str:
    return sibling_name(one.request_id, one.index)


SchedulerMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("MINI_VLLM_STATE_MACHINE_EXAMPLES", "500")),
    stateful_step_count=50,
    deadline=None,
    phases=[phase for phase in Phase if phase is not Phase.explain],  # it takes minutes where an example is long
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestScheduler = SchedulerMachine.TestCase
