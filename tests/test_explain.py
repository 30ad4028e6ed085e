"""`mini-vllm explain`: what it says of a scripted run, to the letter; each lesson once, with the numbers at hand."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.style import Style
from seeing_helpers import written_engine
from typer.testing import CliRunner

from mini_vllm.cli import app
from mini_vllm.config import EngineConfig
from mini_vllm.errors import InvalidConfigError, InvalidRequestError
from mini_vllm.explain.narrator import Narrator, letters
from mini_vllm.explain.observer import BlockView, Observer
from mini_vllm.explain.picture import draw_pool
from mini_vllm.sampling_params import SamplingParams


def explain(
    answers: Mapping[str, str | Sequence[str]],
    *,
    n: int = 1,
    max_tokens: int = 5,
    stagger: int = 1,
    console: Console | None = None,
    **options: Any,
) -> str:
    """The whole output, 100 columns wide."""
    console = console or Console(file=io.StringIO(), width=100)
    observer = Observer()
    engine = written_engine(answers, observer, **options)
    observer.attach(engine.scheduler)
    params = SamplingParams(n=n, temperature=0, max_tokens=max_tokens)
    Narrator(engine, observer, console, lambda: None).run(list(answers), params, stagger=stagger)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def without_lessons(text: str) -> str:
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("    ▌")]
    return "\n".join(line.rstrip("─ ") for line in lines).strip()


def lessons(text: str) -> list[str]:
    """The headings of the lessons, in order."""
    return re.findall(r"^    ▌ ([A-Z][A-Z ]{3,}[A-Z])\b", text, re.MULTILINE)


def words_of_lessons(text: str) -> str:
    return " ".join(line[6:] for line in text.splitlines() if line.startswith("    ▌"))


def step(text: str, number: int) -> str:
    return without_lessons(text).split(f"step {number}\n")[1].split("\nstep ")[0].split("\nafter ")[0].strip("\n")


PREFIX_HIT_AND_PREEMPTION = """\
step 1
  A arrives with 11 tokens and joins the waiting queue
  A is admitted: gets blocks 0 1 2
  A prefills 11 tokens, positions 0 to 10 → "d"

  queues   waiting none   running A   finished none
  tables   A      [0, 1, 2]   11 tokens in the pool, 1 to compute
  pool     0      A      │T│h│e│ │
           1      A      │c│a│t│ │
           2      A      │s│a│t│·│
           3-4    free
  texts    A      "The cat sat" → "d"

step 2
  B arrives with 10 tokens and joins the waiting queue
  B is admitted: finds its first 8 tokens in blocks 0 1 and gets block 3
  A decodes 1 token, position 11 → "o"
  B prefills 2 tokens, positions 8 to 9 → "t"

  queues   waiting none   running A B   finished none
  tables   A      [0, 1, 2]   12 tokens in the pool, 1 to compute
           B      [0, 1, 3]   10 tokens in the pool, 1 to compute
  pool     0      A B    │T│h│e│ │
           1      A B    │c│a│t│ │
           2      A      │s│a│t│d│
           3      B      │i│s│·│·│
           4      free
  texts    A      "The cat sat" → "do"
           B      "The cat is" → "t"

step 3
  A has filled its blocks and gets block 4
  A decodes 1 token, position 12 → "w"
  B decodes 1 token, position 10 → "h"

  queues   waiting none   running A B   finished none
  tables   A      [0, 1, 2, 4]   13 tokens in the pool, 1 to compute
           B      [0, 1, 3]      11 tokens in the pool, 1 to compute
  pool     0      A B    │T│h│e│ │
           1      A B    │c│a│t│ │
           2      A      │s│a│t│d│
           3      B      │i│s│t│·│
           4      A      │o│·│·│·│
  texts    A      "The cat sat" → "dow"
           B      "The cat is" → "th"

step 4
  A decodes 1 token, position 13 → "n"
  B decodes 1 token, position 11 → "e"

  queues   waiting none   running A B   finished none
  tables   A      [0, 1, 2, 4]   14 tokens in the pool, 1 to compute
           B      [0, 1, 3]      12 tokens in the pool, 1 to compute
  pool     0      A B    │T│h│e│ │
           1      A B    │c│a│t│ │
           2      A      │s│a│t│d│
           3      B      │i│s│t│h│
           4      A      │o│w│·│·│
  texts    A      "The cat sat" → "down"
           B      "The cat is" → "the"

