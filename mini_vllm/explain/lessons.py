"""The lessons of `mini-vllm explain`: a few sentences, the first time that something happens.

Where it stands: the story asks for a lesson with each event; `Lessons` gives each one once, with the numbers of the
event at hand, so that a reader can check them in the picture below.

In vLLM: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field


def introduction(num_blocks: int, block_size: int, block_bytes: int) -> list[str]:
    """What to know before the first step."""
    size = f" With this model a block takes {_readable_bytes(block_bytes)}." if block_bytes else ""
    return [
        f"THE POOL is all the memory there is for keys and values, cut into {num_blocks} blocks. A block has "
        f"{block_size} slots, and a slot has room for the key and value vectors of one token, in all layers of the "
        f"model.{size}",
        "A BLOCK TABLE holds no vectors. It is a short list of block numbers: its first number says which block has "
        f"tokens 0 to {block_size - 1} of a sequence, its second number tokens {block_size} to {2 * block_size - 1}, "
        "and so on. Attention follows the numbers and reads the vectors where they are.",
        "IN THE PICTURES of the pool each line is a block: its number, whose tables have it, and its slots. The tokens "
        "in the slots stand for their vectors; a dot is an empty slot.",
    ]


@dataclass
class Lessons:
    """Gives each lesson once.

    Args:
        block_size: tokens in a block.
    """

    block_size: int
    _given: set[str] = field(default_factory=set)

    def _once(self, topic: str, text: str) -> str | None:
        if topic in self._given:
            return None
        self._given.add(topic)
        return text

    def prefill(self, name: str, table: tuple[int, ...], start: int, end: int) -> str | None:
        """`name` computes several tokens of its prompt, or all of it."""
        logical, slot = (end - 1) // self.block_size, (end - 1) % self.block_size
        return self._once(
            "prefill",
            f"PREFILL. These {end - start} tokens of {name} go through the model in one forward, side by side. "
            f"Each leaves its key and its value in a slot of the pool. Token {end - 1}, for one: "
            f"{end - 1} // {self.block_size} = {logical}, so entry {logical} of the block table names its block, which "
            f"is block {table[logical]}; {end - 1} % {self.block_size} = {slot} is its slot there. "
            "The logits of the prompt's last token give the first token of the answer.",
        )

    def chunk(self, name: str, num_new: int, num_left: int) -> str | None:
        """`name` computes a part of what it has to."""
        return self._once(
            "chunk",
            f"CHUNKED PREFILL. A step has a budget of tokens, and {name} gets {num_new} of it; its {num_left} other "
            "tokens come in later steps. So a long prompt never makes those who decode wait for all of it.",
        )

    def decode(self, name: str, num_known: int) -> str | None:
        """`name` computes its newest token."""
        return self._once(
            "decode",
            f"DECODE. {name} knows {num_known} tokens, and the keys and values of {num_known - 1} are in the pool. "
            "So only the newest token goes through the model; attention finds the others through the block table. "
            f"Without the cache this step would compute {num_known} tokens, and the next one {num_known + 1}.",
        )

    def growth(self, name: str, table: tuple[int, ...], new: int) -> str | None:
        """`name` gets one more block while it decodes."""
        num_full = (len(table) - 1) * self.block_size
        return self._once(
            "growth",
            f"A BLOCK BOUNDARY. All {num_full} slots of {name}'s blocks are full, so its table gets one more number, "
            f"{new}. Any free block will do: the order is in the table, so blocks need not be neighbours, and nothing "
            "has to be set aside for an answer as long as the context.",
        )

    def hit(self, name: str, blocks: tuple[int, ...], num_cached: int) -> str | None:
        """`name` starts with blocks of the prefix cache."""
        return self._once(
            "hit",
            f"A PREFIX HIT. {name} begins with {num_cached} tokens that were computed before, for another text with "
            "the same beginning. Equal beginnings have equal keys and values, so the table just names "
            f"{_blocks(blocks)}, where they are. Nothing is copied. Only full blocks are shared, and the last token of "
            "a prompt is always computed, since its logits are needed.",
        )

    def fork(self, parent: str, name: str, blocks: tuple[int, ...]) -> str | None:
        """`name` is a further answer to the prompt of `parent`."""
        return self._once(
            "fork",
            f"SEVERAL ANSWERS. The prompt was computed once, and {parent} and {name} both start from it: both "
            f"tables name {_blocks(blocks)}. A block counts how many tables it stands in.",
        )

    def copy(self, name: str, source: int, target: int) -> str | None:
        """`name` gets its own copy of a shared block."""
        return self._once(
            "copy",
            f"COPY ON WRITE. {name} is about to write its next token into block {source}, which others use too. So it "
            f"gets a copy of that one block, {target}, and its table names the copy. Full blocks are never written "
            "again, so they stay shared. The last one to write has the block to itself and needs no copy.",
        )

    def preemption(self, name: str, num_tokens: int) -> str | None:
        """`name` has lost its blocks."""
        return self._once(
            "preemption",
            f"PREEMPTION. A decode needs a block and the pool has none left. {name} came last, so it gives its blocks "
            f"back and waits. Its {num_tokens} tokens are kept; its keys and values are not, but for full blocks that "
            "stay cached until somebody takes them. What is lost is computed again when there is room. That costs "
            "time; the answer stays the same, and nothing is sent twice.",
        )

    def resume(self, name: str, num_tokens: int, num_cached: int) -> str | None:
        """`name` runs again after it was preempted."""
        saved = f" The first {num_cached} are still in the prefix cache and need no computing." if num_cached else ""
        return self._once(
            "resume",
            f"BACK AFTER A PREEMPTION. {name} has {num_tokens} tokens, prompt and answer so far, and they are computed "
            f"again like a prompt.{saved} Then it goes on where it was.",
        )

    def waits(self, name: str, num_needed: int, num_available: int) -> str | None:
        """`name` is not let in for want of blocks."""
        return self._once(
            "waits",
            f"WAITING FOR BLOCKS. {name} needs {num_needed} more blocks than it can share, for the tokens that it has, "
            f"and {num_available} can be had. Nobody is let in without blocks for all of their tokens.",
        )

    def finish(self, name: str, cached: tuple[int, ...]) -> str | None:
        """`name` has ended; `cached` are those of its blocks that are free now and still known."""
        if not cached:
            return None
        return self._once(
            "finish",
            f"CACHED BUT FREE. {name} needs its blocks no more. What is in full ones, here {_blocks(cached)}, stays "
            "until somebody needs the room: a prompt with the same beginning takes them as they are.",
        )


def _blocks(blocks: tuple[int, ...]) -> str:
    return ("block " if len(blocks) == 1 else "blocks ") + " ".join(map(str, blocks))


def _readable_bytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.0f} KiB"
