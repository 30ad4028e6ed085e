"""The prefix cache: keys that cannot be confused, a map with one block a key, and honest figures."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_vllm.cache.prefix_cache import PrefixCache, PrefixCacheStats, block_key, root_key

TOKEN_IDS = st.integers(0, 2**31 - 1)


def key_chain(tokens: list[int], block_size: int, salt: str | None = None) -> list[bytes]:
    keys, parent = [], root_key(salt)
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = block_key(parent, tokens[start : start + block_size])
        keys.append(parent)
    return keys


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_a_key_has_256_bits_and_is_the_same_every_time() -> None:
    assert len(root_key(None)) == len(block_key(root_key(None), [1, 2])) == 32
    assert block_key(root_key("a"), [1, 2]) == block_key(root_key("a"), [1, 2])


def test_a_key_stands_for_everything_before_it_too() -> None:
    first, second = key_chain([1, 2, 7, 8], 2), key_chain([3, 4, 7, 8], 2)
    assert first[1] != second[1]


def test_salted_and_unsalted_roots_all_differ() -> None:
    salts = [None, "a", "b", "none", "salt", "saltnone", "\ud800", "é"]
    roots = [root_key(salt) for salt in salts]
    assert all(one != other for one, other in combinations(roots, 2))


def test_token_ids_are_written_with_a_fixed_width_so_neighbours_cannot_run_together() -> None:
    root = root_key(None)
    assert block_key(root, [1, 23]) != block_key(root, [12, 3])
    assert block_key(root, [1, 0]) != block_key(root, [1])
    assert block_key(root, [256]) != block_key(root, [1, 0])


def test_a_salt_cannot_spell_what_the_key_of_a_block_is_made_of() -> None:
    parent = b"salt" + b"." * 28  # 32 bytes like any key, and they begin as the text behind a salted root does
    assert root_key("." * 28 + "AAAA") != block_key(parent, [int.from_bytes(b"AAAA", "little")])


@given(st.lists(TOKEN_IDS, max_size=12), st.lists(TOKEN_IDS, max_size=12), st.sampled_from([1, 2, 4]))
def test_equal_keys_mean_equal_beginnings(one: list[int], other: list[int], block_size: int) -> None:
    for index, (left, right) in enumerate(
        zip(key_chain(one, block_size), key_chain(other, block_size), strict=False), start=1
    ):
        assert (left == right) == (one[: index * block_size] == other[: index * block_size])


# ---- the map ---------------------------------------------------------------------------------------------------------


def test_a_hit_is_a_run_of_blocks_from_the_first_on() -> None:
    cache, keys = PrefixCache(), key_chain([1, 2, 3, 4], 1)
    for block, key in enumerate(keys):
        cache.publish(block, key)
    assert cache.longest_prefix(keys) == [0, 1, 2, 3]
    cache.forget(2)  # a gap in the middle: what follows it is of no use
    assert cache.longest_prefix(keys) == [0, 1]
    cache.forget(0)
    assert cache.longest_prefix(keys) == []


def test_the_first_block_of_a_key_stays_and_a_twin_remains_private() -> None:
    cache, (key,) = PrefixCache(), key_chain([1], 1)
    assert cache.publish(5, key)
    assert cache.publish(5, key)  # the same block again is no twin
    assert not cache.publish(6, key)
    assert 5 in cache
    assert 6 not in cache
    cache.forget(6)  # the twin is overwritten: the first one must survive that
    assert cache.longest_prefix([key]) == [5]
    cache.check()


def test_a_forgotten_block_can_be_published_under_another_key() -> None:
    cache, (one, other) = PrefixCache(), [key_chain([token], 1)[0] for token in (1, 2)]
    cache.publish(3, one)
    cache.forget(3)
    cache.publish(3, other)
    assert (cache.longest_prefix([one]), cache.longest_prefix([other])) == ([], [3])
    assert (cache.key_of(3), len(cache)) == (other, 1)
    cache.check()


def test_forgetting_a_block_that_is_not_there_does_nothing() -> None:
    cache = PrefixCache()
    cache.forget(4)
    assert len(cache) == 0
    assert cache.key_of(4) is None


def test_clear_forgets_every_block_and_keeps_the_counters() -> None:
    cache, keys = PrefixCache(), key_chain([1, 2], 1)
    for block, key in enumerate(keys):
        cache.publish(block, key)
    cache.count_lookup(10, 8)
    cache.count_lookup(6, 0)
    cache.clear()
    assert (len(cache), cache.longest_prefix(keys)) == (0, [])
    assert cache.stats == PrefixCacheStats(queried_tokens=16, hit_tokens=8)
    cache.check()


def test_check_sees_maps_that_disagree() -> None:
    cache, (key,) = PrefixCache(), key_chain([1], 1)
    cache.publish(0, key)
    cache._key_of_block[0] = b"another"
    with pytest.raises(RuntimeError, match="disagree"):
        cache.check()