step 5
  B is preempted: gives back blocks 0 1 3, keeps its 13 tokens, waits
  A decodes 1 token, position 14 → "."
  A is finished (length): gives back blocks 0 1 2 4; 0 1 2 stay cached

  queues   waiting B   running none   finished A
  tables   none
  pool     0      cached │T│h│e│ │
           1      cached │c│a│t│ │
           2      cached │s│a│t│d│
           3      cached │i│s│t│h│
           4      free
  texts    A      "The cat sat" → "down."
           B      "The cat is" → "the"

step 6
  B runs again: finds its first 12 tokens in blocks 0 1 3 and gets block 4
  B decodes 1 token, position 12 → "r"

  queues   waiting none   running B   finished A
  tables   B      [0, 1, 3, 4]   13 tokens in the pool, 1 to compute
  pool     0      B      │T│h│e│ │
           1      B      │c│a│t│ │
           2      cached │s│a│t│d│
           3      B      │i│s│t│h│
           4      B      │e│·│·│·│
  texts    B      "The cat is" → "ther"

step 7
  B decodes 1 token, position 13 → "e"
  B is finished (length): gives back blocks 0 1 3 4; 0 1 3 stay cached

  queues   waiting none   running none   finished A B
  tables   none
  pool     0      cached │T│h│e│ │
           1      cached │c│a│t│ │
           2      cached │s│a│t│d│
           3      cached │i│s│t│h│
           4      free
  texts    B      "The cat is" → "there"

after 7 steps
  texts    A      "The cat sat" → "down."
           B      "The cat is" → "there"

  At most 2 sequences ran at once, in 5 of 5 blocks. 1 preemption.
  Prefix cache: 20 of the 34 tokens that were to be prefilled were there already.
  Waste, paged: 13 % of the slots in use held nothing.
  Waste, contiguous: with max_model_len = 20 slots set aside for each sequence, 38 % of them
    would have held nothing, and this pool would have had room for 1 sequence at once."""


def test_a_prefix_hit_and_a_preemption_told_to_the_letter() -> None:
    text = explain({"The cat sat": "down.", "The cat is": "there!"}, num_kv_blocks=5)
    assert without_lessons(text) == PREFIX_HIT_AND_PREEMPTION


def test_three_answers_share_the_prompt_and_copy_the_last_block() -> None:
    text = explain({"The cat": ("ran", "sat", "is")}, n=3, max_tokens=3, num_kv_blocks=6)
    assert (
        step(text, 1)
        == """\
  A arrives with 7 tokens and joins the waiting queue
  A is admitted: gets blocks 0 1
  A prefills 7 tokens, positions 0 to 6 → "r"
  A.1 is forked off A and shares blocks 0 1 → "s"
  A.2 is forked off A and shares blocks 0 1 → "i"

  queues   waiting none   running A A.1 A.2   finished none
  tables   A      [0, 1]   7 tokens in the pool, 1 to compute
           A.1    [0, 1]   7 tokens in the pool, 1 to compute
           A.2    [0, 1]   7 tokens in the pool, 1 to compute
  pool     0      A A.1 A.2 │T│h│e│ │
           1      A A.1 A.2 │c│a│t│·│
           2-5    free
  texts    A      "The cat" → "r"
           A.1    "The cat" → "s"
           A.2    "The cat" → "i\""""
    )
    assert (
        step(text, 2)
        == """\
  A must not write into block 1, which is shared: it is copied to block 2
  A.1 must not write into block 1, which is shared: it is copied to block 3
  A decodes 1 token, position 7 → "a"
  A.1 decodes 1 token, position 7 → "a"
  A.2 decodes 1 token, position 7 → "s"

  queues   waiting none   running A A.1 A.2   finished none
  tables   A      [0, 2]   8 tokens in the pool, 1 to compute
           A.1    [0, 3]   8 tokens in the pool, 1 to compute
           A.2    [0, 1]   8 tokens in the pool, 1 to compute
  pool     0      A A.1 A.2 │T│h│e│ │
           1      A.2       │c│a│t│i│
           2      A         │c│a│t│r│
           3      A.1       │c│a│t│s│
           4-5    free
  texts    A      "The cat" → "ra"
           A.1    "The cat" → "sa"
           A.2    "The cat" → "is\""""
    )


