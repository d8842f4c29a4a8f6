"""Other processes on a GPU. A process left over from an earlier run takes memory and time: runs were 2 to 3 times slower."""

import contextlib
import os
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

_FIELDS = "pid,process_name,used_memory"
_SECONDS = 20  # nvidia-smi takes several where no process keeps the driver loaded


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU, as nvidia-smi lists it."""

    pid: int
    name: str
    memory: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name}) holds {self.memory}"


def other_processes(device: torch.device | None = None) -> list[GpuProcess]:
    """The processes on one GPU, or on all of them, beside this process and the other ranks of its run. Empty where
    nvidia-smi is missing or fails."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-compute-apps={_FIELDS}", "--format=csv,noheader"]
    if device is not None and device.type == "cuda":
        command.append(f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    found = [process for line in done.stdout.splitlines() if (process := _parse(line)) is not None]
    return [process for process in found if process.pid != os.getpid() and not _is_sibling(process.pid)]


def _parse(line: str) -> GpuProcess | None:
    """One line of the list. A name may contain commas; a message of nvidia-smi is no line of the list."""
    pid, _, rest = line.partition(",")
    name, _, memory = rest.rpartition(",")
    return GpuProcess(int(pid), name.strip(), memory.strip()) if pid.strip().isdigit() and name else None


def _is_sibling(pid: int) -> bool:
    """Whether a process is another rank of this run: torchrun starts all ranks of a machine."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return f"PPid:\t{os.getppid()}\n" in status


_SAMPLED = {"gpu_clock_mhz": "clocks.sm", "gpu_power_w": "power.draw"}
_SAMPLED_EVERY = "1000"  # milliseconds


class GpuSampler:
    """The clock and the power of a GPU, as nvidia-smi last gave them. Empty on a CPU and without nvidia-smi.

    nvidia-smi runs beside the training loop and prints a line a second; a thread keeps the last one.
    """

    def __init__(self, device: torch.device) -> None:
        self._latest: dict[str, float] = {}
        self._process: subprocess.Popen[str] | None = None
        if device.type != "cuda" or not shutil.which("nvidia-smi"):
            return
        card = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
        query = f"--query-gpu={','.join(_SAMPLED.values())}"
        command = ["nvidia-smi", card, query, "--format=csv,noheader,nounits", "-lms", _SAMPLED_EVERY]
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self._thread = threading.Thread(target=self._read, daemon=True, name="gpu-sampler")
            self._thread.start()

    def latest(self) -> dict[str, float]:
        return dict(self._latest)

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._thread.join()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if found := read_sample(line):
                    self._latest = found


def read_sample(line: str) -> dict[str, float]:
    """One line of nvidia-smi. Empty where it was cut off, or says [N/A]."""
    try:
        values = [float(value) for value in line.split(",")]
    except ValueError:
        return {}
    return dict(zip(_SAMPLED, values)) if len(values) == len(_SAMPLED) else {}
