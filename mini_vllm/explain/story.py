"""The story: the events of one step as sentences, each followed by its lesson the first time.

Where it stands: between the observer, which has collected the events, and the narrator, which prints what comes back.

In vLLM: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mini_vllm.engine import events
from mini_vllm.engine.events import sequence_name
from mini_vllm.explain.lessons import Lessons
from mini_vllm.explain.observer import BlockView


@dataclass(frozen=True)
class Sentence:
    """One line of the story.

    Args:
        name: the sequence that it is about; the line begins with it.
        text: the rest of the line.
        lessons: what there is to learn from it and was not said before.
    """

    name: str
    text: str
    lessons: tuple[str, ...] = ()


@dataclass
class Story:
    """Tells steps in order; it follows the block tables, so it hears every event.

    Args:
        lessons: which of them were given.
        token_text: the text of a token id.
    """

    lessons: Lessons
    token_text: Callable[[int], str]

    def __post_init__(self) -> None:
        self._tables: dict[str, tuple[int, ...]] = {}
        self._num_known: dict[str, int] = {}

    def tell(
        self,
        step_events: Sequence[events.Event],
        drawn: Mapping[str, Sequence[int]],
        pool: Sequence[BlockView],
    ) -> Iterator[Sentence]:
        """One or more sentences an event.

        Args:
            step_events: of one step.
            drawn: the tokens that each sequence got.
            pool: as it is after the step.
        """
        for event in step_events:
            if isinstance(event, events.StepScheduled):
                for scheduled in event.sequences:
                    yield self._computes(scheduled, drawn)
            elif isinstance(event, events.SequenceEvent):
                yield from self._tell(event, drawn, pool)
        for name, token_ids in drawn.items():
            self._num_known[name] = self._num_known.get(name, 0) + len(token_ids)

    def _tell(
        self, event: events.SequenceEvent, drawn: Mapping[str, Sequence[int]], pool: Sequence[BlockView]
    ) -> Iterator[Sentence]:
        name = sequence_name(event.request_id, event.index)
        if isinstance(event, events.Queued):
            self._num_known[name] = event.num_tokens
            yield Sentence(name, f"arrives with {_count(event.num_tokens, 'token')} and joins the waiting queue")
        elif isinstance(event, events.Admitted):
            yield self._admitted(name, event)
        elif isinstance(event, events.BlocksAppended):
            yield from self._grows(name, event)
        elif isinstance(event, events.Forked):
            yield self._forked(name, event, drawn)
        elif isinstance(event, events.Preempted):
            del self._tables[name]
            text = f"is preempted: gives back {_blocks(event.freed_blocks)}, keeps its {event.num_tokens} tokens, waits"
            yield _sentence(name, text, self.lessons.preemption(name, event.num_tokens))
        else:
            yield self._finished(name, event, pool)

    def _admitted(self, name: str, event: events.Admitted) -> Sentence:
        self._tables[name] = event.shared_blocks + event.new_blocks
        parts = []
        if event.shared_blocks:
            parts.append(f"finds its first {event.num_cached_tokens} tokens in {_blocks(event.shared_blocks)}")
        if event.new_blocks:
            parts.append(f"gets {_blocks(event.new_blocks)}")
        text = f"{'runs again' if event.is_resumed else 'is admitted'}: {' and '.join(parts)}"
        if event.is_resumed:
            lesson = self.lessons.resume(name, event.num_tokens, event.num_cached_tokens)
        elif event.shared_blocks:
            lesson = self.lessons.hit(name, event.shared_blocks, event.num_cached_tokens)
        else:
            lesson = None
        return _sentence(name, text, lesson)

    def _grows(self, name: str, event: events.BlocksAppended) -> Iterator[Sentence]:
        if event.copy is not None:
            source, target = event.copy.source, event.copy.target
            self._tables[name] = tuple(target if block == source else block for block in self._tables[name])
            text = f"must not write into block {source}, which is shared: it is copied to block {target}"
            yield _sentence(name, text, self.lessons.copy(name, source, target))
        for block in event.new_blocks:
            self._tables[name] += (block,)
            lesson = self.lessons.growth(name, self._tables[name], block)
            yield _sentence(name, f"has filled its blocks and gets {_blocks((block,))}", lesson)

    def _forked(self, name: str, event: events.Forked, drawn: Mapping[str, Sequence[int]]) -> Sentence:
        parent = sequence_name(event.request_id, 0)
        self._tables[name] = event.blocks
        self._num_known[name] = self._num_known[parent]
        text = f"is forked off {parent} and shares {_blocks(event.blocks)}{self._arrow(drawn.get(name, ()))}"
        return _sentence(name, text, self.lessons.fork(parent, name, event.blocks))

    def _computes(self, scheduled: events.SequenceScheduled, drawn: Mapping[str, Sequence[int]]) -> Sentence:
        name = sequence_name(scheduled.request_id, scheduled.index)
        num_new, start = scheduled.num_new_tokens, scheduled.start
        end, num_known = start + num_new, self._num_known[name]
        got = self._arrow(drawn.get(name, ()))
        if not scheduled.is_prefill:
            return _sentence(name, f"decodes 1 token, position {start}{got}", self.lessons.decode(name, num_known))
        where = f"position {start}" if num_new == 1 else f"positions {start} to {end - 1}"
        text = f"prefills {_count(num_new, 'token')}, {where}{got}"
        prefill = self.lessons.prefill(name, self._tables[name], start, end) if num_new > 1 else None
        if end == num_known:
            return _sentence(name, text, prefill)
        text += f"; {num_known - end} are left for later"
        return _sentence(name, text, prefill, self.lessons.chunk(name, num_new, num_known - end))

    def _finished(self, name: str, event: events.Finished, pool: Sequence[BlockView]) -> Sentence:
        self._tables.pop(name, None)
        freed = [pool[block] for block in event.freed_blocks]
        shared = tuple(block.number for block in freed if block.owners)
        cached = tuple(block.number for block in freed if block.is_cached and not block.owners)
        text = f"is finished ({event.reason})" + (f": gives back {_blocks(event.freed_blocks)}" if freed else "")
        if shared:
            text += f", of which others still use {_join(shared)}"
        if cached:
            text += f"; {_join(cached)} stay{'s' if len(cached) == 1 else ''} cached"
        return _sentence(name, text, self.lessons.finish(name, cached))

    def _arrow(self, token_ids: Sequence[int]) -> str:
        return "".join(f" → {quoted(self.token_text(token_id))}" for token_id in token_ids)


def _sentence(name: str, text: str, *lessons: str | None) -> Sentence:
    return Sentence(name, text, tuple(lesson for lesson in lessons if lesson is not None))


def quoted(text: str) -> str:
    """A token's text so that spaces can be seen."""
    return f'"{one_line(text)}"'


def one_line(text: str) -> str:
    """The text with its control characters spelled out, so that it stays on its line and moves no cursor."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _blocks(blocks: Sequence[int]) -> str:
    return ("block " if len(blocks) == 1 else "blocks ") + _join(blocks)


def _join(blocks: Sequence[int]) -> str:
    return " ".join(map(str, blocks))
