"""The block manager: who owns which block of the KV cache. Bookkeeping only; the tensors are the backend's.

Where it stands: the scheduler asks it for room before it schedules anything, and gives the room back at the end. A
block is a number; it holds the keys and values of `block_size` neighbouring tokens of one sequence, in every layer.

    tokens of a sequence     0 1 2 3 | 4 5 6 7 | 8 9             block_size 4
    its block table            [7]   |   [2]   |  [5]            any free blocks, in any order
    pool                     0 . 2 . . 5 . 7                     nobody needs neighbours, so nothing fragments

A block is in one of three states:

    used            reference count >= 1: in one block table, or shared by several
    cached but free reference count 0, content still known to the prefix cache: a hit takes it back
    free            reference count 0, content forgotten

What always holds (`check` verifies it; tests and `debug_checks` call it after every step):
1. reference count of a block = number of block tables it stands in;
2. a block is in the free queue exactly when its reference count is 0, so used + cached but free + free = total;
3. in the free queue, blocks without known content come first, then cached ones, least recently used first;
4. a block that someone writes to has reference count 1: a shared block is copied before the write (copy on write);
5. a block in the prefix cache is full, and was computed with success.

Every operation costs O(1) a block. In vLLM: `vllm/v1/core/block_pool.py` and `vllm/v1/core/kv_cache_manager.py`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mini_vllm.cache.prefix_cache import PrefixCache, block_key, root_key


@dataclass
class BlockTable:
    """The blocks of one sequence, in the order of its tokens. Only the block manager changes it.

    Args:
        root: what the first block's key chains to (the cache salt is in it).
        blocks: pool block of each logical block.
        keys: content keys of the first full blocks, as far as anyone has asked for them.
        num_published: how many of the first blocks were offered to the prefix cache.
    """

    root: bytes = field(default_factory=lambda: root_key(None))
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    num_published: int = 0


@dataclass(frozen=True)
class BlockCopy:
    """Before the step's forward, the content of block `source` is copied to block `target`."""

    source: int
    target: int


@dataclass(frozen=True)
class BlockStats:
    """How the pool is used at this moment, in blocks."""

    total: int
    used: int
    cached_free: int

    @property
    def free(self) -> int:
        """Blocks with no known content; those that are cached but free can be had as well."""
        return self.total - self.used - self.cached_free


