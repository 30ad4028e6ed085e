"""The soak test, short. SOAK_SECONDS makes it longer, SOAK_SEED another one."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from soak import NUM_CLIENTS, lines_of, run_soak
from traffic import Traffic


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="it reads the server's memory from /proc")
def test_after_a_random_mixture_of_requests_everything_adds_up() -> None:
    report = run_soak(float(os.environ.get("SOAK_SECONDS", "30")), int(os.environ.get("SOAK_SEED", "1")))
    print(report)
    assert not report.problems, str(report)


def test_the_mixture_depends_on_the_seed_alone() -> None:
    def plans(seed: int) -> list[object]:
        return [Traffic(seed, client).next() for client in range(NUM_CLIENTS)]

    assert plans(1) == plans(1) != plans(2)


def test_a_line_of_an_answer_ends_at_a_line_feed_only() -> None:
    """A text that is sampled may hold any character, so what reads it must not break at the rarer ones."""
    text = json.dumps({"text": "a\u0085b\u2028c\u2029d\x7f"}, ensure_ascii=False)

    async def lines(*pieces: str) -> list[str]:
        async def arrive() -> AsyncIterator[str]:
            for piece in pieces:
                yield piece

        return [line async for line in lines_of(arrive())]

    assert asyncio.run(lines(text)) == [text]
    assert asyncio.run(lines("da", "ta: 1\n", "\n" + text[:9], text[9:] + "\n")) == ["data: 1", "", text]
