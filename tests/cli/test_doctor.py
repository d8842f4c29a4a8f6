"""The doctor: every line, and what it says of machines that lack something."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from parbank.cli import doctor
from parbank.cli.doctor import Finding, examine
from parbank.ops import backend

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def by_subject() -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine()}


def test_every_question_has_an_answer() -> None:
    found = by_subject()
    assert list(found) == [
        "Python", "PyTorch", "GPU", "GPU processes", "Triton", "Attention", "C compiler", "Memory", "Disk",
        "Cache", "Extras",
    ]  # fmt: skip
    for finding in found.values():
        assert finding.found
        assert finding.status != "bad" or finding.remedy, f"{finding.subject}: something is broken, and nothing to do?"
    assert torch.__version__ in found["PyTorch"].found
    assert "GiB free" in found["Memory"].found
    assert "GiB free" in found["Disk"].found


@no_gpu
def test_a_machine_without_a_gpu_is_no_broken_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(shutil, "which", lambda name: None)  # neither a driver nor a compiler
    found = by_subject()
    assert found["GPU"] == Finding(
        "GPU", "note", "none; training runs on the CPU", "small recipes work: parbank train --recipe demo"
    )
    assert found["C compiler"].status == "note"
    assert found["GPU processes"].status == "ok"
    assert not [finding for finding in found.values() if finding.status == "bad"]


@no_gpu
def test_a_driver_under_a_cpu_build_and_a_cuda_build_without_a_gpu_are_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '4242, python train.py, 70000 MiB'\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.version, "cuda", None)
    found = by_subject()
    assert (found["GPU"].status, found["GPU"].remedy) == ("bad", "install a CUDA build of torch")
    assert found["GPU processes"].status == "bad"
    assert "process 4242 (python train.py) holds 70000 MiB" in found["GPU processes"].found
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "CUDA_VISIBLE_DEVICES" in by_subject()["GPU"].remedy


@no_gpu
def test_a_triton_that_hoppers_kernels_were_not_tried_with_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for there, status in ((False, "note"), (True, "ok")):
        monkeypatch.setattr(backend, "HAS_GLUON", there)
        found = doctor._triton()
        assert found.status == status
        assert ("3.6" in found.remedy) == (not there)


def test_a_cache_that_cannot_be_written_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PARBANK_CACHE", str(tmp_path / "file" / "cache"))
    found = by_subject()["Cache"]
    assert found.status == "bad"
    assert "PARBANK_CACHE" in found.remedy
    monkeypatch.setenv("PARBANK_CACHE", "")  # empty means not set
    monkeypatch.setenv("HOME", str(tmp_path))
    assert by_subject()["Cache"].found == str(tmp_path / ".cache" / "parbank")


def test_an_old_torch_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    found = by_subject()["PyTorch"]
    assert (found.status, found.remedy) == ("bad", "parbank needs torch 2.11 or newer: pip install -U torch")
    monkeypatch.setattr(torch, "__version__", "3.0.0a0+git")
    assert by_subject()["PyTorch"].status == "ok"


def test_a_check_that_fails_is_reported_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(path: object) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(shutil, "disk_usage", explode)
    found = examine()
    assert Finding("disk", "note", "could not be checked: no such device") in found
    assert len(found) == 11


def test_memory_is_within_the_machine() -> None:
    available, total = doctor._free_memory()
    assert 0 <= available <= total < 2**50
