"""The clock and the power of the GPU while something runs, as nvidia-smi gives them."""

import shutil
import statistics
import subprocess
from types import TracebackType

import torch

_FIELDS = "clocks.sm,power.draw"
_EVERY = "100"  # milliseconds between samples


class Watch:
    """`with Watch() as watch: ...`, then `watch.clock` (MHz) and `watch.power` (W): medians over the later half of the time,
    when clocks have settled. None where nvidia-smi is missing or had no time to answer."""

    def __init__(self) -> None:
        self.clock: float | None = None
        self.power: float | None = None
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Watch":
        if shutil.which("nvidia-smi"):
            # By its UUID: CUDA_VISIBLE_DEVICES renumbers the cards for CUDA, and not for nvidia-smi.
            card = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
            command = [
                "nvidia-smi",
                "-i",
                card,
                f"--query-gpu={_FIELDS}",
                "--format=csv,noheader,nounits",
                "-lms",
                _EVERY,
            ]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        self._process.terminate()
        samples = list(filter(None, map(_read, self._process.communicate()[0].splitlines())))
        if later := samples[len(samples) // 2 :]:
            self.clock, self.power = (statistics.median(column) for column in zip(*later, strict=True))


def _read(line: str) -> tuple[float, float] | None:
    """A sample; None for a line that was cut off, or a card that does not tell."""
    try:
        clock, power = map(float, line.split(","))
    except ValueError:
        return None
    return clock, power
