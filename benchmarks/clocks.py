"""The clock and the power of the GPU while something runs, from nvidia-smi: shared by step.py and energy.py."""

import statistics
import subprocess
from types import TracebackType

import torch

from parbank.gpu import read_sample, start_sampling

_FIELDS = {"clock": "clocks.sm", "power": "power.draw"}
_EVERY = 100  # milliseconds between samples


class Watch:
    """`with Watch() as watch: ...`, then `watch.clock` (MHz) and `watch.power` (W): medians over the later half of the time,
    when clocks have settled. None where nvidia-smi is missing or had no time to answer."""

    def __init__(self) -> None:
        self.clock: float | None = None
        self.power: float | None = None
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Watch":
        device = torch.device("cuda", torch.cuda.current_device())
        self._process = start_sampling(device, _FIELDS.values(), milliseconds=_EVERY)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        self._process.terminate()
        lines = self._process.communicate()[0].splitlines()
        samples = [sample for line in lines if (sample := read_sample(line, _FIELDS))]
        if later := samples[len(samples) // 2 :]:
            self.clock, self.power = (statistics.median(sample[name] for sample in later) for name in _FIELDS)
