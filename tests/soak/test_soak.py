"""The soak test, short. SOAK_SECONDS makes it longer, SOAK_SEED another one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from soak import NUM_CLIENTS, run_soak
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
