"""The narrator: prints what happens, step by step, and what it came to.

Where it stands: the outermost part of `mini-vllm explain`; it adds requests to the engine and calls `step`.

In vLLM: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.style import Style
from rich.text import Text

from mini_vllm.engine.events import sequence_name
from mini_vllm.engine.llm_engine import LLMEngine
from mini_vllm.engine.request import Request
from mini_vllm.explain.lessons import Lessons, introduction
from mini_vllm.explain.observer import Observer
from mini_vllm.explain.picture import DIM, draw_pool, draw_tables, style_of
from mini_vllm.explain.story import Sentence, Story, one_line
from mini_vllm.outputs import RequestOutput
from mini_vllm.sampling_params import SamplingParams

MOST_COLUMNS = 110  # longer lines are hard to read
_LESSON = Style(color="yellow", italic=True)
_ASCII = str.maketrans({"│": "|", "·": ".", "…": "~", "→": ">", "▌": "|", "─": "-"})


class Narrator:
    """Runs prompts through an engine and explains every step.

    Args:
        engine: nobody else uses it; its listener is `observer`, alone or through `fan_out`.
        observer: attached to the engine's scheduler.
        console: where to print; plain where it has no colours.
        pause: called after every step that another one follows.
    """

    def __init__(self, engine: LLMEngine, observer: Observer, console: Console, pause: Callable[[], None]) -> None:
        self._engine = engine
        self._observer = observer
        self._console = console
        self._pause = pause
        self._width = min(console.width, MOST_COLUMNS)
        blocks = engine.scheduler.block_manager
        self._lessons = Lessons(blocks.block_size)
        self._story = Story(self._lessons, engine.tokenizer.token_text)
        self._requests: list[str] = []  # names, in order of arrival
        self._texts: dict[str, tuple[str, str]] = {}  # name of a sequence -> prompt, answer so far
        self._told_finished: set[str] = set()

    def run(self, prompts: Sequence[str], params: SamplingParams, *, stagger: int) -> None:
        """Explain until every prompt is answered.

        Args:
            prompts: one request each; they are called A, B, C and so on.
            params: for all of them.
            stagger: steps between the arrivals of two prompts; 0 lets all arrive before the first step.

        Raises:
            InvalidRequestError: a prompt or a parameter is refused; then nothing was printed.
        """
        # All of them are checked before the first one is computed.
        coming = [
            self._engine.make_request(prompt, params, request_id=letters(index)) for index, prompt in enumerate(prompts)
        ]
        self._introduce()
        step, arrives_at = 0, 1
        while coming or self._engine.has_unfinished_requests():
            step += 1
            self._console.print()
            self._console.rule(Text(f"step {step}", "bold"), align="left", style="dim", characters="─")
            while coming and (step >= arrives_at or not self._engine.has_unfinished_requests()):
                self._arrive(coming.pop(0))
                arrives_at = step + stagger
            self._tell(self._engine.step())
            if coming or self._engine.has_unfinished_requests():
                self._pause()
        self._summarise(step)

    def _arrive(self, request: Request) -> None:
        self._requests.append(request.request_id)
        self._texts[request.request_id] = (request.prompt or "", "")
        self._engine.enqueue(request)

    # ---- one step -----------------------------------------------------------------------------------------------

    def _tell(self, outputs: Sequence[RequestOutput]) -> None:
        drawn = self._note_outputs(outputs)
        pool = self._observer.pool()
        for sentence in self._story.tell(self._observer.take_events(), drawn, pool):
            self._say(sentence)
        self._say_who_waits()
        self._console.print()
        self._section("queues", [self._queues()])
        self._section("tables", draw_tables(self._observer.tables(), self._style))
        size = self._engine.scheduler.block_manager.block_size
        self._section("pool", draw_pool(pool, size, self._engine.tokenizer.token_text, self._style))
        names = sorted(self._texts.keys() - self._told_finished, key=self._place)
        self._section("texts", [self._text(name) for name in names])
        self._told_finished.update(self._observer.finished)

    def _note_outputs(self, outputs: Sequence[RequestOutput]) -> dict[str, list[int]]:
        """Keep the texts so far; returns the tokens that each sequence got in this step."""
        drawn = {}
        for output in outputs:
            for choice in output.outputs:
                name = sequence_name(output.request_id, choice.index)
                self._texts[name] = (output.prompt or "", choice.text)
                drawn[name] = choice.delta_token_ids
        return drawn

    def _say(self, sentence: Sentence) -> None:
        line = Text("  ").append(sentence.name, self._style(sentence.name)).append(f" {sentence.text}")
        self._paragraph(line, indent="    ")
        for lesson in sentence.lessons:
            self._lesson(lesson)

    def _say_who_waits(self) -> None:
        """Why the next one in the queue was not let in, if it is for want of blocks."""
        scheduler, blocks = self._engine.scheduler, self._engine.scheduler.block_manager
        sequence = scheduler.next_waiting
        if sequence is None:
            return
        prefix = blocks.cached_prefix(sequence.block_table, sequence.token_ids)
        if blocks.can_allocate(sequence.num_tokens, prefix):
            return
        pool = self._observer.pool()
        needed = blocks.blocks_for(sequence.num_tokens) - sum(bool(pool[block].owners) for block in prefix)
        name, available = sequence_name(sequence.group.request.request_id, sequence.index), blocks.num_free_blocks
        lesson = self._lessons.waits(name, needed, available)
        text = f"waits: it needs {needed} blocks more than it can share, and {available} can be had"
        self._say(Sentence(name, text, () if lesson is None else (lesson,)))

    def _queues(self) -> Text:
        observer, line = self._observer, Text()
        running = [table.name for table in observer.tables()]
        waiting = sorted(observer.waiting, key=self._place)
        for label, names in (("waiting", waiting), ("running", running), ("finished", observer.finished)):
            line.append(f"{label} ", DIM)
            for name in names:
                line.append(f"{name} ", self._style(name))
            line.append("  " if names else "none   ", DIM)
        line.rstrip()
        return line

    def _place(self, name: str) -> tuple[int, int]:
        """Where a sequence stands in order of arrival."""
        request_id, _, index = name.partition(".")
        return self._requests.index(request_id), int(index or 0)

    def _text(self, name: str) -> Text:
        width = (self._width - 26) // 2  # of the prompt and of the answer; of long ones the end is shown
        prompt, answer = (_tail(one_line(text), width) for text in self._texts[name])
        line = Text(f"{name:<6} ", self._style(name)).append(f'"{prompt}"', DIM)
        return line.append(f' → "{answer}"' if answer else "")

    # ---- before and after ---------------------------------------------------------------------------------------

    def _introduce(self) -> None:
        pool = self._engine.pool
        for paragraph in introduction(pool.num_blocks, pool.block_size, pool.block_bytes):
            self._lesson(paragraph)

    def _summarise(self, num_steps: int) -> None:
        usage, stats = self._observer.usage, self._engine.stats
        num_blocks = self._engine.pool.num_blocks
        self._console.print()
        self._console.rule(Text(f"after {num_steps} steps", "bold"), align="left", style="dim", characters="─")
        self._section("texts", [self._text(name) for name in sorted(self._texts, key=self._place)])
        self._console.print()
        facts = [
            f"At most {_count(usage.most_running, 'sequence')} ran at once, in {usage.most_blocks} of {num_blocks} "
            f"blocks. {_count(self._observer.num_preemptions, 'preemption')}."
        ]
        if stats.prefix_cache is not None:
            found, asked = stats.prefix_cache.hit_tokens, stats.prefix_cache.queried_tokens
            facts.append(f"Prefix cache: {found} of the {asked} tokens that were to be prefilled were there already.")
        facts += self._waste()
        for fact in facts:
            self._paragraph(Text(f"  {fact}"), indent="    ")

    def _waste(self) -> list[str]:
        """How much of the memory taken held nothing: as it was, and as it would have been without blocks."""
        usage, limit = self._observer.usage, self._engine.config.max_model_len or 1
        as_it_was = f"{_empty(usage.filled, usage.slots)} of the slots in use held nothing"
        if self._engine.config.cache != "paged":
            return [f"Waste: {as_it_was}."]
        return [
            f"Waste, paged: {as_it_was}.",
            f"Waste, contiguous: with max_model_len = {limit} slots set aside for each sequence, "
            f"{_empty(usage.contiguous_filled, usage.contiguous_slots)} of them would have held nothing, and this pool "
            f"would have had room for {_count(self._engine.pool.num_tokens // limit, 'sequence')} at once.",
        ]

    # ---- printing -----------------------------------------------------------------------------------------------

    def _section(self, label: str, lines: Sequence[Text]) -> None:
        for place, line in enumerate(lines or [Text("none", DIM)]):
            self._print(Text(f"  {label if place == 0 else '':<9}", DIM).append_text(line))

    def _lesson(self, text: str) -> None:
        for line in Text(text, _LESSON).wrap(self._console, self._width - 6):
            line.rstrip()
            self._print(Text("    ▌ ", _LESSON).append_text(line))

    def _paragraph(self, text: Text, indent: str) -> None:
        for place, line in enumerate(text.wrap(self._console, self._width - len(indent))):
            line.rstrip()
            self._print(line if place == 0 else Text(indent).append_text(line))

    def _print(self, line: Text) -> None:
        line.truncate(self._width, overflow="ellipsis")
        if self._console.options.ascii_only:
            line = Text(line.plain.translate(_ASCII).encode("ascii", "backslashreplace").decode())
        self._console.print(line, no_wrap=True, highlight=False)

    def _style(self, name: str) -> Style:
        return style_of(name, self._requests)


def letters(index: int) -> str:
    """A, B, ..., Z, AA, AB and so on."""
    return (letters(index // 26 - 1) if index >= 26 else "") + chr(ord("A") + index % 26)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _tail(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[-width + 1 :]


def _empty(filled: int, slots: int) -> str:
    return "0 %" if slots == 0 else f"{100 * (slots - filled) / slots:.0f} %"
