"""The scheduler as a specification.

A step is written as what it computes: `a[0:5]` are positions 0 to 4 of request a, `a.1[5:6]` is position 5 of its
second choice. The token that follows a sequence's last known position is drawn in the same step.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted_executor import ScriptedEngine, name_of

from mini_vllm.cache.block_manager import BlockManager
from mini_vllm.config import EngineConfig
from mini_vllm.engine import events
from mini_vllm.engine.policy import FirstComeFirstServed, PriorityThenArrival, WaitingQueue, make_policy
from mini_vllm.engine.scheduler import Scheduler
from mini_vllm.engine.sequence import Sequence, SequenceGroup, SequenceStatus
from mini_vllm.errors import InvalidConfigError
from mini_vllm.outputs import FinishReason

A, B, C, D = ([1000 * letter + i for i in range(30)] for letter in range(1, 5))  # prompts that have nothing in common


def make_engine(
    budget: int = 100, *, num_blocks: int = 64, block_size: int = 4, max_model_len: int = 64, **options: object
) -> ScriptedEngine:
    return ScriptedEngine(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        options={"max_num_seqs": 8, "max_num_batched_tokens": budget, **options},
    )


def finish_reasons(engine: ScriptedEngine, request_id: str) -> list[FinishReason | None]:
    return [sequence.finish_reason for sequence in engine.groups[request_id].sequences]


# ---- the one rule: budget and order ----------------------------------------------------------------------------------


def test_a_request_is_prefilled_and_then_decoded_token_by_token() -> None:
    engine = make_engine()
    group = engine.add("a", A[:5], max_tokens=3)
    assert engine.run() == [["a[0:5]"], ["a[5:6]"], ["a[6:7]"]]
    engine.check_answers(group)
    engine.check_all_free()


def test_decodes_come_first_then_begun_prefills_then_admissions() -> None:
    engine = make_engine(budget=8)
    engine.add("a", A[:2], max_tokens=9)
    engine.add("b", B[:3], max_tokens=9)
    assert engine.step() == ["a[0:2]", "b[0:3]"]
    engine.add("c", C[:10])
    assert engine.step() == ["a[2:3]", "b[3:4]", "c[0:6]"]
    engine.add("d", D[:20])
    assert engine.step() == ["a[3:4]", "b[4:5]", "c[6:10]", "d[0:2]"]
    assert engine.step() == ["a[4:5]", "b[5:6]", "c[10:11]", "d[2:7]"]


def test_the_budget_is_used_to_the_full_and_never_exceeded() -> None:
    engine = make_engine(budget=7)
    engine.add("a", A[:10])
    engine.add("b", B[:10])
    assert [engine.step() for _ in range(3)] == [["a[0:7]"], ["a[7:10]", "b[0:4]"], ["a[10:11]", "b[4:10]"]]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 9, 10, 11])
def test_only_the_last_chunk_of_a_prompt_draws_a_token_and_the_answer_is_always_the_same(chunk: int) -> None:
    engine = make_engine(budget=chunk)
    group = engine.add("a", A[:10], max_tokens=2)
    for _ in range(-(-10 // chunk)):
        assert engine.streamed == {}
        engine.step()
    assert len(engine.streamed["a", 0]) == 1
    engine.run()
    engine.check_answers(group)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
def test_lengths_around_a_block_boundary_are_nothing_special(length: int) -> None:
    engine = make_engine(block_size=4)
    group = engine.add("a", A[:length], max_tokens=9)
    again = engine.add("b", A[:length], max_tokens=9)
    engine.run()
    engine.check_answers(group)
    engine.check_answers(again)
    engine.check_all_free()


def test_with_a_budget_of_one_the_oldest_goes_on_until_it_is_done() -> None:
    engine = make_engine(budget=1)
    engine.add("a", A[:3], max_tokens=2)
    engine.add("b", B[:2], max_tokens=1)
    assert engine.run() == [["a[0:1]"], ["a[1:2]"], ["a[2:3]"], ["a[3:4]"], ["b[0:1]"], ["b[1:2]"]]


def test_the_oldest_advances_even_where_decodes_could_take_the_whole_budget() -> None:
    engine = make_engine(budget=2, policy="priority")
    for name, prompt in (("b", B), ("c", C)):
        engine.add(name, prompt[:1], max_tokens=9)
    assert engine.step() == ["b[0:1]", "c[0:1]"]
    engine.add("a", A[:3], priority=-1)
    assert engine.step() == ["b[1:2]", "c[1:2]"]  # nothing is left to let it in
    engine.scheduler.abort(engine.groups["c"])
    assert engine.step() == ["b[2:3]", "a[0:1]"]
    engine.add("d", D[:1], max_tokens=9)
    assert engine.step() == ["a[1:2]", "b[3:4]"]  # now it is the first one, and leaves one token to each decode
    assert engine.step() == ["a[2:3]", "b[4:5]"]
    assert engine.step() == ["a[3:4]", "b[5:6]"]


def test_the_prefill_of_the_oldest_leaves_a_token_to_every_decode() -> None:
    engine = make_engine(budget=8, policy="priority")
    engine.add("b", B[:2], max_tokens=30)
    engine.add("c", C[:2], max_tokens=30)
    engine.step()
    engine.add("a", A[:20], priority=-1)
    assert engine.step() == ["b[2:3]", "c[2:3]", "a[0:6]"]
    assert engine.step() == ["a[6:12]", "b[3:4]", "c[3:4]"]
    assert engine.step() == ["a[12:18]", "b[4:5]", "c[4:5]"]


def test_a_stream_gets_a_token_in_every_step_under_a_flow_of_long_prompts() -> None:
    engine = make_engine(budget=8, num_blocks=200)
    engine.add("stream", A[:2], max_tokens=40)
    engine.step()
    for number in range(30):
        engine.add(f"long{number}", [*B[:29], number], max_tokens=1)
        assert engine.step()[0] == f"stream[{2 + number}:{3 + number}]"


def test_no_more_sequences_run_than_max_num_seqs() -> None:
    engine = make_engine(max_num_seqs=2)
    for name, prompt in (("a", A), ("b", B), ("c", C)):
        engine.add(name, prompt[:2], max_tokens=2)
    assert engine.run() == [["a[0:2]", "b[0:2]"], ["a[2:3]", "b[2:3]"], ["c[0:2]"], ["c[2:3]"]]


def test_a_place_freed_in_one_step_is_taken_in_the_next() -> None:
    engine = make_engine(max_num_seqs=2)
    engine.add("a", A[:2], max_tokens=1)
    engine.add("b", B[:2], max_tokens=3)
    engine.add("c", C[:2], max_tokens=1)
    assert engine.run() == [["a[0:2]", "b[0:2]"], ["b[2:3]", "c[0:2]"], ["b[3:4]"]]


def test_nothing_to_do_gives_an_empty_batch() -> None:
    engine = make_engine()
    batch = engine.scheduler.schedule()
    assert (batch.is_empty, batch.num_tokens) == (True, 0)


def test_a_request_waits_until_the_pool_has_blocks_for_its_whole_prompt() -> None:
    engine = make_engine(num_blocks=4, block_size=4, max_model_len=16)
    engine.add("a", A[:9], max_tokens=2)  # 3 of 4 blocks
    engine.add("b", B[:5], max_tokens=1)  # 2 blocks
    assert engine.run() == [["a[0:9]"], ["a[9:10]"], ["b[0:5]"]]


def test_the_first_in_the_queue_is_not_overtaken_by_one_that_would_fit() -> None:
    engine = make_engine(num_blocks=4, block_size=4, max_model_len=16)
    engine.add("a", A[:9], max_tokens=2)
    engine.add("b", B[:5], max_tokens=1)
    engine.add("c", C[:1], max_tokens=1)
    assert engine.run() == [["a[0:9]"], ["a[9:10]"], ["b[0:5]", "c[0:1]"]]


# ---- chunked prefill off ---------------------------------------------------------------------------------------------


def test_without_chunks_whole_prefills_and_decodes_alternate() -> None:
    engine = make_engine(budget=64, enable_chunked_prefill=False)
    engine.add("a", A[:20], max_tokens=4)
    assert engine.step() == ["a[0:20]"]
    engine.add("b", B[:30], max_tokens=4)
    engine.add("c", C[:30], max_tokens=4)
    engine.add("d", D[:30], max_tokens=4)
    assert engine.step() == ["a[20:21]"]
    assert engine.step() == ["b[0:30]", "c[0:30]"]
    assert engine.step() == ["a[21:22]", "b[30:31]", "c[30:31]"]
    assert engine.step() == ["d[0:30]"]
    assert engine.step() == ["a[22:23]", "b[31:32]", "c[31:32]", "d[30:31]"]


def test_without_chunks_a_prompt_that_is_too_long_for_what_is_left_waits_for_the_next_prefill() -> None:
    engine = make_engine(budget=64, max_model_len=60, enable_chunked_prefill=False)
    engine.add("a", A[:30] + B[:10], max_tokens=2)
    engine.add("b", C[:30], max_tokens=1)
    assert engine.run() == [["a[0:40]"], ["a[40:41]"], ["b[0:30]"]]


# ---- sequential, static, contiguous, no cache ------------------------------------------------------------------------


def test_sequential_scheduling_serves_one_request_at_a_time() -> None:
    engine = make_engine(scheduling="sequential")
    engine.add("a", A[:3], max_tokens=2)
    engine.add("b", B[:3], max_tokens=2)
    assert engine.run() == [["a[0:3]"], ["a[3:4]"], ["b[0:3]"], ["b[3:4]"]]


def test_sequential_scheduling_runs_the_siblings_of_one_request_together() -> None:
    engine = make_engine(scheduling="sequential")
    engine.add("a", A[:3], n=2, max_tokens=2)
    engine.add("b", B[:3], max_tokens=1)
    assert engine.run() == [["a[0:3]"], ["a[3:4]", "a.1[3:4]"], ["b[0:3]"]]


def test_a_static_batch_admits_nobody_until_all_its_members_have_finished() -> None:
    engine = make_engine(scheduling="static", max_num_seqs=2)
    engine.add("a", A[:3], max_tokens=1)
    engine.add("b", B[:3], max_tokens=3)
    engine.add("c", C[:3], max_tokens=1)
    engine.add("d", D[:3], max_tokens=1)
    assert engine.run() == [["a[0:3]", "b[0:3]"], ["b[3:4]"], ["b[4:5]"], ["c[0:3]", "d[0:3]"]]


def test_a_static_batch_goes_on_forming_while_only_the_budget_was_short() -> None:
    engine = make_engine(budget=4, scheduling="static")
    engine.add("a", A[:4], max_tokens=4)
    engine.add("b", B[:4], max_tokens=1)
    assert engine.step() == ["a[0:4]"]
    assert engine.step() == ["a[4:5]", "b[0:3]"]
    assert engine.step() == ["a[5:6]", "b[3:4]"]  # the queue is empty, and the doors close
    engine.add("c", C[:1], max_tokens=1)
    assert engine.run() == [["a[6:7]"], ["c[0:1]"]]


def test_a_preempted_member_comes_back_into_its_static_batch() -> None:
    engine = make_engine(num_blocks=4, block_size=2, max_model_len=8, scheduling="static", enable_prefix_caching=False)
    first = engine.add("a", A[:3], max_tokens=3)
    second = engine.add("b", B[:3], max_tokens=5)
    assert engine.step() == ["a[0:3]", "b[0:3]"]
    assert engine.step() == ["a[3:4]", "b[3:4]"]
    engine.add("c", C[:1], max_tokens=1)
    assert engine.run() == [["a[4:5]"], ["b[0:5]"], ["b[5:6]"], ["b[6:7]"], ["c[0:1]"]]
    assert second.num_preemptions == 1
    engine.check_answers(first)
    engine.check_answers(second)


def test_a_contiguous_cache_is_a_paged_one_whose_blocks_are_slots() -> None:
    engine = make_engine(cache="contiguous", num_blocks=2, max_model_len=16)
    engine.add("a", A[:3], max_tokens=2)
    engine.add("b", B[:3], max_tokens=1)
    engine.add("c", C[:3], max_tokens=1)
    assert engine.run() == [["a[0:3]", "b[0:3]"], ["a[3:4]", "c[0:3]"]]


def test_a_fork_of_a_contiguous_slot_copies_it_or_waits_for_a_free_one() -> None:
    engine = make_engine(cache="contiguous", num_blocks=2, max_model_len=16)
    group = engine.add("a", A[:3], n=3, max_tokens=3)
    assert engine.step() == ["a[0:3]"]
    assert engine.step() == ["a[3:4]", "a.1[3:4]"]  # a copies to the second slot, a.2 goes, a.1 keeps the first slot
    engine.run()
    assert group.num_preemptions == 1
    engine.check_answers(group)
    engine.check_all_free()


def test_without_a_cache_every_step_computes_all_tokens_and_the_budget_does_not_count() -> None:
    engine = make_engine(budget=2, cache="none", num_blocks=8, max_model_len=16)
    engine.add("a", A[:5], n=2, max_tokens=2)
    engine.add("b", B[:3], max_tokens=1)
    assert engine.run() == [["a[0:5]"], ["a[0:6]", "a.1[0:6]"], ["b[0:3]"]]


# ---- policies --------------------------------------------------------------------------------------------------------


def test_fcfs_admits_in_order_of_arrival_whatever_the_priority() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add("a", A[:2], max_tokens=1, priority=5)
    engine.add("b", B[:2], max_tokens=1, priority=0)
    assert engine.run() == [["a[0:2]"], ["b[0:2]"]]


def test_priority_admits_the_smallest_priority_first_and_equal_ones_in_order_of_arrival() -> None:
    engine = make_engine(max_num_seqs=1, policy="priority")
    for name, prompt, priority in (("a", A, 1), ("b", B, 0), ("c", C, 0), ("d", D, -3)):
        engine.add(name, prompt[:2], max_tokens=1, priority=priority)
    assert engine.run() == [["d[0:2]"], ["b[0:2]"], ["c[0:2]"], ["a[0:2]"]]


def test_a_policy_of_ones_own_is_named_by_module_and_class() -> None:
    engine = make_engine(max_num_seqs=1, policy="scripted_executor:ShortestPromptFirst")
    for name, prompt in (("a", A[:5]), ("b", B[:2]), ("c", C[:3])):
        engine.add(name, prompt, max_tokens=1)
    assert engine.run() == [["b[0:2]"], ["c[0:3]"], ["a[0:5]"]]


def test_the_built_in_policies_have_names() -> None:
    assert isinstance(make_policy("fcfs"), FirstComeFirstServed)
    assert isinstance(make_policy("priority"), PriorityThenArrival)


@pytest.mark.parametrize(
    "name",
    [
        *("lifo", "", ":", "no_such_module:Policy", "scripted_executor:Missing", ":Policy", "math:pi"),
        *("json:JSONEncoder", "asyncio:get_running_loop"),  # no policy; raises RuntimeError
    ],
)
def test_a_policy_that_cannot_be_loaded_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidConfigError, match="policy") as caught:
        make_policy(name)
    assert caught.value.field == "policy"


# ---- preemption ------------------------------------------------------------------------------------------------------


def tight_engine(**options: object) -> ScriptedEngine:
    """4 blocks of 2 tokens: two prompts of 3 fill the pool, and the first decode over a boundary finds it full."""
    return make_engine(num_blocks=4, block_size=2, max_model_len=8, enable_prefix_caching=False, **options)


def test_where_blocks_run_out_the_latest_goes_and_is_computed_again_with_all_its_tokens() -> None:
    engine = tight_engine()
    first = engine.add("a", A[:3], max_tokens=4)
    second = engine.add("b", B[:3], max_tokens=4)
    assert engine.run() == [
        ["a[0:3]", "b[0:3]"],
        ["a[3:4]", "b[3:4]"],  # both have 5 tokens now, and 4 blocks are all there is
        ["a[4:5]"],  # a takes a third block: b, the latest, is preempted
        ["a[5:6]"],
        ["b[0:5]"],  # prompt and the two tokens it had: the third token is new
        ["b[5:6]"],
    ]
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    engine.check_answers(first)
    engine.check_answers(second)
    engine.check_all_free()


def test_a_preempted_sequence_keeps_its_tokens_and_nothing_else() -> None:
    engine = tight_engine()
    engine.add("a", A[:3], max_tokens=4)
    second = engine.add("b", B[:3], max_tokens=4).sequences[0]
    for _ in range(3):
        engine.step()
    assert second.status is SequenceStatus.PREEMPTED
    assert (second.num_tokens, second.num_computed_tokens, second.block_table.blocks, second.row) == (5, 0, [], -1)
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 1)


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    engine = tight_engine(policy="priority")
    engine.add("a", A[:3], max_tokens=5)
    engine.add("b", B[:3], max_tokens=5, priority=1)
    engine.step()
    engine.step()
    engine.add("c", C[:1], max_tokens=1, priority=-1)
    assert engine.step() == ["a[4:5]"]  # b is preempted and leaves a block over, which would be enough for c
    assert engine.blocks.num_free_blocks == 1
    assert engine.step() == ["a[5:6]", "c[0:1]"]


def test_a_preempted_sequence_comes_back_before_those_that_arrived_after_it() -> None:
    engine = tight_engine()
    engine.add("a", A[:3], max_tokens=4)
    engine.add("b", B[:3], max_tokens=3)
    engine.step()
    engine.step()
    engine.add("c", C[:1], max_tokens=1)
    assert engine.run() == [["a[4:5]"], ["a[5:6]"], ["b[0:5]", "c[0:1]"]]


def test_victims_are_the_last_in_policy_order() -> None:
    engine = tight_engine(policy="priority")
    engine.add("a", A[:3], max_tokens=4, priority=1)
    engine.add("b", B[:3], max_tokens=4, priority=0)
    engine.step()
    engine.step()
    assert engine.step() == ["b[4:5]"]
    assert engine.groups["a"].num_preemptions == 1


def test_as_many_are_preempted_as_are_needed_and_no_more() -> None:
    engine = make_engine(num_blocks=6, block_size=2, max_model_len=12, enable_prefix_caching=False)
    for name, prompt in (("a", A), ("b", B), ("c", C)):
        engine.add(name, prompt[:3], max_tokens=6)
    engine.step()
    engine.step()
    assert engine.step() == ["a[4:5]", "b[4:5]"]  # c's two blocks are enough for both
    assert [engine.groups[name].num_preemptions for name in "abc"] == [0, 0, 1]


def test_a_sequence_in_the_middle_of_its_prefill_can_be_preempted_and_starts_again() -> None:
    engine = make_engine(budget=4, num_blocks=5, block_size=2, max_model_len=10, enable_prefix_caching=False)
    engine.add("a", A[:2], max_tokens=6)
    group = engine.add("b", B[:7], max_tokens=1)  # 4 blocks
    assert engine.step() == ["a[0:2]", "b[0:2]"]
    assert engine.step() == ["a[2:3]"]  # a grows: b goes, and gets nothing in this step
    assert group.sequences[0].num_computed_tokens == 0
    engine.run()
    engine.check_answers(group)
    assert engine.streamed["b", 0] == engine.expected(group, 0).token_ids


def test_the_oldest_is_never_preempted() -> None:
    engine = make_engine(num_blocks=8, block_size=1, max_model_len=8, enable_prefix_caching=False)
    for name, prompt in (("a", A), ("b", B), ("c", C), ("d", D)):
        engine.add(name, prompt[:2], max_tokens=6)
    engine.run()
    assert engine.groups["a"].num_preemptions == 0
    assert sum(engine.groups[name].num_preemptions for name in "bcd") >= 3
    for group in engine.groups.values():
        engine.check_answers(group)


def test_a_single_request_may_fill_the_whole_pool() -> None:
    engine = make_engine(num_blocks=2, block_size=4, max_model_len=8)
    group = engine.add("a", A[:7], max_tokens=1)
    other = engine.add("b", B[:1], max_tokens=7)
    engine.run()
    engine.check_answers(group)
    engine.check_answers(other)
    assert group.num_preemptions == other.num_preemptions == 0


def test_with_a_prefix_cache_a_preempted_sequence_takes_back_what_is_still_there() -> None:
    engine = make_engine(num_blocks=4, block_size=2, max_model_len=8)
    engine.add("a", A[:3], max_tokens=2)
    engine.add("b", B[:3], max_tokens=4)
    engine.step()
    engine.scheduler.preempt_all()
    assert engine.step() == ["a[2:4]", "b[2:4]"]


# ---- n > 1 -----------------------------------------------------------------------------------------------------------


def test_siblings_share_the_prompt_and_copy_only_the_block_they_write() -> None:
    engine = make_engine(block_size=4)
    group = engine.add("a", A[:6], n=3, max_tokens=2)
    assert engine.step() == ["a[0:6]"]
    tables = [sequence.block_table.blocks for sequence in group.sequences]
    assert tables[0] == tables[1] == tables[2]
    assert engine.blocks.stats.used == 2
    batch = engine.scheduler.schedule()
    assert [(copy.source, copy.target) for copy in batch.block_copies] == [(1, 2), (1, 3)]
    assert [sequence.block_table.blocks for sequence in group.sequences] == [[0, 2], [0, 3], [0, 1]]
    engine.commit(batch, engine.executor.execute(batch))
    engine.check_answers(group)
    engine.check_all_free()


def test_a_prompt_of_n_is_computed_once_and_its_last_token_draws_for_all() -> None:
    engine = make_engine()
    engine.add("a", A[:5], n=3, max_tokens=2)
    batch = engine.scheduler.schedule()
    assert engine.describe(batch) == ["a[0:5]"]
    assert [(draw.sequence, draw.sample_index, draw.position) for draw in batch.draws] == [
        (0, 0, 5),
        (0, 1, 5),
        (0, 2, 5),
    ]
    engine.commit(batch, engine.executor.execute(batch))
    batch = engine.scheduler.schedule()
    assert [(draw.sequence, draw.sample_index, draw.position) for draw in batch.draws] == [
        (0, 0, 6),
        (1, 1, 6),
        (2, 2, 6),
    ]


def test_a_request_of_n_needs_n_places_before_it_starts() -> None:
    engine = make_engine(max_num_seqs=3)
    engine.add("a", A[:2], max_tokens=2)
    engine.add("b", B[:2], n=3, max_tokens=2)
    engine.add("c", C[:2], max_tokens=1)  # one place is free, but b is before it
    assert engine.run() == [["a[0:2]"], ["a[2:3]"], ["b[0:2]"], ["b[2:3]", "b.1[2:3]", "b.2[2:3]"], ["c[0:2]"]]


def test_places_of_siblings_are_kept_while_the_prompt_is_computed() -> None:
    engine = make_engine(budget=2, max_num_seqs=3)
    engine.add("a", A[:4], n=3, max_tokens=1)
    engine.add("b", B[:1], max_tokens=1)
    assert engine.run() == [["a[0:2]"], ["a[2:4]"], ["b[0:1]"]]


def test_a_sibling_that_ends_leaves_its_place_to_others() -> None:
    engine = make_engine(max_num_seqs=3)
    group = engine.add("a", A[:2], n=3, max_tokens=5)
    engine.step()
    group.sequences[1].finish_reason = FinishReason.STOP  # as a stop string does
    engine.scheduler.finish([group.sequences[1]])
    engine.add("b", B[:2], max_tokens=1)
    assert engine.step() == ["a[2:3]", "a.2[2:3]", "b[0:2]"]


def test_siblings_are_preempted_singly_the_last_first_and_all_come_to_their_ends() -> None:
    engine = make_engine(num_blocks=5, block_size=2, max_model_len=10, enable_prefix_caching=False)
    group = engine.add("a", A[:4], n=4, max_tokens=6)
    engine.run()
    victims = [(event.request_id, event.index) for event in engine.events if isinstance(event, events.Preempted)]
    assert victims[0] == ("a", 3)
    assert ("a", 0) not in victims
    engine.check_answers(group)
    engine.check_all_free()


# ---- the prefix cache ------------------------------------------------------------------------------------------------


def test_a_second_request_computes_only_what_is_not_cached() -> None:
    engine = make_engine(block_size=4)
    first = engine.add("a", A[:10], max_tokens=1)
    engine.run()
    second = engine.add("b", [*A[:10], 7, 7], max_tokens=1)
    assert engine.run() == [["b[8:12]"]]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    engine.check_answers(second)


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
@pytest.mark.parametrize("n", [1, 2])
def test_the_same_prompt_again_computes_at_least_its_last_token(length: int, cached: int, n: int) -> None:
    engine = make_engine(block_size=4)
    engine.add("a", A[:length], max_tokens=1)
    engine.run()
    again = engine.add("b", A[:length], n=n, max_tokens=3)
    assert engine.step() == [f"b[{cached}:{length}]"]
    engine.run()
    assert again.num_cached_tokens == cached
    engine.check_answers(again)
    engine.check_all_free()


def test_two_equal_prompts_in_one_step_are_both_right_and_a_third_one_hits() -> None:
    engine = make_engine(block_size=4)
    groups = [engine.add(name, A[:8], max_tokens=4) for name in "ab"]
    assert engine.step() == ["a[0:8]", "b[0:8]"]
    groups.append(engine.add("c", A[:8], max_tokens=4))
    assert engine.step() == ["a[8:9]", "b[8:9]", "c[4:8]"]
    engine.run()
    for group in groups:
        engine.check_answers(group)
    engine.check_all_free()


def test_the_tokens_of_an_answer_can_be_hit_too() -> None:
    engine = make_engine(block_size=4)
    engine.add("a", A[:6], max_tokens=7)
    engine.run()
    conversation = engine.groups["a"].sequences[0].token_ids
    assert len(conversation) == 13  # the last token was drawn and never computed
    engine.add("b", [*conversation, 5], max_tokens=1)
    assert engine.run() == [["b[12:14]"]]


@pytest.mark.parametrize(("salt", "cached"), [("x", 8), ("y", 0), (None, 0)])
def test_only_requests_of_the_same_salt_share(salt: str | None, cached: int) -> None:
    engine = make_engine(block_size=4)
    engine.add("a", A[:10], max_tokens=1, cache_salt="x")
    engine.run()
    group = engine.add("b", A[:10], max_tokens=1, cache_salt=salt)
    engine.run()
    assert group.num_cached_tokens == cached


def test_a_chunk_is_shared_as_soon_as_it_is_computed_and_not_before() -> None:
    engine = make_engine(budget=8, block_size=4)
    engine.add("a", A[:16], max_tokens=1)
    batch = engine.scheduler.schedule()  # a has its blocks, but nothing is in them
    assert engine.blocks.cached_prefix(engine.groups["a"].sequences[0].block_table, A[:16]) == []
    engine.commit(batch, engine.executor.execute(batch))
    assert len(engine.blocks.cached_prefix(engine.groups["a"].sequences[0].block_table, A[:16])) == 2


def test_a_reset_while_requests_run_changes_no_answer() -> None:
    engine = make_engine(block_size=2)
    first = engine.add("a", A[:8], max_tokens=8)
    engine.step()
    engine.blocks.reset_prefix_cache()
    second = engine.add("b", A[:8], max_tokens=4)
    engine.run()
    assert second.num_cached_tokens == 0
    engine.check_answers(first)
    engine.check_answers(second)


def test_hits_are_counted_in_tokens() -> None:
    engine = make_engine(block_size=4)
    for name in "abc":
        engine.add(name, A[:10], max_tokens=1)
        engine.run()
    stats = engine.blocks.prefix_cache.stats
    assert (stats.queried_tokens, stats.hit_tokens) == (30, 16)


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_the_request_and_is_part_of_it() -> None:
    engine = make_engine()
    probe = engine.add("probe", A[:3], max_tokens=3)
    engine.run()
    tokens = probe.sequences[0].output_token_ids
    group = engine.add("a", A[:3], max_tokens=3, stop_token_ids=[tokens[1]])
    engine.run()
    assert group.sequences[0].output_token_ids == tokens[:2]
    assert finish_reasons(engine, "a") == [FinishReason.STOP]


def test_min_tokens_holds_a_stop_token_back() -> None:
    engine = make_engine()
    probe = engine.add("probe", A[:3], max_tokens=4)
    engine.run()
    tokens = probe.sequences[0].output_token_ids
    group = engine.add("a", A[:3], max_tokens=4, stop_token_ids=tokens[:3], min_tokens=2)
    engine.run()
    assert group.sequences[0].output_token_ids == tokens[:3]


def test_a_request_ended_from_outside_is_not_computed_any_more() -> None:
    engine = make_engine()
    engine.stop_strings["a"] = tuple(engine.expected(engine.add("a", A[:3], max_tokens=9), 0).token_ids[1:3])
    assert engine.run() == [["a[0:3]"], ["a[3:4]"], ["a[4:5]"]]
    engine.check_all_free()


# ---- max_tokens 0 and prompt logprobs --------------------------------------------------------------------------------


def test_no_tokens_wanted_means_no_draw_and_an_end_with_length() -> None:
    engine = make_engine()
    group = engine.add("a", A[:5], max_tokens=0, prompt_logprobs=0)
    batch = engine.scheduler.schedule()
    assert (engine.describe(batch), batch.draws) == (["a[0:5]"], [])
    engine.commit(batch, engine.executor.execute(batch))
    engine.check_answers(group)
    assert finish_reasons(engine, "a") == [FinishReason.LENGTH]
    engine.check_all_free()


def test_no_tokens_wanted_of_n_gives_n_empty_choices() -> None:
    engine = make_engine()
    group = engine.add("a", A[:5], n=3, max_tokens=0, prompt_logprobs=0)
    engine.run()
    engine.check_answers(group)
    assert finish_reasons(engine, "a") == [FinishReason.LENGTH] * 3
    engine.check_all_free()


def test_prompt_logprobs_have_no_entry_for_the_first_token_and_none_for_the_answer() -> None:
    engine = make_engine()
    engine.add("a", A[:5], max_tokens=3, prompt_logprobs=1)
    engine.add("b", B[:1], max_tokens=3, prompt_logprobs=1)
    batch = engine.scheduler.schedule()
    assert [(span.sequence, span.start, span.end, span.num_logprobs) for span in batch.prompt_logprobs] == [
        (0, 0, 4, 1)
    ]
    engine.commit(batch, engine.executor.execute(batch))
    assert engine.scheduler.schedule().prompt_logprobs == []
    assert len(engine.groups["a"].prompt_logprobs) == 5
    assert engine.groups["b"].prompt_logprobs == [None]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 9, 10, 11])
def test_prompt_logprobs_of_chunks_join_without_gap_or_repeat(chunk: int) -> None:
    engine = make_engine(budget=chunk)
    group = engine.add("a", A[:10], max_tokens=2, prompt_logprobs=0)
    engine.run()
    engine.check_answers(group)


def test_a_request_for_prompt_logprobs_reads_nothing_from_the_prefix_cache_but_fills_it() -> None:
    engine = make_engine(block_size=4)
    engine.add("a", A[:10], max_tokens=1)
    engine.run()
    group = engine.add("b", A[:10], max_tokens=1, prompt_logprobs=0)
    assert engine.run() == [["b[0:10]"]]
    assert group.num_cached_tokens == 0
    engine.blocks.reset_prefix_cache()
    engine.add("c", A[:10], max_tokens=1, prompt_logprobs=0)
    engine.run()
    assert engine.add("d", A[:10], max_tokens=1) and engine.run() == [["d[8:10]"]]


def test_prompt_logprobs_go_on_after_a_preemption_in_the_middle_of_the_prompt() -> None:
    engine = make_engine(budget=4, block_size=4)
    group = engine.add("a", A[:10], max_tokens=2, prompt_logprobs=0)
    engine.step()
    engine.step()
    assert len(group.prompt_logprobs) == 9
    engine.scheduler.preempt_all()
    spans = []
    while engine.scheduler.num_waiting or engine.scheduler.num_running:
        batch = engine.scheduler.schedule()
        spans += [(span.start, span.end) for span in batch.prompt_logprobs]
        engine.commit(batch, engine.executor.execute(batch))
    assert spans == [(8, 9)]
    engine.check_answers(group)


def test_once_its_prompt_logprobs_are_there_a_preempted_request_reads_the_prefix_cache() -> None:
    engine = make_engine(block_size=4)
    group = engine.add("a", A[:10], max_tokens=3, prompt_logprobs=0)
    engine.step()
    engine.scheduler.preempt_all()
    assert engine.step() == ["a[8:11]"]
    engine.run()
    engine.check_answers(group)


# ---- abort -----------------------------------------------------------------------------------------------------------


def test_aborting_a_waiting_request_takes_it_out_of_the_queue() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add("a", A[:2], max_tokens=2)
    engine.add("b", B[:2], n=1, max_tokens=1)
    engine.add("c", C[:2], max_tokens=1)
    engine.step()
    engine.scheduler.abort(engine.groups["b"])
    assert engine.scheduler.num_waiting == 1
    assert engine.run() == [["a[2:3]"], ["c[0:2]"]]
    assert finish_reasons(engine, "b") == [FinishReason.ABORT]


def test_aborting_in_the_middle_of_a_prefill_frees_its_blocks_before_the_next_step() -> None:
    engine = make_engine(budget=4, num_blocks=5, block_size=2, max_model_len=10)
    engine.add("a", A[:9], max_tokens=1)
    engine.add("b", B[:9], max_tokens=1)
    engine.step()
    engine.scheduler.abort(engine.groups["a"])
    assert engine.blocks.num_free_blocks == 5
    assert engine.step() == ["b[0:4]"]


def test_aborting_before_the_fork_ends_all_n_choices() -> None:
    for steps in (0, 1):  # waiting, and in the middle of the prefill
        engine = make_engine(budget=4, max_num_seqs=3)
        group = engine.add("a", A[:9], n=3)
        for _ in range(steps):
            engine.step()
        engine.scheduler.abort(group)
        assert finish_reasons(engine, "a") == [FinishReason.ABORT] * 3
        assert group.is_finished
        engine.check_all_free()
        engine.add("b", B[:2], n=3, max_tokens=1)
        assert engine.run() == [["b[0:2]"]]  # all three places are free again


def test_aborting_a_running_request_ends_its_unfinished_choices_only() -> None:
    engine = make_engine()
    group = engine.add("a", A[:2], n=2, max_tokens=9)
    engine.step()
    group.sequences[0].finish_reason = FinishReason.STOP
    engine.scheduler.finish([group.sequences[0]])
    engine.step()
    engine.scheduler.abort(group)
    assert finish_reasons(engine, "a") == [FinishReason.STOP, FinishReason.ABORT]
    engine.check_all_free()


def test_aborting_a_preempted_request_takes_it_out_of_the_queue() -> None:
    engine = tight_engine()
    engine.add("a", A[:3], max_tokens=4)
    engine.add("b", B[:3], max_tokens=4)
    for _ in range(3):
        engine.step()
    engine.scheduler.abort(engine.groups["b"])
    assert engine.scheduler.num_waiting == 0
    assert engine.run() == [["a[5:6]"]]


def test_aborting_a_finished_request_changes_nothing() -> None:
    engine = make_engine()
    group = engine.add("a", A[:2], max_tokens=1)
    engine.run()
    num_events = len(engine.events)
    engine.scheduler.abort(group)
    assert finish_reasons(engine, "a") == [FinishReason.LENGTH]
    assert len(engine.events) == num_events


# ---- what the worker reports as failed -------------------------------------------------------------------------------


def test_a_draw_that_fails_ends_that_choice_alone() -> None:
    engine = make_engine()
    group = engine.add("a", A[:3], n=3, max_tokens=2)
    engine.step(failing_draws=["a.1"])
    assert finish_reasons(engine, "a") == [None, FinishReason.ERROR, None]
    engine.run()
    assert finish_reasons(engine, "a") == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    assert group.sequences[1].output_token_ids == []
    for index in (0, 2):
        assert group.sequences[index].output_token_ids == engine.expected(group, index).token_ids
    engine.check_all_free()


def test_a_failed_draw_is_reported_with_its_reason_and_without_tokens() -> None:
    engine = make_engine()
    engine.add("a", A[:3])
    batch = engine.scheduler.schedule()
    (change,) = engine.commit(batch, engine.executor.execute(batch, failing_draws=[0]))
    assert (change.num_new_tokens, change.error) == (0, "scripted failure")


def test_a_failed_sequence_leaves_the_others_alone() -> None:
    engine = make_engine()
    engine.add("a", A[:3], max_tokens=3)
    other = engine.add("b", B[:3], max_tokens=3)
    engine.step()
    engine.step(failing=["a"])
    assert finish_reasons(engine, "a") == [FinishReason.ERROR]
    engine.run()
    engine.check_answers(other)
    engine.check_all_free()


@pytest.mark.parametrize("budget", [4, 100])
def test_a_prompt_that_fails_ends_all_n_choices_and_frees_their_places(budget: int) -> None:
    engine = make_engine(budget=budget, max_num_seqs=3)
    group = engine.add("a", A[:9], n=3)
    engine.step(failing=["a"])
    assert finish_reasons(engine, "a") == [FinishReason.ERROR] * 3
    assert group.is_finished
    engine.check_all_free()
    engine.add("b", B[:2], n=3, max_tokens=1)
    assert engine.run() == [["b[0:2]"]]


def test_what_a_failed_sequence_has_computed_is_found_by_nobody() -> None:
    engine = make_engine(budget=8, block_size=4)
    engine.add("a", A[:20], max_tokens=1)
    engine.step()
    engine.step(failing=["a"])
    group = engine.add("b", A[:20], max_tokens=1)
    engine.run()
    assert group.num_cached_tokens == 0
    engine.check_answers(group)


# ---- interrupted steps -----------------------------------------------------------------------------------------------


def test_after_an_interrupted_step_everybody_waits_and_no_block_is_held() -> None:
    engine = make_engine(budget=8, block_size=4)
    groups = [engine.add("a", A[:6], n=2, max_tokens=4), engine.add("b", B[:12], max_tokens=4)]
    engine.step()
    engine.executor.interrupt(engine.scheduler.schedule())
    engine.scheduler.preempt_all()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (0, 3)
    assert engine.blocks.num_free_blocks == 64
    engine.scheduler.check()
    engine.run()
    for group in groups:
        engine.check_answers(group)
    engine.check_all_free()


def test_requests_can_be_aborted_after_an_interrupted_step() -> None:
    engine = make_engine(max_num_seqs=3)
    group = engine.add("a", A[:6], n=3)
    engine.executor.interrupt(engine.scheduler.schedule())
    engine.scheduler.preempt_all()
    engine.scheduler.abort(group)
    assert finish_reasons(engine, "a") == [FinishReason.ABORT] * 3
    engine.check_all_free()


# ---- cost ------------------------------------------------------------------------------------------------------------


class CountingPolicy(FirstComeFirstServed):
    """Counts how often anybody's place in the order is asked for."""

    num_calls = 0

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        CountingPolicy.num_calls += 1
        return super().key(sequence)


