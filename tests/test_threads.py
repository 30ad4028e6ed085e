"""Threads: what the user says, else PyTorch's choice, never more than a container's quota."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mini_vllm.worker import threads
from mini_vllm.worker.threads import quota_of_cores, settle_threads


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("max 100000", None), ("?", None)],
)
def test_a_quota_is_read_in_whole_cores(text: str, cores: int | None, tmp_path: Path) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(text)
    assert quota_of_cores(file) == cores


def test_without_such_a_file_there_is_no_quota(tmp_path: Path) -> None:
    assert quota_of_cores(tmp_path / "none") is None


@pytest.mark.parametrize(("asked", "quota", "expected"), [(3, 1, 3), (None, 2, 2), (None, 8, 4), (None, None, 4)])
def test_the_user_wins_then_the_quota(
    asked: int | None, quota: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(4)
    monkeypatch.setattr(threads, "quota_of_cores", lambda: quota)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    settle_threads(asked)
    assert torch.get_num_threads() == expected
