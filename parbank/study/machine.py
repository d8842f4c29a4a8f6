"""The GPU during a run, as nvidia-smi gives it: clock, power, temperature, and other processes on it.

A study compares runs of minutes. A card that throttles, or that another process shares, changes speed by more than most
arms do, so every run stores what the card did.
"""

import statistics
import subprocess
import threading
from types import TracebackType
from typing import Any

import torch

from parbank.gpu import GpuProcess, other_processes, read_sample, start_sampling

_FIELDS = {"clock_mhz": "clocks.sm", "power_w": "power.draw", "temperature_c": "temperature.gpu"}
_EVERY = 500  # milliseconds between samples


class ClockWatch:
    """`with ClockWatch(device) as watch: ...`, then `watch.found`: medians, and the lowest clock. Empty without nvidia-smi.

    A thread reads each sample at once. Otherwise the pipe would be full after half an hour, and nvidia-smi would wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.found: dict[str, float] = {}
        self._device = device
        self._process: subprocess.Popen[str] | None = None
        self._output = ""

    def __enter__(self) -> "ClockWatch":
        self._process = start_sampling(self._device, _FIELDS.values(), milliseconds=_EVERY)
        if self._process is not None:
            self._reader = threading.Thread(target=self._read, daemon=True, name="clock-watch")
            self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        self._process.terminate()
        self._process.wait()
        self._reader.join()
        self.found = summarise(self._output)

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            self._output = lines.read()


def summarise(output: str) -> dict[str, float]:
    """Medians of the samples, and the lowest clock. A line that was cut off, or that says [N/A], is left out."""
    samples = [sample for line in output.splitlines() if (sample := read_sample(line, _FIELDS))]
    if not samples:
        return {}
    medians = {name: statistics.median(sample[name] for sample in samples) for name in _FIELDS}
    return medians | {"lowest_clock_mhz": min(sample["clock_mhz"] for sample in samples)}


class Neighbours:
    """Other processes on a GPU. Make it before this process uses the GPU, then call `settle`, which makes it use it.

    In a container nvidia-smi gives this process another number. So its own are those that appear in between.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = {process.pid for process in self._list()}
        self._own: set[int] = set()

    def settle(self) -> None:
        if self._device.type == "cuda":
            torch.zeros(1, device=self._device)  # from now on this process is listed
            self._own = {process.pid for process in self._list()} - self._before

    def others(self) -> list[str]:
        return [f"{process.pid} ({process.name})" for process in self._list() if process.pid not in self._own]

    def _list(self) -> list[GpuProcess]:
        return other_processes(self._device) if self._device.type == "cuda" else []


def describe_machine(device: torch.device) -> dict[str, Any]:
    return {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