def operations_of_20_steps(num_waiting: int) -> int:
    engine = make_engine(max_num_seqs=4, num_blocks=64, policy="test_scheduler:CountingPolicy")
    engine.events.clear()
    for name, prompt in (("a", A), ("b", B), ("c", C), ("d", D)):
        engine.add(name, prompt[:3], max_tokens=30)
    last = engine.groups["d"].request
    for number in range(num_waiting):
        request = replace(last, request_id=f"waiting{number}", arrival_index=last.arrival_index + 1 + number)
        engine.scheduler.add(SequenceGroup(request))
    CountingPolicy.num_calls = 0
    for _ in range(20):
        assert len(engine.step()) == 4
    return CountingPolicy.num_calls


def test_a_step_costs_the_same_with_100_000_waiting_as_with_none() -> None:
    assert operations_of_20_steps(100_000) == operations_of_20_steps(0)


def test_aborting_half_of_a_long_queue_leaves_no_dead_entries_behind() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.scheduler._debug_checks = False
    for number in range(2000):
        engine.add(f"r{number}", [1], max_tokens=1)
    for number in range(0, 2000, 2):
        engine.scheduler.abort(engine.groups[f"r{number}"])
    for number in range(1, 1900, 2):
        engine.scheduler.abort(engine.groups[f"r{number}"])
    assert engine.scheduler.num_waiting == 50
    assert len(engine.scheduler._waiting._heap) <= 100
    assert [step[0].split("[")[0] for step in engine.run()] == [f"r{number}" for number in range(1901, 2000, 2)]


