"""Numbers come back in order, each step's own, whatever the device does meanwhile."""

import pytest
import torch

from parbank.train.telemetry import DEPTH, Reading, Telemetry


def record(telemetry: Telemetry, step: int, device: str, scale: float = 1.0) -> list[torch.Tensor]:
    values = [
        torch.tensor(v * scale, device=device) for v in (step + 0.5, step + 0.25, float(step % 2), float(step % 3))
    ]
    telemetry.record(step, step / 100, *values)
    return values


def expected(step: int) -> Reading:
    return Reading(step, step / 100, step + 0.5, step + 0.25, step % 2, step % 3)


def test_on_a_cpu_every_step_is_read_at_once() -> None:
    telemetry = Telemetry(torch.device("cpu"))
    for step in range(5):
        record(telemetry, step, "cpu")
        assert telemetry.in_flight == 0
        assert telemetry.collect() == [expected(step)]
    assert telemetry.collect(drain=True) == []


def test_a_reading_is_of_its_moment() -> None:
    """The optimizer writes its counters in place; what was recorded must not follow."""
    telemetry = Telemetry(torch.device("cpu"))
    for step in range(3):
        for value in record(telemetry, step, "cpu"):
            value.fill_(-1)
    assert telemetry.collect() == [expected(step) for step in range(3)]


def test_non_finite_numbers_come_through() -> None:
    telemetry = Telemetry(torch.device("cpu"))
    one = torch.tensor(1.0)
    telemetry.record(0, 1.0, one * float("nan"), one * float("inf"), one, one)
    (reading,) = telemetry.collect()
    assert reading.loss != reading.loss
    assert reading.grad_norm == float("inf")
    assert reading.skipped == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_few_steps_are_in_flight_and_none_is_overwritten() -> None:
    telemetry = Telemetry(torch.device("cuda"))
    readings: list[Reading] = []
    work = torch.randn(4096, 4096, device="cuda")
    for step in range(40):
        work = (work @ work).clamp(-1, 1)  # something to be behind
        for value in record(telemetry, step, "cuda"):
            value.fill_(-1)
        assert telemetry.in_flight <= DEPTH
        readings += telemetry.collect()
        assert telemetry.in_flight < DEPTH
    readings += telemetry.collect(drain=True)
    assert readings == [expected(step) for step in range(40)]
