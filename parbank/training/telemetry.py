"""Reads numbers from the device without waiting for it.

Each step's loss, gradient norm and skip count are copied to pinned memory behind the step's own work. The host polls
for finished copies and reads them. It waits on log steps only, and there for the step before, so that the device
still has the last step to work on. Two events on the device measure the time of a step, however far ahead the host
is. On a CPU a step's numbers are read at once.
"""

import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

# Steps that may be in flight between two log steps. With hundreds of launches a step, the driver's queue of about a thousand
# is full long before. This only bounds the memory of a run that logs rarely and replays graphs.
SLOTS = 64


@dataclass(frozen=True)
class Reading:
    """The numbers of one finished step."""

    step: int
    lr_share: float
    loss: float
    grad_norm: float
    skipped: int
    skipped_in_a_row: int
    seconds: float
    """From the end of the step before (the start of the loop for the first) to the end of this one, on the device's clock."""
    tokens: int = 0
    """All tokens trained on up to the end of this step."""
    val_bpb: float | None = None
    """The score of the validation after this step, if there was one."""


@dataclass(frozen=True)
class _Time:
    """A moment, on the device's clock if it has one, else on the host's."""

    event: "torch.cuda.Event | None"
    host: float

    @staticmethod
    def now(cuda: bool) -> "_Time":
        event = torch.cuda.Event(enable_timing=True) if cuda else None
        if event is not None:
            event.record()
        return _Time(event, time.perf_counter())

    def reached(self, *, wait: bool) -> bool:
        """Whether the device has reached it; with `wait`, waits for that."""
        if self.event is not None and not self.event.query():
            if not wait:
                return False
            self.event.synchronize()
        return True

    def since(self, other: "_Time") -> float:
        if self.event is not None and other.event is not None:
            return other.event.elapsed_time(self.event) / 1e3
        return self.host - other.host


class Telemetry:
    """A queue of steps whose numbers are still being copied."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._queue: deque[tuple[int, float, int, Tensor, _Time]] = deque()
        self._pinned = torch.empty(SLOTS, 4, dtype=torch.float64, pin_memory=True) if self._cuda else None
        self._slot = 0
        self.restart()

    @property
    def in_flight(self) -> int:
        return len(self._queue) if self._cuda else 0

    def restart(self) -> None:
        """Call it when the loop starts: the first step is timed from here."""
        assert not self._queue
        self._last = _Time.now(self._cuda)

    def record(
        self,
        step: int,
        lr_share: float,
        loss: Tensor,
        grad_norm: Tensor,
        skipped: Tensor,
        skipped_in_a_row: Tensor,
        *,
        tokens: int = 0,
    ) -> None:
        values = torch.stack([t.detach().double().reshape(()) for t in (loss, grad_norm, skipped, skipped_in_a_row)])
        if self._pinned is not None:
            assert len(self._queue) < SLOTS  # `collect` sees to it
            values = self._pinned[self._slot].copy_(values, non_blocking=True)
            self._slot = (self._slot + 1) % SLOTS
        self._queue.append((step, lr_share, tokens, values, _Time.now(self._cuda)))

    def collect(self, *, wait: bool = False, drain: bool = False) -> list[Reading]:
        """The steps that have finished. `wait` waits for all but the last queued step, `drain` for that one too."""
        readings = []
        while self._queue:
            step, lr_share, tokens, values, mark = self._queue[0]
            if not mark.reached(wait=drain or (wait and len(self._queue) > 1) or len(self._queue) == SLOTS):
                break
            self._queue.popleft()
            loss, norm, skipped, row = values.tolist()
            seconds = mark.since(self._last)
            readings.append(Reading(step, lr_share, loss, norm, int(skipped), int(row), seconds, tokens))
            self._last = mark
        return readings
