"""The interface of a kind of study."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from parbank.display import Display
from parbank.runtime import Runtime
from parbank.study.machine import ClockWatch
from parbank.study.study import Job, Study
from parbank.training.compiled import count_kernels, count_lookups


class Kind(ABC):
    """Runs jobs in one process: data, compiled kernels and all else that jobs share are made once."""

    name: ClassVar[str]
    unit: ClassVar[str] = "bits/byte"
    """The unit of the measured value. Lower is better in every kind."""

    def __init__(self, runtime: Runtime, folder: Path, display: Display) -> None:
        self.runtime, self.folder, self.display = runtime, folder, display
        # a bar on a terminal; elsewhere lines of every training step would hide those of the study
        self.bar = display if display.console.is_terminal else Display(enabled=False)
        self.kept: dict[Any, Any] = {}
        """What later jobs use again, such as opened data."""

    @contextmanager
    def watching(self) -> Iterator[dict[str, Any]]:
        """Fills its dict, after the block, with entries that every result has: clock and power of the GPU, and how
        many kernels and graphs were compiled inside, where a clock runs."""
        found: dict[str, Any] = {}
        count_kernels()
        before = count_lookups().built
        with ClockWatch(self.runtime.device) as watch:
            yield found
        found |= {"gpu": watch.found, "recompilations": count_lookups().built - before}

    @classmethod
    @abstractmethod
    def check(cls, study: Study) -> None:
        """Raises an error if an arm cannot run, before anything does."""

    @abstractmethod
    def measure(self, study: Study, job: Job) -> dict[str, Any]:
        """Runs one job. Returns at least `value`, and `seconds`, `tokens_per_second` and `bytes` where there are any."""
