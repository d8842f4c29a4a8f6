import itertools

import pytest

from parbank.errors import ConfigError
from parbank.training.budget import Budget, Clock
from parbank.training.config import BudgetConfig


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def simulate(limit_seconds: float, step_seconds: list[float], in_flight: int = 0) -> tuple[int, float, list[float]]:
    """Steps taken, seconds used, and the share spent at each step, for a machine whose steps take the given times."""
    time = FakeTime()
    clock = Clock(time)
    budget = Budget(BudgetConfig(minutes=limit_seconds / 60), 1, clock)
    clock.start()
    step, shares = 0, []
    while budget.allows(step, in_flight):
        shares.append(budget.spent(step, in_flight))
        time.now += step_seconds[step % len(step_seconds)]
        budget.observe(step_seconds[step % len(step_seconds)])
        step += 1
    return step, clock.seconds(), shares


@pytest.mark.parametrize("seconds", [[0.1], [0.09, 0.1, 0.11], [0.37]])
def test_the_clock_is_a_promise(seconds: list[float]) -> None:
    _, used, shares = simulate(60, seconds)
    assert 60 - 2 * max(seconds) <= used <= 60 + 0.2 * max(seconds)  # a step may be slower than the last ones
    assert all(a < b for a, b in itertools.pairwise(shares))
    assert shares[-1] > 1 - 3 * max(seconds) / 60


def test_steps_in_flight_are_counted() -> None:
    _, used, _ = simulate(60, [1.0], in_flight=2)
    assert used == pytest.approx(58)  # two more are still to land


@pytest.mark.parametrize("ahead", [1, 5, 60])
def test_a_host_that_runs_ahead_of_the_device_keeps_the_promise(ahead: int) -> None:
    """The host queues a step in a hundredth of a second, the device takes a whole one, and up to `ahead` are in flight."""
    time = FakeTime()
    clock = Clock(time)
    budget = Budget(BudgetConfig(minutes=2), 1, clock)
    clock.start()
    began, ends = time.now, []
    queued = seen = 0

    def look() -> int:
        nonlocal seen
        for _ in range(sum(end <= time.now for end in ends) - seen):
            budget.observe(1.0)
            seen += 1
        return queued - seen

    while budget.allows(queued, look()):
        assert budget.spent(queued, look()) <= 1
        time.now += 0.01
        ends.append(max(time.now, ends[-1] if ends else 0) + 1)
        queued += 1
        while look() > ahead:
            time.now += 0.01
    assert 117.5 <= ends[-1] - began <= 120.02


def test_the_first_step_always_runs() -> None:
    steps, _, _ = simulate(0.5, [3.0])
    assert steps == 1


def test_steps_and_tokens_are_exact() -> None:
    for config, steps in ((BudgetConfig(steps=7), 7), (BudgetConfig(tokens=65), 7), (BudgetConfig(tokens=70), 7)):
        budget = Budget(config, 10, Clock())
        assert [budget.allows(s) for s in (0, steps - 1, steps)] == [True, True, False]
        assert budget.spent(0) == 0
        assert budget.spent(steps) == 1


def test_a_resumed_clock_goes_on_from_its_total() -> None:
    time = FakeTime()
    clock = Clock(time)
    clock.set(12.0)
    time.now += 50
    assert clock.seconds() == 12.0
    clock.start()
    time.now += 3
    clock.stop()
    time.now += 50
    assert clock.seconds() == 15.0


def test_a_resumed_run_knows_what_its_steps_took() -> None:
    """Without a step of its own to go by, one that had ended would train on at every resume."""
    clock = Clock(FakeTime())
    clock.set(59.2)
    budget = Budget(BudgetConfig(minutes=1), 1, clock)
    assert not budget.allows(59)
    assert not budget.allows(73)
    assert budget.allows(75)  # steps of 0.79 s: one more fits


@pytest.mark.parametrize(("step_seconds", "steps", "used"), [(0.1, 40, 4.0), (1.0, 40, 40.0), (2.0, 30, 60.0)])
def test_a_clock_with_two_ends_stops_at_the_first(step_seconds: float, steps: int, used: float) -> None:
    """A slow machine has its minutes, a fast one its steps; the schedule ends at either."""
    time = FakeTime()
    clock = Clock(time)
    budget = Budget(BudgetConfig(minutes=1, most_steps=40), 1, clock)
    clock.start()
    step, shares, left = 0, [], []
    while budget.allows(step):
        shares.append(budget.spent(step))
        time.now += step_seconds
        budget.observe(step_seconds)
        step += 1
        left.append(budget.seconds_left(step))
    assert (step, clock.seconds()) == (steps, pytest.approx(used))
    assert shares == sorted(shares)
    assert budget.spent(step) == pytest.approx(1)
    assert left[0] == pytest.approx(used - step_seconds)
    assert left[-1] == pytest.approx(0)


def test_a_second_end_is_that_of_a_clock() -> None:
    for wrong in ({"steps": 5, "most_steps": 3}, {"tokens": 5, "most_steps": 3}, {"minutes": 5, "most_steps": 0}):
        with pytest.raises(ConfigError, match=r"a positive number beside budget\.minutes"):
            BudgetConfig(**wrong)
