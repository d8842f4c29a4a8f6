"""The training clock, and the share of the budget that is spent.

A budget in minutes is a promise: no step starts that would end after the limit. Steps on a GPU are queued, so the
clock counts steps in flight at the price of the last measured steps. A clock may also end early, after a number of steps.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from parbank.training.config import BudgetConfig

_STALL_SECONDS = 2.0  # a shorter pause (a slow disk, a garbage collection) is not worth a word


def suspended_seconds() -> float:
    """Seconds that this machine has been suspended since it started, where the system says so. Clock leaves them out."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


class Clock:
    """Training seconds: a stopwatch that can start from an earlier run's total."""

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
    """Decides before every step whether it may start, and what share of the budget is then spent."""

    def __init__(self, config: BudgetConfig, batch_tokens: int, clock: Clock) -> None:
        self.config = config
        self.clock = clock
        steps = config.most_steps if config.steps is None else config.steps
        self.steps = steps if config.tokens is None else math.ceil(config.tokens / batch_tokens)
        self.limit = None if config.minutes is None else 60 * config.minutes
        self._step_seconds: deque[float] = deque(maxlen=9)  # odd, so that the median is a real step's time

    def observe(self, seconds: float) -> None:
        """Records the time of a finished step."""
        self._step_seconds.append(seconds)

    def is_stall(self, seconds: float) -> bool:
        """Whether a step took so much longer than the last steps that its own work cannot be the reason."""
        return bool(self._step_seconds) and seconds > max(_STALL_SECONDS, 20 * max(self._step_seconds))

    @property
    def knows_step_time(self) -> bool:
        return bool(self._step_seconds)

    def spent(self, step: int, in_flight: int = 0) -> float:
        """The share of the budget that is spent when step `step` starts, with `in_flight` steps queued before it."""
        by_steps = step / self.steps if self.steps else 0.0
        if self.limit is None:
            return by_steps if self.steps else 1.0
        return max(by_steps, (self.clock.seconds() + in_flight * self._step_time(step)) / self.limit)

    def allows(self, step: int, in_flight: int = 0) -> bool:
        """Whether step `step` may start. The first step of a run always may, or nothing would be trained."""
        if self.limit is None or (self.steps is not None and step >= self.steps):
            return step < (self.steps or 0)
        if step == 0:
            return True
        return self.clock.seconds() + (in_flight + 1) * self._step_time(step) <= self.limit

    def seconds_left(self, step: int) -> float:
        by_steps = math.inf if self.steps is None else max(0, self.steps - step) * self._step_time(step)
        if self.limit is None:
            return by_steps
        by_clock = max(0.0, self.limit - self.clock.seconds())
        return min(by_clock, by_steps) if self.knows_step_time else by_clock

    def _step_time(self, step: int) -> float:
        """A resumed run has measured no step yet, and uses the step time from before it was stopped."""
        if self._step_seconds:
            return median(self._step_seconds)
        return self.clock.seconds() / step if step else 0.0
