import pytest

from parbank.optim.schedules import SCHEDULES, cosine, linear, ramp


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_flat_then_falls_to_the_floor(name: str) -> None:
    schedule = SCHEDULES[name]
    assert [schedule(p, 0.4, 0.1) for p in (-0.5, 0.0, 0.59)] == [1.0, 1.0, 1.0]
    falling = [schedule(0.6 + 0.04 * n, 0.4, 0.1) for n in range(11)]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] == pytest.approx(1.0)
    assert [schedule(p, 0.4, 0.1) for p in (1.0, 1.3)] == pytest.approx([0.1, 0.1])
    assert schedule(0.99, 0.0, 0.1) == 1.0


def test_cosine_is_half_a_period() -> None:
    assert [cosine(p, 1.0) for p in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([1.0, 0.8535534, 0.5, 0.0])


def test_linear_is_flat_then_straight_and_ends_at_the_end() -> None:
    assert [linear(p, 0.5) for p in (0.0, 0.25, 0.5)] == [1.0, 1.0, 1.0]
    assert [linear(p, 0.5) for p in (0.75, 0.9, 1.0)] == pytest.approx([0.5, 0.2, 0.0])
    assert linear(1.3, 0.5) == 0.0
    assert linear(1.0, 0.5, floor=0.1) == pytest.approx(0.1)
    assert linear(0.99, 0.0) == 1.0


def test_ramp() -> None:
    assert [ramp(s, 10, 0.8, 0.9) for s in (0, 5, 10, 99)] == pytest.approx([0.8, 0.85, 0.9, 0.9])
    assert ramp(0, 0, 0.8, 0.9) == 0.9