def test_who_waits_for_blocks_is_told_with_the_numbers() -> None:
    text = explain({"The cat sat": "down", "A dog ran": "off"}, num_kv_blocks=4, max_tokens=3)
    assert "  B waits: it needs 3 blocks more than it can share, and 1 can be had\n" in step(text, 2)
    assert "  queues   waiting B   running A   finished none\n" in step(text, 2)
    assert lessons(text).count("WAITING FOR BLOCKS") == 1


def test_what_can_be_shared_is_not_asked_for() -> None:
    text = explain({"The cat sat o": "n it", "The cat is here": "now"}, num_kv_blocks=5, max_tokens=3)
    assert "  B waits: it needs 2 blocks more than it can share, and 1 can be had\n" in step(text, 2)


def test_a_chunked_prefill_says_what_is_left() -> None:
    text = explain({"The cat sat": "down"}, max_num_batched_tokens=4, max_tokens=1)
    assert "  A prefills 4 tokens, positions 0 to 3; 7 are left for later\n" in step(text, 1)
    assert "  tables   A      [0, 1, 2]   4 tokens in the pool, 7 to compute\n" in step(text, 1)
    assert '  A prefills 3 tokens, positions 8 to 10 → "d"\n' in step(text, 3)
    assert "  pool     0      A      │T│h│e│ │\n           1      A      │·│·│·│·│\n" in step(text, 1)


INTRODUCTION = ["THE POOL", "A BLOCK TABLE", "IN THE PICTURES"]


def test_lessons_of_a_prefix_hit_and_a_preemption_come_once_with_the_numbers_at_hand() -> None:
    text = explain({"The cat sat": "down.", "The cat is": "there!"}, num_kv_blocks=5)
    assert lessons(text) == [
        *INTRODUCTION,
        "PREFILL",
        "A PREFIX HIT",
        "DECODE",
        "A BLOCK BOUNDARY",
        "PREEMPTION",
        "CACHED BUT FREE",
        "BACK AFTER A PREEMPTION",
    ]
    words = words_of_lessons(text)
    assert "entry 2 of the block table names its block, which is block 2; 10 % 4 = 2 is its slot there" in words
    assert "B begins with 8 tokens that were computed before" in words
    assert "so the table just names blocks 0 1, where they are" in words
    assert "A knows 12 tokens, and the keys and values of 11 are in the pool" in words
    assert "All 12 slots of A's blocks are full, so its table gets one more number, 4." in words
    assert "B came last, so it gives its blocks back and waits. Its 13 tokens are kept" in words
    assert "What is in full ones, here blocks 0 1 2, stays until" in words
    assert "B has 13 tokens, prompt and answer so far" in words


def test_lessons_of_several_answers_and_chunks() -> None:
    text = explain({"The cat": ("ran", "sat")}, n=2, max_num_batched_tokens=4, max_tokens=2)
    assert lessons(text) == [
        *INTRODUCTION,
        "PREFILL",
        "CHUNKED PREFILL",
        "SEVERAL ANSWERS",
        "COPY ON WRITE",
        "DECODE",
        "CACHED BUT FREE",
    ]
    words = words_of_lessons(text)
    assert "A gets 4 of it; its 3 other tokens come in later steps" in words
    assert "A and A.1 both start from it: both tables name blocks 0 1." in words
    assert "A is about to write its next token into block 1, which others use too. So it gets a copy" in words


def test_a_contiguous_cache_shows_its_empty_slots() -> None:
    text = explain({"Hello": "you"}, cache="contiguous", max_model_len=24, num_kv_blocks=2, max_tokens=3)
    assert "  pool     0      A      │H│e│l│l│o│ 19 of 24 slots empty\n           1      free" in step(text, 1)
    assert "Waste: 75 % of the slots in use held nothing." in text
    assert "contiguous:" not in text


def test_a_block_that_is_handed_out_again_shows_nothing_of_its_last_owner() -> None:
    answers = {"abcdefg": "h", "klmnopq": "r"}
    text = explain(answers, max_tokens=1, num_kv_blocks=2, max_num_batched_tokens=4, stagger=2)
    assert "           1      A      │e│f│g│·│\n" not in step(text, 3)
    assert "  pool     0      B      │·│·│·│·│\n           1      B      │k│l│m│n│\n" in step(text, 3)


