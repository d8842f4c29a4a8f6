"""Other processes on a GPU are found and named; this process and the other ranks of its run are not."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from parbank.gpu import GpuProcess, other_processes, read_sample, start_sampling
from parbank.study.machine import ClockWatch


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


def test_a_sample_is_read_and_a_message_is_not() -> None:
    fields = {"clock": "clocks.sm", "power": "power.draw"}
    assert read_sample("1980, 412.35\n", fields) == {"clock": 1980.0, "power": 412.35}
    for line in ("", "[N/A], 3", "1980", "Unable to determine the device handle", "1, 2, 3"):
        assert read_sample(line, fields) == {}


def test_samples_are_those_of_one_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, benchmark: Callable[[str], ModuleType]
) -> None:
    """By the function itself, and by the two that take medians of what it gives."""
    asked = pretend(monkeypatch, tmp_path, "1200, 100, 40\n1800, 300, 50\n1600, 200, 60\n")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    card = torch.device("cuda", 0)
    process = start_sampling(card, ["clocks.sm"], milliseconds=250)
    assert process is not None
    process.communicate()
    words = asked.read_text(encoding="utf-8").split()
    assert {"--id=GPU-12-34", "--query-gpu=clocks.sm", "-lms", "250"} <= set(words)
    assert start_sampling(torch.device("cpu"), ["clocks.sm"], milliseconds=250) is None

    with ClockWatch(card) as study:
        wait_for(study._process)
    assert study.found == {"clock_mhz": 1600, "power_w": 200, "temperature_c": 50, "lowest_clock_mhz": 1200}
    pretend(monkeypatch, tmp_path, "1200, 100\n1200, 100\n1800, 300\n1600, 200\n")
    with benchmark("clocks").Watch() as later:
        wait_for(later._process)
    assert (later.clock, later.power) == (1700, 250)


def wait_for(process: subprocess.Popen[str] | None) -> None:
    assert process is not None
    process.wait()


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
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    assert start_sampling(torch.device("cuda", 0), ["clocks.sm"], milliseconds=250) is None
    (tmp_path / "nvidia-smi").write_text("not a program")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert other_processes() == []
    assert start_sampling(torch.device("cuda", 0), ["clocks.sm"], milliseconds=250) is None
