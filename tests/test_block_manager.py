"""The block manager as a specification: allocate, append, fork, free, copy on write, order of eviction, hard cases.

Blocks are numbers here; that they hold the right keys and values is shown by `test_scheduler_state_machine.py`.
"""

from __future__ import annotations

import pytest

from mini_vllm.cache.block_manager import BlockCopy, BlockManager, BlockStats, BlockTable
from mini_vllm.cache.prefix_cache import root_key


def make_manager(num_blocks: int = 8, block_size: int = 4, *, prefix_cache: bool = True) -> BlockManager:
    return BlockManager(num_blocks, block_size, enable_prefix_caching=prefix_cache)


def admit(manager: BlockManager, tokens: list[int], salt: str | None = None) -> BlockTable:
    """What the scheduler does when it lets a sequence in, and its prefill then succeeds."""
    table = BlockTable(root=root_key(salt))
    prefix = manager.cached_prefix(table, tokens)
    assert manager.can_allocate(len(tokens), prefix)
    manager.allocate(table, len(tokens), prefix)
    manager.publish(table, tokens, len(tokens))
    return table


def text(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


# ---- allocate and free -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (7, 2), (8, 2), (9, 3)])
def test_a_sequence_gets_as_many_blocks_as_its_tokens_need(num_tokens: int, num_blocks: int) -> None:
    manager, table = make_manager(block_size=4), BlockTable()
    manager.allocate(table, num_tokens)
    assert manager.blocks_for(num_tokens) == num_blocks
    assert len(table.blocks) == num_blocks
    assert manager.num_free_blocks == 8 - num_blocks
    manager.check([table])


def test_a_new_pool_hands_out_its_blocks_in_order() -> None:
    manager, first, second = make_manager(), BlockTable(), BlockTable()
    manager.allocate(first, 6)
    manager.allocate(second, 9)
    assert (first.blocks, second.blocks) == ([0, 1], [2, 3, 4])


def test_can_allocate_is_true_up_to_the_last_free_block_and_no_further() -> None:
    manager, table = make_manager(num_blocks=3, block_size=4), BlockTable()
    assert manager.can_allocate(12)
    assert not manager.can_allocate(13)
    manager.allocate(table, 5)
    assert manager.can_allocate(4)
    assert not manager.can_allocate(5)


def test_free_gives_every_block_back_and_leaves_the_table_ready_for_use() -> None:
    manager, table = make_manager(), BlockTable()
    manager.allocate(table, 20)
    manager.free(table)
    assert (table.blocks, table.num_published, manager.num_free_blocks) == ([], 0, 8)
    manager.allocate(table, 32)
    assert sorted(table.blocks) == list(range(8))
    manager.check([table])


def test_check_sees_a_block_that_a_table_holds_without_having_been_given_it() -> None:
    manager, table = make_manager(), BlockTable()
    manager.allocate(table, 4)
    with pytest.raises(RuntimeError, match="reference counts"):
        manager.check([table, BlockTable(blocks=[0])])


def test_check_sees_a_block_that_nobody_holds_any_more() -> None:
    manager, table = make_manager(), BlockTable()
    manager.allocate(table, 4)
    with pytest.raises(RuntimeError, match="reference counts"):
        manager.check([])


# ---- append ----------------------------------------------------------------------------------------------------------


def test_a_decode_takes_a_block_only_when_it_crosses_a_boundary() -> None:
    manager, table = make_manager(block_size=4), BlockTable()
    manager.allocate(table, 3)
    grown = []
    for num_tokens in range(4, 10):
        assert manager.append(table, num_tokens, write_from=num_tokens - 1) is None
        grown.append(len(table.blocks))
    assert grown == [1, 2, 2, 2, 2, 3]


def test_with_blocks_of_one_token_every_decode_takes_a_block() -> None:
    manager, table = make_manager(block_size=1), BlockTable()
    manager.allocate(table, 2)
    for num_tokens in range(3, 6):
        manager.append(table, num_tokens, write_from=num_tokens - 1)
        assert len(table.blocks) == num_tokens


def test_can_append_needs_a_free_block_only_at_a_boundary() -> None:
    manager, table = make_manager(num_blocks=1, block_size=4), BlockTable()
    manager.allocate(table, 3)
    assert manager.num_free_blocks == 0
    assert manager.can_append(table, 4, write_from=3)
    assert not manager.can_append(table, 5, write_from=4)


def test_there_is_room_until_a_boundary_and_in_no_shared_block() -> None:
    manager, table = make_manager(block_size=4), BlockTable()
    manager.allocate(table, 3)
    assert manager.has_room(table, 4, write_from=3)
    assert not manager.has_room(table, 5, write_from=4)
    sibling = manager.fork(table)
    assert not manager.has_room(table, 4, write_from=3)
    manager.free(sibling)
    assert manager.has_room(table, 4, write_from=3)


# ---- fork and copy on write ------------------------------------------------------------------------------------------


def test_a_fork_shares_all_blocks_and_takes_none() -> None:
    manager, table = make_manager(), BlockTable()
    manager.allocate(table, 6)
    sibling = manager.fork(table)
    assert sibling.blocks == table.blocks
    assert manager.num_free_blocks == 6
    manager.check([table, sibling])


def test_the_first_who_writes_into_a_shared_block_gets_a_copy_and_the_last_keeps_the_block() -> None:
    manager, first = make_manager(block_size=4), BlockTable()
    manager.allocate(first, 6)  # blocks 0 and 1; token 6 goes into block 1
    second, third = manager.fork(first), manager.fork(first)
    assert manager.append(first, 7, write_from=6) == BlockCopy(source=1, target=2)
    assert manager.append(second, 7, write_from=6) == BlockCopy(source=1, target=3)
    assert manager.append(third, 7, write_from=6) is None
    assert [first.blocks, second.blocks, third.blocks] == [[0, 2], [0, 3], [0, 1]]
    manager.check([first, second, third])


def test_siblings_copy_nothing_where_the_prompt_ends_at_a_block_boundary() -> None:
    manager, first = make_manager(block_size=4), BlockTable()
    manager.allocate(first, 8)
    second = manager.fork(first)
    assert manager.append(first, 9, write_from=8) is None
    assert manager.append(second, 9, write_from=8) is None
    assert (first.blocks, second.blocks) == ([0, 1, 2], [0, 1, 3])


def test_a_copy_counts_as_a_block_that_is_needed() -> None:
    manager, first = make_manager(num_blocks=1, block_size=4), BlockTable()
    manager.allocate(first, 2)
    second = manager.fork(first)
    assert not manager.can_append(first, 3, write_from=2)
    manager.free(second)
    assert manager.can_append(first, 3, write_from=2)


def test_a_shared_block_becomes_free_with_its_last_owner() -> None:
    manager, first = make_manager(block_size=4), BlockTable()
    manager.allocate(first, 6)
    second = manager.fork(first)
    manager.free(first)
    assert manager.num_free_blocks == 6
    manager.check([second])
    manager.free(second)
    assert manager.num_free_blocks == 8
    manager.check([])


def test_a_fork_knows_the_keys_of_the_shared_prompt_and_grows_its_own() -> None:
    manager = make_manager(block_size=2)
    first = admit(manager, [1, 2, 3])
    second = manager.fork(first)
    for table, token in ((first, 8), (second, 9)):
        manager.append(table, 4, write_from=3)
        manager.publish(table, [1, 2, 3, token], 4)
    assert first.keys[0] == second.keys[0]
    assert first.keys[1] != second.keys[1]
    manager.free(first)
    manager.free(second)
    assert manager.cached_prefix(BlockTable(), [1, 2, 3, 9, 0]) == [0, 1]
    assert manager.cached_prefix(BlockTable(), [1, 2, 3, 8, 0]) == [0, 2]


# ---- the prefix cache ------------------------------------------------------------------------------------------------


def test_nothing_is_found_before_it_was_computed() -> None:
    manager, table = make_manager(), BlockTable()
    manager.allocate(table, 8)
    assert manager.cached_prefix(BlockTable(), text(0, 8)) == []


def test_only_full_computed_blocks_are_published() -> None:
    manager, table, tokens = make_manager(block_size=4), BlockTable(), text(0, 11)
    manager.allocate(table, 11)
    found = []
    for num_computed in (3, 4, 7, 8, 11):
        manager.publish(table, tokens, num_computed)
        found.append(manager.cached_prefix(BlockTable(), [*tokens, 99, 98]))
    assert found == [[], [0], [0], [0, 1], [0, 1]]


def test_a_second_prompt_shares_the_blocks_of_its_longest_cached_beginning() -> None:
    manager = make_manager(block_size=4)
    first = admit(manager, [*text(0, 8), 70])
    second = admit(manager, [*text(0, 8), 80, 81])
    assert first.blocks == [0, 1, 2]
    assert second.blocks == [0, 1, 3]
    manager.check([first, second])


def test_a_hit_ends_at_the_first_block_that_differs() -> None:
    manager = make_manager(block_size=2)
    admit(manager, [1, 2, 3, 4, 5, 6])
    assert manager.cached_prefix(BlockTable(), [1, 2, 9, 9, 5, 6, 7]) == [0]
    assert manager.cached_prefix(BlockTable(), [9, 9, 3, 4, 5, 6, 7]) == []


@pytest.mark.parametrize("num_blocks_of_prompt", [1, 2, 3])
def test_a_prompt_whose_every_block_is_cached_leaves_its_last_token_to_compute(num_blocks_of_prompt: int) -> None:
    manager = make_manager(block_size=4)
    tokens = text(0, 4 * num_blocks_of_prompt)
    manager.free(admit(manager, tokens))
    prefix = manager.cached_prefix(BlockTable(), tokens)
    assert len(prefix) == num_blocks_of_prompt - 1
    assert len(prefix) * 4 <= len(tokens) - 1
    assert len(manager.cached_prefix(BlockTable(), [*tokens, 5])) == num_blocks_of_prompt


def test_two_equal_prompts_in_one_step_are_both_right_and_a_third_one_hits() -> None:
    manager, tokens = make_manager(block_size=4), text(0, 9)
    first, second = BlockTable(), BlockTable()
    manager.allocate(first, 9, manager.cached_prefix(first, tokens))
    manager.allocate(second, 9, manager.cached_prefix(second, tokens))
    manager.publish(first, tokens, 9)
    manager.publish(second, tokens, 9)
    assert not set(first.blocks) & set(second.blocks)
    manager.check([first, second])
    manager.free(second)  # its blocks stand for nothing; those of the first one stay findable
    manager.free(first)
    manager.check([])
    assert manager.cached_prefix(BlockTable(), tokens) == [0, 1]
    assert manager.stats == BlockStats(total=8, used=0, cached_free=2)


def test_texts_of_different_salts_never_share_a_block() -> None:
    manager, tokens = make_manager(block_size=4), text(0, 9)
    admit(manager, tokens, salt="a")
    for other in ("b", None, "aa"):
        assert manager.cached_prefix(BlockTable(root=root_key(other)), tokens) == []
    assert manager.cached_prefix(BlockTable(root=root_key("a")), tokens) == [0, 1]


def test_a_pool_without_prefix_cache_finds_nothing() -> None:
    manager = make_manager(prefix_cache=False)
    manager.free(admit(manager, text(0, 9)))
    assert manager.cached_prefix(BlockTable(), text(0, 9)) == []
    assert manager.stats == BlockStats(total=8, used=0, cached_free=0)


def test_a_hit_takes_a_cached_free_block_back_into_use() -> None:
    manager, tokens = make_manager(num_blocks=3, block_size=4), text(0, 9)
    manager.free(admit(manager, tokens))
    assert manager.stats == BlockStats(total=3, used=0, cached_free=2)
    table = BlockTable()
    prefix = manager.cached_prefix(table, tokens)
    assert manager.can_allocate(12, prefix)
    assert not manager.can_allocate(13, prefix)  # 4 blocks: the two that are cached, and 2 of the 1 free one
    manager.allocate(table, 9, prefix)
    assert manager.stats == BlockStats(total=3, used=3, cached_free=0)
    manager.check([table])


def test_blocks_in_use_that_are_hit_cost_nothing() -> None:
    manager, tokens = make_manager(num_blocks=4, block_size=4), text(0, 9)
    admit(manager, tokens)  # blocks 0, 1, 2; one is left
    assert manager.can_allocate(9, manager.cached_prefix(BlockTable(), tokens))
    assert not manager.can_allocate(9)


# ---- who is evicted --------------------------------------------------------------------------------------------------


def test_blocks_without_known_content_are_handed_out_before_cached_ones() -> None:
    manager = make_manager(num_blocks=4, block_size=4)
    manager.free(admit(manager, text(0, 9)))  # 0 and 1 cached, 2 only half full, 3 never used
    table = BlockTable()
    manager.allocate(table, 8)
    assert sorted(table.blocks) == [2, 3]
    assert manager.cached_prefix(BlockTable(), text(0, 9)) == [0, 1]


def test_a_block_that_is_freed_without_known_content_is_the_next_to_be_handed_out() -> None:
    manager = make_manager(num_blocks=4, block_size=4)
    unfinished = admit(manager, [7, 7, 7])  # block 0, not full
    manager.free(admit(manager, text(0, 12)))  # blocks 1, 2, 3 are cached and free
    manager.free(unfinished)
    table = BlockTable()
    manager.allocate(table, 1)
    assert table.blocks == [0]
    assert manager.cached_prefix(BlockTable(), text(0, 13)) == [1, 2, 3]


def test_the_tail_of_a_cached_text_is_evicted_before_its_beginning() -> None:
    manager, tokens = make_manager(num_blocks=3, block_size=4), text(0, 12)
    manager.free(admit(manager, tokens))
    longer = [*tokens, 99]
    found = []
    for _ in range(3):
        taken = BlockTable()
        manager.allocate(taken, 1)
        found.append(manager.cached_prefix(BlockTable(), longer))
    assert found == [[0, 1], [0], []]


def test_the_least_recently_used_text_is_evicted_first() -> None:
    manager = make_manager(num_blocks=3, block_size=4)
    old, middle, new = ([*text(start, 4), 0] for start in (10, 20, 30))
    for tokens in (old, middle, new):
        table = BlockTable()
        manager.allocate(table, 4)
        manager.publish(table, tokens, 4)
        manager.free(table)
    again = BlockTable()  # a hit makes the oldest the most recently used
    manager.allocate(again, 4, manager.cached_prefix(again, old))
    manager.free(again)
    manager.allocate(BlockTable(), 4)
    found = [len(manager.cached_prefix(BlockTable(), tokens)) for tokens in (old, middle, new)]
    assert found == [1, 0, 1]


def test_an_evicted_block_is_found_no_more_and_its_new_content_is() -> None:
    manager = make_manager(num_blocks=1, block_size=4)
    manager.free(admit(manager, text(0, 4)))
    manager.free(admit(manager, text(50, 4)))
    assert manager.cached_prefix(BlockTable(), text(0, 5)) == []
    assert manager.cached_prefix(BlockTable(), text(50, 5)) == [0]
    manager.check([])


def test_taking_blocks_for_a_hit_never_evicts_the_blocks_of_that_hit() -> None:
    manager, tokens = make_manager(num_blocks=4, block_size=4), text(0, 8)
    manager.free(admit(manager, tokens))
    longer, table = [*tokens, *text(90, 8)], BlockTable()
    prefix = manager.cached_prefix(table, longer)
    manager.allocate(table, 16, prefix)
    assert table.blocks[:2] == prefix == [0, 1]
    assert sorted(table.blocks) == [0, 1, 2, 3]
    manager.check([table])


# ---- resets, failures, figures ---------------------------------------------------------------------------------------


def test_a_reset_while_running_forgets_the_content_and_takes_no_block_away() -> None:
    manager, tokens = make_manager(block_size=4), text(0, 9)
    table = admit(manager, tokens)
    manager.reset_prefix_cache()
    assert table.blocks == [0, 1, 2]
    assert manager.cached_prefix(BlockTable(), tokens) == []
    longer = [*tokens, 9, 10, 11]
    manager.append(table, 12, write_from=11)
    manager.publish(table, longer, 12)  # publishing goes on, but the blocks before it are forgotten: no hit
    assert manager.cached_prefix(BlockTable(), [*longer, 0]) == []
    manager.free(table)
    manager.check([])
    assert manager.stats.used == 0


def test_a_failed_computation_is_readable_by_nobody() -> None:
    manager, tokens = make_manager(block_size=4), text(0, 9)
    table = admit(manager, tokens)
    manager.unpublish(table)
    manager.free(table)
    assert manager.cached_prefix(BlockTable(), tokens) == []
    assert manager.stats == BlockStats(total=8, used=0, cached_free=0)


def test_unpublishing_shared_blocks_leaves_them_with_those_who_share_them() -> None:
    manager, tokens = make_manager(block_size=4), text(0, 9)
    first, second = admit(manager, tokens), admit(manager, tokens)
    manager.unpublish(second)
    manager.free(second)
    manager.check([first])
    assert first.blocks == [0, 1, 2]


def test_figures_of_the_pool_add_up() -> None:
    manager = make_manager(num_blocks=8, block_size=4)
    running = admit(manager, text(0, 9))
    manager.free(admit(manager, text(50, 8)))
    assert manager.stats == BlockStats(total=8, used=3, cached_free=2)
    assert manager.stats.free == 3
    manager.free(running)
    assert manager.stats == BlockStats(total=8, used=0, cached_free=4)
