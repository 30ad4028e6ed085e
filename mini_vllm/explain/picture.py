"""The picture: block tables as lists of numbers, and the pool that the numbers point into.

Where it stands: drawn by the narrator after every step. It needs no colour to be read; colours say the same once more.

    tables  A      [0, 1]        6 tokens in the pool, 1 to compute
            B      [0, 2]        5 tokens in the pool, 1 to compute
    pool    0      A B     │The│ capital│ of│ France│
            1      A       │ is│ Paris│·│·│
            2      B       │ and│·│·│·│
            3      cached  │Once│ upon│ a│ time│
            4-11   free

In vLLM: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from rich.style import Style
from rich.text import Text

from mini_vllm.explain.observer import BlockView, TableView
from mini_vllm.explain.story import one_line

MOST_SLOTS_SHOWN = 16
DIM = Style(dim=True)
_PALETTE = ("cyan", "magenta", "green", "yellow", "blue", "red")


def style_of(name: str, request_names: Sequence[str]) -> Style:
    """A request's colour; its siblings have the same one."""
    place = request_names.index(name.split(".")[0])
    return Style(color=_PALETTE[place % len(_PALETTE)], bold=True)


def draw_tables(tables: Iterable[TableView], style: Callable[[str], Style]) -> list[Text]:
    """One line a running sequence."""
    rows = [
        (table, "[" + ", ".join(map(str, table.blocks)) + "]", _in_the_pool(table.num_computed, table.num_known))
        for table in tables
    ]
    width = max((len(numbers) for _, numbers, _ in rows), default=0)
    lines = []
    for table, numbers, note in rows:
        line = Text(f"{table.name:<6} ", style(table.name))
        lines.append(line.append(f"{numbers:<{width}}", style(table.name)).append(f"   {note}", DIM))
    return lines


def draw_pool(
    pool: Iterable[BlockView], block_size: int, token_text: Callable[[int], str], style: Callable[[str], Style]
) -> list[Text]:
    """One line a block that is used or known; free ones next to each other share a line."""
    blocks = list(pool)
    width = max((len(" ".join(block.owners)) for block in blocks), default=0)
    lines = []
    for is_free, group in groupby(blocks, key=lambda block: not block.owners and not block.is_cached):
        members = list(group)
        if is_free:
            first, last = members[0].number, members[-1].number
            lines.append(Text(f"{first if first == last else f'{first}-{last}':<6} free", DIM))
        else:
            lines += [_draw_block(block, max(width, len("cached")), block_size, token_text, style) for block in members]
    return lines


def _draw_block(
    block: BlockView,
    width: int,
    block_size: int,
    token_text: Callable[[int], str],
    style: Callable[[str], Style],
) -> Text:
    line = Text(f"{block.number:<6} ", DIM if not block.owners else Style(bold=len(block.owners) > 1))
    for name in block.owners:
        line.append(name, style(name)).append(" ")
    if not block.owners:
        line.append("cached ", DIM)
    line.pad_right(8 + width - len(line))
    return _append_slots(line, block, block_size, token_text, _content_style(block, style))


def _content_style(block: BlockView, style: Callable[[str], Style]) -> Style:
    """Private blocks have their owner's colour, shared ones stand out, cached ones step back."""
    if not block.owners:
        return DIM
    return Style(bold=True) if len(block.owners) > 1 else Style(color=style(block.owners[0]).color)


def _append_slots(
    line: Text, block: BlockView, block_size: int, token_text: Callable[[int], str], style: Style
) -> Text:
    """The slots between bars, an empty one as a dot; those that the step has written are shown in reverse."""
    num_tokens = len(block.token_ids)
    first = 0 if block_size <= MOST_SLOTS_SHOWN else max(0, num_tokens - MOST_SLOTS_SHOWN)
    line.append("│…│" if first else "│", style)
    for slot in range(first, num_tokens):
        is_new = slot >= num_tokens - block.num_new
        text = one_line(token_text(block.token_ids[slot]))
        line.append(text, style + Style(reverse=True) if is_new else style).append("│", style)
    num_empty = block_size - num_tokens
    if block_size <= MOST_SLOTS_SHOWN:
        return line.append("·│" * num_empty, style)
    return line.append(f" {num_empty} of {block_size} slots empty", style)


def _in_the_pool(num_computed: int, num_known: int) -> str:
    return f"{num_computed} token{'' if num_computed == 1 else 's'} in the pool, {num_known - num_computed} to compute"
