"""The training clock, and how much of the budget is spent.

A budget in minutes is a promise: no step is started that would end after the limit. Steps on a GPU are queued, so the
clock knows how many are still in flight and counts them as if each took as long as the last ones did on the device.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from parbank.training.config import BudgetConfig


class Clock:
    """Training seconds: a stopwatch that an earlier run's total can be set on."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._before = 0.0
        self._started: float | None = None

    def set(self, seconds: float) -> None:
        self._before, self._started = seconds, None

    def start(self) -> None:
        self._started = self._now()

    def stop(self) -> None:
        self.set(self.seconds())

    def seconds(self) -> float:
        return self._before + (0.0 if self._started is None else self._now() - self._started)


class Budget:
    """Answers, before every step: may another one start, and how far along will it be?"""

    def __init__(self, config: BudgetConfig, batch_tokens: int, clock: Clock) -> None:
        self.config = config
        self.clock = clock
        self.steps = config.steps if config.tokens is None else math.ceil(config.tokens / batch_tokens)
        self.limit = None if config.minutes is None else 60 * config.minutes
        self._step_seconds: deque[float] = deque(maxlen=9)  # odd, so that the median is a real step's time

    def observe(self, seconds: float) -> None:
        """What a finished step took."""
        self._step_seconds.append(seconds)

    @property
    def knows_step_time(self) -> bool:
        return bool(self._step_seconds)

    def spent(self, step: int, in_flight: int = 0) -> float:
        """The share of the budget that is spent when step `step` starts, with `in_flight` steps queued before it."""
        if self.limit is None:
            return step / self.steps if self.steps else 1.0
        return (self.clock.seconds() + in_flight * self._step_time(step)) / self.limit

    def allows(self, step: int, in_flight: int = 0) -> bool:
        """Whether step `step` may start. The first step of a run always may, or nothing would be trained at all."""
        if self.limit is None:
            return step < (self.steps or 0)
        if step == 0:
            return True
        return self.clock.seconds() + (in_flight + 1) * self._step_time(step) <= self.limit

    def seconds_left(self, step: int) -> float:
        if self.limit is not None:
            return max(0.0, self.limit - self.clock.seconds())
        return ((self.steps or 0) - step) * self._step_time(step)

    def _step_time(self, step: int) -> float:
        """A run that was resumed has seen no step yet, and goes by what they took before it was stopped."""
        if self._step_seconds:
            return median(self._step_seconds)
        return self.clock.seconds() / step if step else 0.0
