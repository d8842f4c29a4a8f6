"""Other processes on a GPU are found and named; this process and the other ranks of its run are not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parbank.gpu import GpuProcess, other_processes


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> Path:
    """An nvidia-smi that prints this text, and notes its arguments in a file."""
    tool, asked = folder / "nvidia-smi", folder / "asked"
    (folder / "listed").write_text(text, encoding="utf-8")
    tool.write_text(f'#!/bin/sh\necho "$@" > {asked}\ncat {folder / "listed"}\n', encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return asked


def test_others_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed = f"{os.getpid()}, python, 100 MiB\n4242, /usr/bin/train, really, 70000 MiB\nNo devices were found\n"
    pretend(monkeypatch, tmp_path, listed)
    assert other_processes() == [GpuProcess(4242, "/usr/bin/train, really", "70000 MiB")]
    assert str(other_processes()[0]) == "process 4242 (/usr/bin/train, really) holds 70000 MiB"


def test_only_the_gpu_of_the_run_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Properties:
        uuid = "1234-5678"

    asked = pretend(monkeypatch, tmp_path, "")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert other_processes(torch.device("cuda", 1)) == []
    assert "--id=GPU-1234-5678" in asked.read_text(encoding="utf-8")


def test_other_ranks_are_no_strangers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torchrun is the parent of all ranks. This process plays torchrun's part for its child, which looks for its sibling."""
    sibling = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        pretend(monkeypatch, tmp_path, f"{sibling.pid}, python, 100 MiB\n")
        for world, found in (("1", 1), ("2", 0)):
            monkeypatch.setenv("WORLD_SIZE", world)
            monkeypatch.setattr(os, "getppid", os.getpid)
            assert len(other_processes()) == found
    finally:
        sibling.communicate()


def test_without_the_tool_nothing_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert other_processes() == []
    (tmp_path / "nvidia-smi").write_text("not a program")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert other_processes() == []
