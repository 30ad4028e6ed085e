"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from store_helpers import everything_below

from mini_vllm.store.atomic_write import atomic_directory, atomic_file, try_file


def write_half(target: AbstractContextManager[Path]) -> None:
    with target as unfinished:
        (unfinished / "b.txt" if unfinished.is_dir() else unfinished).write_text("ha")
        raise KeyboardInterrupt


def test_a_file_appears_under_its_name_only_when_the_block_has_ended(tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.txt"
    with atomic_file(target) as unfinished:
        unfinished.write_text("whole")
        assert not target.exists()
        assert unfinished.parent == target.parent  # else the rename could cross file systems
    assert target.read_text() == "whole"
    assert everything_below(tmp_path) == ["new", "new/a.txt"]


def test_a_file_replaces_the_one_before_and_an_error_leaves_that_one_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_half(atomic_file(target))
    assert (target.read_text(), everything_below(tmp_path)) == ("old", ["a.txt"])
    with atomic_file(target) as unfinished:
        unfinished.write_text("new")
    assert (target.read_text(), everything_below(tmp_path)) == ("new", ["a.txt"])


def test_a_file_can_be_tried_without_a_trace(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    try_file(target)
    try_file(tmp_path / "new" / "b.txt")
    assert (target.read_text(), everything_below(tmp_path)) == ("old", ["a.txt"])


@pytest.mark.parametrize("name", ["folder", "pipe", "file/a.txt", "x" * 250])
def test_a_file_that_cannot_be_written_is_found_out_by_a_trial(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError):  # noqa: PT011  (each has a reason of its own)
        try_file(tmp_path / name)
    assert everything_below(tmp_path) == ["file", "folder", "pipe"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_found_out_by_a_trial(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        try_file(tmp_path / "a.txt")


def test_a_folder_appears_under_its_name_only_when_the_block_has_ended(tmp_path: Path) -> None:
    target = tmp_path / "new" / "model"
    with atomic_directory(target) as unfinished:
        (unfinished / "sub").mkdir()
        (unfinished / "sub" / "b.txt").write_text("b")
        assert not target.exists()
    assert everything_below(tmp_path) == ["new", "new/model", "new/model/sub", "new/model/sub/b.txt"]


def test_an_error_while_a_folder_is_filled_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_half(atomic_directory(tmp_path / "model"))
    assert everything_below(tmp_path) == []


def test_of_two_writers_of_a_folder_the_first_to_end_wins_and_the_other_does_no_harm(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_directory(target) as slow:
        (slow / "b.txt").write_text("slow")
        with atomic_directory(target) as quick:
            (quick / "b.txt").write_text("quick")
    assert (target / "b.txt").read_text() == "quick"
    assert everything_below(tmp_path) == ["model", "model/b.txt"]


def test_a_file_where_the_folder_should_be_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("a file")
    with pytest.raises(OSError, match="model"), atomic_directory(tmp_path / "model"):
        pass
    assert everything_below(tmp_path) == ["model"]


@pytest.mark.parametrize("kind", [atomic_file, atomic_directory])
def test_leftovers_of_killed_writers_are_removed_after_a_day_and_not_before(tmp_path: Path, kind: object) -> None:
    yesterday = time.time() - 25 * 3600
    for name, modified in (
        (".m.unfinished-old", yesterday),
        (".m.unfinished-now", None),
        (".n.unfinished-x", yesterday),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("half")
        if modified is not None:
            os.utime(tmp_path / name / "part", (modified, modified))
            os.utime(tmp_path / name, (modified, modified))
    (tmp_path / ".m.unfinished-file").write_text("half")
    os.utime(tmp_path / ".m.unfinished-file", (yesterday, yesterday))
    if kind is atomic_file:
        with atomic_file(tmp_path / "m") as unfinished:
            unfinished.write_text("whole")
    else:
        with atomic_directory(tmp_path / "m"):
            pass
    assert sorted(os.listdir(tmp_path)) == [".m.unfinished-now", ".n.unfinished-x", "m"]


def test_content_is_on_the_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, rename, replace = os.fsync, Path.rename, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append("flush"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("rename"), replace(*paths)))
    monkeypatch.setattr(Path, "rename", lambda *paths: (calls.append("rename"), rename(*paths)))
    flush_of_the_folder = ["flush"] if os.name == "posix" else []
    with atomic_file(tmp_path / "a") as unfinished:
        unfinished.write_text("a")
    assert calls == ["flush", "rename", *flush_of_the_folder]
    calls.clear()
    with atomic_directory(tmp_path / "b") as unfinished:
        (unfinished / "1").write_text("1")
        (unfinished / "2").write_text("2")
    assert calls == ["flush", "flush", "rename", *flush_of_the_folder]
