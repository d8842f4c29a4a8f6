"""Clock and power beside a run: the last line of nvidia-smi, and nothing where there is none."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parbank.training.gpu_sampler import GpuSampler


def test_a_cpu_has_no_samples() -> None:
    sampler = GpuSampler(torch.device("cpu"))
    assert sampler.latest() == {}
    sampler.close()


def test_the_last_sample_is_kept_and_the_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$@" > "$0.arguments"\necho "[N/A], [N/A]"\necho "1800, 300.5"\nexec sleep 60\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    sampler = GpuSampler(torch.device("cuda"))
    try:
        until = time.monotonic() + 60
        while not sampler.latest() and time.monotonic() < until:
            time.sleep(0.02)
        assert sampler.latest() == {"gpu_clock_mhz": 1800.0, "gpu_power_w": 300.5}
        assert "--id=GPU-12-34" in (tmp_path / "nvidia-smi.arguments").read_text()
    finally:
        sampler.close()
    assert sampler._process is not None
    assert sampler._process.poll() is not None


@pytest.mark.gpu
def test_a_real_gpu_has_a_clock_and_a_power() -> None:
    sampler = GpuSampler(torch.device("cuda"))
    try:
        until = time.monotonic() + 60
        while not sampler.latest() and time.monotonic() < until:
            time.sleep(0.1)
        assert sampler.latest()["gpu_clock_mhz"] > 100
    finally:
        sampler.close()
