"""A file is on the disk before it has its name: after a power cut the old one or the whole new one is there."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parbank.files import write_file, write_json
from parbank.training.checkpoint import save_checkpoint


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What reaches the disk, in order: (what, inode, bytes of the file by then)."""
    found: list[tuple[str, int, int]] = []
    fsync, replace = os.fsync, os.replace

    def watch_fsync(handle: int) -> None:
        fsync(handle)
        about = os.fstat(handle)
        found.append(("folder" if stat.S_ISDIR(about.st_mode) else "file", about.st_ino, about.st_size))

    def watch_replace(source: Any, target: Any) -> None:
        about = os.stat(source)
        found.append(("rename", about.st_ino, about.st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "replace", watch_replace)
    return found


def _write_checkpoint(path: Path) -> None:
    save_checkpoint(path.parent, {"step": 7, "model": {"weight": torch.arange(1000)}}, keep=1)


WRITERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "bytes": ("model.pbk", lambda path: write_file(path, bytes(5000))),
    "json": ("summary.json", lambda path: write_json(path, {"val_bpb": 1.0})),
    "a checkpoint": ("step_00000007.pt", _write_checkpoint),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_contents_are_synced_before_the_rename(kind: str, calls: list[tuple[str, int, int]], tmp_path: Path) -> None:
    name, write = WRITERS[kind]
    write(tmp_path / name)
    about = os.stat(tmp_path / name)
    assert about.st_size > 0
    synced, renamed = ("file", about.st_ino, about.st_size), ("rename", about.st_ino, about.st_size)
    assert synced in calls, "every byte of it"
    assert renamed in calls
    assert calls.index(synced) < calls.index(renamed)


@pytest.mark.parametrize("kind", WRITERS)
def test_the_new_name_is_synced_too(kind: str, calls: list[tuple[str, int, int]], tmp_path: Path) -> None:
    name, write = WRITERS[kind]
    write(tmp_path / name)
    assert [what for what, *_ in calls] == ["file", "rename", "folder"]
    assert calls[-1][1] == os.stat(tmp_path).st_ino
