"""Learning-rate and momentum schedules: pure functions of the share of the budget spent, or of the step.

A new learning-rate schedule is a function like `linear` and a line in SCHEDULES; `optim.schedule` selects it.
"""

import math
from collections.abc import Callable

Schedule = Callable[[float, float, float], float]
"""(progress, warmdown, floor) -> the learning rate as a share of its peak.

`progress` is the share of the budget spent, 0 to 1: of the clock where the budget is a clock, so the schedule ends when the
time does, however many steps that turns out to be. `warmdown` is the last share of the budget, over which the rate falls to
`floor`.
"""


def linear(progress: float, warmdown: float, floor: float = 0.0) -> float:
    """1 until the warmdown, then a straight line that reaches `floor` exactly at its end."""
    left = _budget_left(progress)
    return 1.0 if left >= warmdown else floor + (1.0 - floor) * left / warmdown


def cosine(progress: float, warmdown: float, floor: float = 0.0) -> float:
    """1 until the warmdown, then half a cosine down to `floor`. With a warmdown of 1 it is the usual cosine schedule."""
    left = _budget_left(progress)
    return 1.0 if left >= warmdown else floor + (1.0 - floor) * (0.5 - 0.5 * math.cos(math.pi * left / warmdown))


SCHEDULES: dict[str, Schedule] = {
    "linear": linear,
    "cosine": cosine,
}


def _budget_left(progress: float) -> float:
    return 1.0 - min(max(progress, 0.0), 1.0)


def ramp(step: int, steps: int, start: float, end: float) -> float:
    """A straight line from `start` at step 0 to `end` at `steps`, then flat."""
    share = 1.0 if steps <= 0 else min(step / steps, 1.0)
    return start + (end - start) * share
