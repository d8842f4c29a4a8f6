"""Numbers from the device without waiting for the device.

Each step's loss, gradient norm and skip count are copied to pinned memory behind the step's own work and read when the
copy has landed. At most DEPTH steps are in flight: enough that the GPU never idles, few enough that the host's clock
stays honest. On a CPU everything has happened already, and a step's numbers are read at once.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

DEPTH = 2


@dataclass(frozen=True)
class Reading:
    """What one finished step reported."""

    step: int
    lr_share: float
    loss: float
    grad_norm: float
    skipped: int
    skipped_in_a_row: int


class Telemetry:
    """A short queue of steps whose numbers are on their way."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._queue: deque[tuple[int, float, Tensor, torch.cuda.Event | None]] = deque()
        self._pinned = (
            [torch.empty(4, dtype=torch.float64, pin_memory=True) for _ in range(DEPTH + 1)] if self._cuda else []
        )

    @property
    def in_flight(self) -> int:
        return len(self._queue) if self._cuda else 0

    def record(
        self, step: int, lr_share: float, loss: Tensor, grad_norm: Tensor, skipped: Tensor, skipped_in_a_row: Tensor
    ) -> None:
        values = torch.stack([t.detach().double().reshape(()) for t in (loss, grad_norm, skipped, skipped_in_a_row)])
        if not self._cuda:
            self._queue.append((step, lr_share, values, None))
            return
        slot = self._pinned[step % len(self._pinned)]
        slot.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._queue.append((step, lr_share, slot, event))

    def collect(self, *, drain: bool = False) -> list[Reading]:
        """The steps that have finished; waits while more than DEPTH - 1 are in flight, or for all when draining."""
        readings = []
        while self._queue:
            step, lr_share, values, event = self._queue[0]
            if event is not None:
                if drain or len(self._queue) >= DEPTH:
                    event.synchronize()
                elif not event.query():
                    break
            self._queue.popleft()
            loss, norm, skipped, row = values.tolist()
            readings.append(Reading(step, lr_share, loss, norm, int(skipped), int(row)))
        return readings