def test_the_waiting_queue_gives_the_smallest_key_first_and_skips_the_finished() -> None:
    engine = make_engine()
    sequences = [engine.add(name, A[:2]).sequences[0] for name in "abc"]
    queue = WaitingQueue(FirstComeFirstServed())
    for sequence in reversed(sequences):
        queue.push(sequence)
    sequences[0].status = SequenceStatus.FINISHED
    queue.note_finished()
    assert len(queue) == 2
    assert [name_of(queue.pop()) for _ in range(2) if queue.peek()] == ["b", "c"]
    assert queue.peek() is None
    assert len(queue) == 0


# ---- figures, events, checks -----------------------------------------------------------------------------------------


def test_wasted_slots_are_those_allocated_and_still_empty() -> None:
    engine = make_engine(budget=4, block_size=4)
    engine.add("a", A[:9], max_tokens=5)
    engine.step()
    assert engine.scheduler.num_wasted_slots == 12 - 4
    engine.step()
    engine.step()
    assert engine.scheduler.num_wasted_slots == 12 - 9


def test_events_tell_the_life_of_a_request() -> None:
    engine = make_engine(block_size=2)
    engine.add("a", A[:3], n=2, max_tokens=2)
    engine.run()
    lived = [event for event in engine.events if getattr(event, "request_id", None) == "a"]
    kinds = [type(event).__name__ for event in lived]
    assert kinds == ["Queued", "Admitted", "Forked", "BlocksAppended", "Finished", "Finished"]
    admitted, forked, appended = lived[1:4]
    assert (admitted.shared_blocks, admitted.new_blocks, admitted.is_resumed) == ((), (0, 1), False)
    assert forked.blocks == (0, 1)
    assert (appended.new_blocks, appended.copy.source, appended.copy.target) == ((), 1, 2)


def test_a_scheduler_without_settled_limits_is_refused() -> None:
    with pytest.raises(RuntimeError, match="with_model_limits"):
        Scheduler(EngineConfig(), BlockManager(4, 4, enable_prefix_caching=True))


def test_check_sees_a_place_that_was_counted_wrongly() -> None:
    engine = make_engine()
    engine.add("a", A[:3])
    engine.step()
    engine.scheduler._running._num_taken += 1
    with pytest.raises(RuntimeError, match="seats"):
        engine.scheduler.check()
