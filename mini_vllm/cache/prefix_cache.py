"""The prefix cache: which block holds the keys and values of which beginning of a text.

Where it stands: owned by the block manager. It knows content keys and block numbers, never tensors. Looked up when a
sequence is admitted; written after a forward has succeeded, never at allocation.

The key of a full block is a SHA-256 chained over the key of the block before it, so equal keys mean equal *beginnings*,
not only equal blocks. Every part is typed and of known length, so no two different inputs give the same bytes to hash:

    root    = H("none")  or  H("salt", cache salt)
    key[0]  = H("block", root,   token ids of block 0)          "The cat sat | on the mat"
    key[1]  = H("block", key[0], token ids of block 1)           key[0]        key[1]

What always holds:
- `key -> block` and `block -> key` are inverse to each other;
- a block that is here holds exactly the tokens its key was made of, computed with success;
- a hit is a run of blocks from the first on: a gap ends it.

In vLLM: `vllm/v1/core/kv_cache_utils.py` (hashes) and `BlockHashToBlockMap` in `vllm/v1/core/block_pool.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True)
class PrefixCacheStats:
    """Counted in tokens since the start: asked for at admissions, and found."""

    queried_tokens: int
    hit_tokens: int


def root_key(cache_salt: str | None) -> bytes:
    """The key that the first block of a text chains to: texts with different salts never share a block."""
    if cache_salt is None:
        return sha256(b"none").digest()
    return sha256(b"salt" + cache_salt.encode("utf-8", "surrogatepass")).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of one full block.

    Args:
        parent: 32 bytes, the key of the block before, or `root_key`.
        token_ids: the block's token ids, each below 2**31.
    """
    return sha256(b"block" + parent + array("i", token_ids).tobytes()).digest()


class PrefixCache:
    """The two maps and the counters. Whether a block is in use or free is the block manager's business."""

    def __init__(self) -> None:
        self._block_of_key: dict[bytes, int] = {}
        self._key_of_block: dict[int, bytes] = {}
        self._queried_tokens = 0
        self._hit_tokens = 0

    def __len__(self) -> int:
        return len(self._block_of_key)

    def __contains__(self, block: int) -> bool:
        return block in self._key_of_block

    def longest_prefix(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of `keys` that is cached from the first key on."""
        blocks = []
        for key in keys:
            block = self._block_of_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_lookup(self, queried_tokens: int, hit_tokens: int) -> None:
        self._queried_tokens += queried_tokens
        self._hit_tokens += hit_tokens

    def publish(self, block: int, key: bytes) -> bool:
        """Make a computed full block findable.

        Returns:
            False if another block already stands for this key: two equal prompts were computed side by side. The
            first one stays, and this block remains private to its sequence.
        """
        if key in self._block_of_key:
            return self._block_of_key[key] == block
        self._block_of_key[key] = block
        self._key_of_block[block] = key
        return True

    def forget(self, block: int) -> bool:
        """The block is about to be overwritten. Returns whether it was here at all."""
        key = self._key_of_block.pop(block, None)
        if key is None:
            return False
        del self._block_of_key[key]
        return True

    def clear(self) -> None:
        """Forget every block; those in use stay with their sequences. The counters go on."""
        self._block_of_key.clear()
        self._key_of_block.clear()

    def key_of(self, block: int) -> bytes | None:
        return self._key_of_block.get(block)

    @property
    def stats(self) -> PrefixCacheStats:
        return PrefixCacheStats(self._queried_tokens, self._hit_tokens)

    def check(self) -> None:
        """Raise if the two maps are not inverse to each other (debug mode)."""
        if {block: key for key, block in self._block_of_key.items()} != self._key_of_block:
            raise RuntimeError("prefix cache: the maps key -> block and block -> key disagree")
