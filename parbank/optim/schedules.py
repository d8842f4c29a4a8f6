"""Learning-rate and momentum schedules: pure functions of how much of the budget is spent, or of the step."""


def warmdown(progress: float, fraction: float, floor: float = 0.0) -> float:
    """1 until the last `fraction` of the budget, then a straight line that reaches `floor` exactly at its end.

    `progress` is the share of the budget spent, 0 to 1: of the clock where the budget is a clock, so the line ends when the
    time does, however many steps that turns out to be.
    """
    left = 1.0 - min(max(progress, 0.0), 1.0)
    if fraction <= 0 or left >= fraction:
        return 1.0
    return floor + (1.0 - floor) * left / fraction


def ramp(step: int, steps: int, start: float, end: float) -> float:
    """A straight line from `start` at step 0 to `end` at `steps`, then flat."""
    share = 1.0 if steps <= 0 else min(step / steps, 1.0)
    return start + (end - start) * share
