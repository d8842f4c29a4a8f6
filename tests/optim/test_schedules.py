import pytest

from parbank.optim.schedules import ramp, warmdown


def test_warmdown_is_flat_then_straight_and_ends_at_the_end() -> None:
    assert [warmdown(p, 0.5) for p in (0.0, 0.25, 0.5)] == [1.0, 1.0, 1.0]
    assert [warmdown(p, 0.5) for p in (0.75, 0.9, 1.0)] == pytest.approx([0.5, 0.2, 0.0])
    assert warmdown(1.3, 0.5) == 0.0
    assert warmdown(1.0, 0.5, floor=0.1) == pytest.approx(0.1)
    assert warmdown(0.99, 0.0) == 1.0


def test_ramp() -> None:
    assert [ramp(s, 10, 0.8, 0.9) for s in (0, 5, 10, 99)] == pytest.approx([0.8, 0.85, 0.9, 0.9])
    assert ramp(0, 0, 0.8, 0.9) == 0.9
