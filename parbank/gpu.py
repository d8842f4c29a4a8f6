"""The current GPU, and two queries of nvidia-smi: the processes on a GPU, and samples of its clock and power.

A process left over from an earlier run takes memory and time: 2 to 3 times slower runs in parameter-golf
#670.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

_FIELDS = "pid,process_name,used_memory"
_SECONDS = 20  # nvidia-smi takes several where no process keeps the driver loaded


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes it the current device. Triton launches and captures use that one; a tensor may live on another."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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
        command.append(_name_card(device))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    found = [process for line in done.stdout.splitlines() if (process := _parse(line)) is not None]
    return [process for process in found if process.pid != os.getpid() and not _is_sibling(process.pid)]


def start_sampling(device: torch.device, fields: Iterable[str], *, milliseconds: int) -> subprocess.Popen[str] | None:
    """nvidia-smi as a process that prints these fields of one GPU again and again, a line each time, for `read_sample`.
    None on a CPU and where nvidia-smi is missing."""
    if device.type != "cuda" or not shutil.which("nvidia-smi"):
        return None
    query = [_name_card(device), f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    command = ["nvidia-smi", *query, "-lms", str(milliseconds)]
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None


def read_sample(line: str, fields: Mapping[str, str]) -> dict[str, float]:
    """One line of nvidia-smi, by the names of the fields. Empty where it was cut off, or says [N/A]."""
    try:
        values = [float(value) for value in line.split(",")]
    except ValueError:
        return {}
    return dict(zip(fields, values)) if len(values) == len(fields) else {}


def _name_card(device: torch.device) -> str:
    """The card by its UUID: CUDA_VISIBLE_DEVICES renumbers the cards for CUDA, but not for nvidia-smi."""
    return f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"


def _parse(line: str) -> GpuProcess | None:
    """One line of the list, whose names may contain commas. None for any other line, such as a message of nvidia-smi."""
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
