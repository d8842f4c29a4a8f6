"""Rows of metrics, written every `train.log_every` steps."""

import math
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from parbank.training.gpu_sampler import GpuSampler
from parbank.training.loggers import LOGGERS, Logger
from parbank.training.telemetry import Reading
from parbank.training.trainer import Trainer


@dataclass(frozen=True)
class _Mark:
    """The state of the trainer at the last row."""

    step: int
    tokens: int
    seconds: float
    wait_seconds: float


class Metrics:
    """Makes one row over the steps since the last row, and passes it to every logger. Only the first rank has loggers."""

    def __init__(self, trainer: Trainer, say: Callable[[str], None] = lambda line: None) -> None:
        self._trainer, self._say = trainer, say
        self._last = self._mark(trainer.step, trainer.tokens)
        self.tokens_per_second = 0.0
        """Over the steps of the last row."""
        self._gpu = GpuSampler(trainer.runtime.device) if trainer.runtime.is_main else None
        names = trainer.config.train.loggers if trainer.runtime.is_main else ()
        self._loggers: dict[str, Logger] = {}
        for name in names:
            with self._dropped_if_it_fails(name):
                self._loggers[name] = LOGGERS[name](trainer.out, resume_step=trainer.step)

    @property
    def step(self) -> int:
        """Steps that were done when the last row was made."""
        return self._last.step

    def add(self, reading: Reading) -> None:
        """A row that ends with this step."""
        trainer, last = self._trainer, self._last
        now = self._last = self._mark(reading.step + 1, reading.tokens)
        self.tokens_per_second = (now.tokens - last.tokens) / max(now.seconds - last.seconds, 1e-9)
        row = {
            "step": now.step,
            "tokens": now.tokens,
            "seconds": now.seconds,
            "loss": reading.loss,
            "lr": reading.lr_share * trainer.optimizer.param_groups[0]["peak_lr"],  # the matrices' learning rate
            "grad_norm": reading.grad_norm,
            "tokens_per_second": self.tokens_per_second,
            "data_wait": (now.wait_seconds - last.wait_seconds) / (now.step - last.step),
            "memory": memory_bytes(trainer.runtime.device),
            "skipped": trainer.skipped,
        }
        row |= self._gpu.latest() if self._gpu is not None else {}
        row |= {} if reading.val_bpb is None else {"val_bpb": reading.val_bpb}
        for name, logger in list(self._loggers.items()):
            with self._dropped_if_it_fails(name):
                logger.write(finite(row))

    def write_details(self, details: dict[str, Any]) -> None:
        """Passes the details of a finished run to every logger."""
        for name, logger in list(self._loggers.items()):
            with self._dropped_if_it_fails(name):
                logger.write_details(self.step, details)

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.close()
        for name, logger in list(self._loggers.items()):
            with self._dropped_if_it_fails(name):
                logger.close()

    @contextmanager
    def _dropped_if_it_fails(self, name: str) -> Iterator[None]:
        """A logger may fail in any way, such as on a full disk, without failing the run."""
        try:
            yield
        except Exception as error:
            if (dropped := self._loggers.pop(name, None)) is not None:
                with suppress(Exception):
                    dropped.close()
            self._say(f"warning: the logger {name} failed and is dropped ({type(error).__name__}: {error})")

    def _mark(self, step: int, tokens: int) -> _Mark:
        return _Mark(step, tokens, self._trainer.clock.seconds(), self._trainer.batches.wait_seconds)


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """The row with None for every non-finite number, such as the loss of a skipped step: JSON has no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in row.items()}


def memory_bytes(device: torch.device) -> int:
    """Peak memory so far: the device's on CUDA, the process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux, bytes on macOS
