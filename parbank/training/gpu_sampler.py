"""The clock and the power of a GPU beside a run: a throttled card shows in the metrics."""

import subprocess
import threading

import torch

from parbank.gpu import read_sample, start_sampling

_SAMPLED = {"gpu_clock_mhz": "clocks.sm", "gpu_power_w": "power.draw"}
_SAMPLED_EVERY = 1000  # milliseconds


class GpuSampler:
    """The clock and the power of a GPU, as nvidia-smi last gave them. Empty on a CPU and without nvidia-smi.

    nvidia-smi runs beside the training loop and prints a line a second; a thread keeps the last one.
    """

    def __init__(self, device: torch.device) -> None:
        self._latest: dict[str, float] = {}
        self._process: subprocess.Popen[str] | None = None
        if device.type == "cuda":
            self._process = start_sampling(device, _SAMPLED.values(), milliseconds=_SAMPLED_EVERY)
        if self._process is not None:
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
                if found := read_sample(line, _SAMPLED):
                    self._latest = found