class BlockManager:
    """Hands out the blocks of one pool.

    Args:
        num_blocks: size of the pool.
        block_size: tokens in a block.
        enable_prefix_caching: keep the content of freed blocks findable.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = PrefixCache() if enable_prefix_caching else None
        self._reference_counts = [0] * num_blocks
        # An ordered set: the next block to hand out is first. O(1) at both ends and for a block in the middle.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_cached_free = 0  # of the free ones; counted along, since figures are asked for at every step

    # ---- asking -----------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def cached_prefix(self, table: BlockTable, token_ids: Sequence[int]) -> list[int]:
        """The cached blocks that a sequence of `token_ids` could start with.

        At least the last token is left out even if it is cached: its logits are needed, so it must be computed.
        """
        if self.prefix_cache is None:
            return []
        self._extend_keys(table, token_ids, (len(token_ids) - 1) // self.block_size)
        return self.prefix_cache.longest_prefix(table.keys[: (len(token_ids) - 1) // self.block_size])

    def can_allocate(self, num_tokens: int, prefix: Sequence[int] = ()) -> bool:
        """Whether a new sequence of `num_tokens` fits, its first blocks being the cached `prefix`."""
        taken_from_free = self.blocks_for(num_tokens) - len(prefix)
        taken_from_free += sum(1 for block in prefix if self._reference_counts[block] == 0)
        return taken_from_free <= len(self._free)

    def has_room(self, table: BlockTable, num_tokens: int, write_from: int) -> bool:
        """Whether `append` with the same arguments would find nothing to do."""
        return num_tokens <= len(table.blocks) * self.block_size and self._shared_block(table, write_from) is None

    def can_append(self, table: BlockTable, num_tokens: int, write_from: int) -> bool:
        """Whether `append` with the same arguments would succeed."""
        needed = self.blocks_for(num_tokens) - len(table.blocks) + (self._shared_block(table, write_from) is not None)
        return needed <= len(self._free)

    # ---- taking and giving back -------------------------------------------------------------------------------

    def allocate(self, table: BlockTable, num_tokens: int, prefix: Sequence[int] = ()) -> None:
        """Give an empty table the blocks for `num_tokens` tokens. `can_allocate` must have been true.

        Args:
            prefix: what `cached_prefix` found; these blocks are shared, the rest is fresh.
        """
        for block in prefix:
            if self._reference_counts[block] == 0:
                del self._free[block]
                self._num_cached_free -= 1
            self._reference_counts[block] += 1
        table.blocks.extend(prefix)
        table.num_published = len(prefix)
        for _ in range(self.blocks_for(num_tokens) - len(prefix)):
            table.blocks.append(self._take())

    def append(self, table: BlockTable, num_tokens: int, write_from: int) -> BlockCopy | None:
        """Make room so that `num_tokens` tokens fit and those from `write_from` on may be written.

        Returns:
            The copy to make first if the block of token `write_from` was shared. Only that one can be: what is shared
            lies before the first token that differs.
        """
        copy = None
        shared = self._shared_block(table, write_from)
        if shared is not None:
            logical = write_from // self.block_size
            copy = BlockCopy(source=shared, target=self._take())
            self._reference_counts[shared] -= 1  # somebody else still holds it, so it does not become free
            table.blocks[logical] = copy.target
        while len(table.blocks) * self.block_size < num_tokens:
            table.blocks.append(self._take())
        return copy

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks, for a sibling. No block is copied until one of them writes."""
        for block in table.blocks:
            self._reference_counts[block] += 1
        return BlockTable(table.root, list(table.blocks), list(table.keys), table.num_published)

    def free(self, table: BlockTable) -> None:
        """Take all blocks back; the table is empty afterwards and may be used again."""
        # From the end: of a cached text the tail is evicted first, since without its beginning it is worth nothing.
        for block in reversed(table.blocks):
            self._reference_counts[block] -= 1
            if self._reference_counts[block] == 0:
                self._free[block] = None
                if self.prefix_cache is not None and block in self.prefix_cache:
                    self._num_cached_free += 1
                else:
                    self._free.move_to_end(block, last=False)
        table.blocks.clear()
        table.num_published = 0

    # ---- the prefix cache -------------------------------------------------------------------------------------

    def publish(self, table: BlockTable, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Offer the full, computed blocks that were not offered yet. To be called after the forward has succeeded."""
        if self.prefix_cache is None:
            return
        num_full = num_computed_tokens // self.block_size
        if num_full == table.num_published:
            return
        self._extend_keys(table, token_ids, num_full)
        for logical in range(table.num_published, num_full):
            self.prefix_cache.publish(table.blocks[logical], table.keys[logical])
        table.num_published = num_full

    def unpublish(self, table: BlockTable) -> None:
        """The computation of these blocks has failed: nobody else may read them. Shared ones are only forgotten."""
        if self.prefix_cache is not None:
            for block in table.blocks:
                self.prefix_cache.forget(block)

    def reset_prefix_cache(self) -> None:
        """Forget all cached content. Running sequences keep their blocks and go on."""
        if self.prefix_cache is not None:
            self.prefix_cache.clear()
            self._num_cached_free = 0

    # ---- figures and checks -----------------------------------------------------------------------------------

    @property
    def stats(self) -> BlockStats:
        used = self.num_blocks - len(self._free)
        return BlockStats(total=self.num_blocks, used=used, cached_free=self._num_cached_free)

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Raise RuntimeError if an invariant is broken. `tables` are all tables that hold blocks."""
        held = Counter(block for table in tables for block in table.blocks)
        counted = {block: count for block, count in enumerate(self._reference_counts) if count != 0}
        if counted != dict(held):
            raise RuntimeError(f"block manager: reference counts {counted} differ from the block tables {dict(held)}")
        unused = {block for block, count in enumerate(self._reference_counts) if count == 0}
        if unused != set(self._free):
            raise RuntimeError(f"block manager: free queue differs from unused blocks in {unused ^ set(self._free)}")
        if self.prefix_cache is not None:
            self.prefix_cache.check()
            cached_free = sum(block in self.prefix_cache for block in self._free)
            if cached_free != self._num_cached_free:
                raise RuntimeError(
                    f"block manager: {self._num_cached_free} cached free blocks counted, {cached_free} there"
                )

    # ---- inside -----------------------------------------------------------------------------------------------

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        if self.prefix_cache is not None and self.prefix_cache.forget(block):
            self._num_cached_free -= 1
        self._reference_counts[block] = 1
        return block

    def _shared_block(self, table: BlockTable, write_from: int) -> int | None:
        """The block that token `write_from` would be written to, if others hold it too."""
        logical = write_from // self.block_size
        if logical < len(table.blocks) and self._reference_counts[table.blocks[logical]] > 1:
            return table.blocks[logical]
        return None

    def _extend_keys(self, table: BlockTable, token_ids: Sequence[int], num_full: int) -> None:
        """Make `table.keys` reach `num_full` blocks. Each key is computed once in a sequence's life."""
        while len(table.keys) < num_full:
            start = len(table.keys) * self.block_size
            parent = table.keys[-1] if table.keys else table.root
            table.keys.append(block_key(parent, token_ids[start : start + self.block_size]))