def test_the_slots_that_the_step_has_written_are_shown_in_reverse() -> None:
    block = BlockView(number=7, owners=("A",), token_ids=(0, 1, 2), num_new=2, is_cached=False)
    (line,) = draw_pool([block], 4, "abc".__getitem__, lambda name: Style(color="red"))
    assert line.plain == "7      A      │a│b│c│·│"
    reversed_parts = [line.plain[s.start : s.end] for s in line.spans if isinstance(s.style, Style) and s.style.reverse]
    assert reversed_parts == ["b", "c"]


def test_control_characters_and_wide_texts_stay_on_their_line() -> None:
    console = Console(file=io.StringIO(), width=60)
    text = explain({"a" * 40: "b" * 40}, console=console, max_tokens=4, num_kv_blocks=20)
    assert all(len(line) <= 60 for line in text.splitlines())
    assert '"…aaaaaaaaaaaaaaaa" → "bbbb"' in text


def test_colour_on_a_terminal_plain_elsewhere() -> None:
    coloured = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard")
    plain = explain({"Hello": "you"})
    assert "\x1b[" in explain({"Hello": "you"}, console=coloured)
    assert "\x1b" not in plain


def test_a_terminal_without_unicode_gets_ascii() -> None:
    class AsciiFile(io.StringIO):
        encoding = "ascii"

    text = explain({"Hello" * 10: "you"}, console=Console(file=AsciiFile(), width=60), num_kv_blocks=20)
    assert text.isascii()
    assert "|H|e|l|l|" in text


def test_letters() -> None:
    assert [letters(index) for index in (0, 25, 26, 27, 51, 52, 701, 702)] == [
        "A", "Z", "AA", "AB", "AZ", "BA", "ZZ", "AAA",
    ]  # fmt: skip


# ---- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Runs the command on a written engine; holds the configs that it asked for."""
    seen: list[EngineConfig] = []

    def start(config: EngineConfig, terminal: object, listener: Any) -> Any:
        seen.append(config)
        options = {name: getattr(config, name) for name in ("block_size", "num_kv_blocks", "max_model_len")}
        return written_engine({"Hello": ("you there", "me here", "us")}, listener, **options)

    monkeypatch.setattr("mini_vllm.commands.explain.start_engine", start)
    return seen


def test_the_command_has_a_small_pool_and_writes_a_trace(configs: list[EngineConfig], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["explain", "Hello", "--trace", str(tmp_path / "t.json")])
    assert result.exit_code == 0, result.output
    assert (configs[0].block_size, configs[0].num_kv_blocks, configs[0].max_model_len) == (4, 12, 48)
    assert '  texts    A      "Hello" → "you ther"\n' in result.output
    names = {entry["name"] for entry in json.loads((tmp_path / "t.json").read_text())}
    assert {"step 8", "prefill", "decode", "blocks"} <= names


def test_the_flags_reach_engine_and_request(configs: list[EngineConfig]) -> None:
    flags = ["--block-size", "2", "--num-kv-blocks", "20", "--max-tokens", "2", "--n", "3", "--max-num-seqs", "9"]
    result = CliRunner().invoke(app, ["explain", "Hello", *flags])
    assert result.exit_code == 0, result.output
    assert (configs[0].block_size, configs[0].num_kv_blocks, configs[0].max_num_seqs) == (2, 20, 9)
    assert all(f'"Hello" → "{answer}"\n' in result.output for answer in ("yo", "me", "us"))


def test_step_waits_for_enter_until_the_input_ends(configs: list[EngineConfig]) -> None:
    result = CliRunner().invoke(app, ["explain", "Hello", "--step", "--max-tokens", "6"], input="\n\n")
    assert result.exit_code == 0, result.output
    assert result.output.count("Enter for the next step") == 3  # the third one meets the end
    assert "after 6 steps" in result.output


@pytest.mark.usefixtures("configs")
def test_a_prompt_that_does_not_fit_is_refused_with_the_flag_that_helps() -> None:
    result = CliRunner().invoke(app, ["explain", "Hello" * 10])
    assert isinstance(result.exception, InvalidRequestError)
    assert "50 tokens" in str(result.exception)
    assert "12 blocks of 4 tokens, and --num-kv-blocks makes it larger" in str(result.exception)


@pytest.mark.usefixtures("configs")
def test_a_run_without_a_cache_has_nothing_to_show() -> None:
    result = CliRunner().invoke(app, ["explain", "Hello", "--cache", "none"])
    assert isinstance(result.exception, InvalidConfigError)
