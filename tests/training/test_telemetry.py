"""Numbers come back in order, each step's own, whatever the device does meanwhile."""

from dataclasses import replace

import pytest
import torch

from parbank.training.telemetry import SLOTS, Reading, Telemetry


def record(telemetry: Telemetry, step: int, device: str, scale: float = 1.0) -> list[torch.Tensor]:
    values = [
        torch.tensor(v * scale, device=device) for v in (step + 0.5, step + 0.25, float(step % 2), float(step % 3))
    ]
    telemetry.record(step, step / 100, *values)
    return values


def expected(step: int) -> Reading:
    return Reading(step, step / 100, step + 0.5, step + 0.25, step % 2, step % 3, 0.0)


def timeless(readings: list[Reading]) -> list[Reading]:
    assert all(reading.seconds > 0 for reading in readings)
    return [replace(reading, seconds=0.0) for reading in readings]


def test_on_a_cpu_every_step_is_read_at_once() -> None:
    telemetry = Telemetry(torch.device("cpu"))
    for step in range(5):
        record(telemetry, step, "cpu")
        assert telemetry.in_flight == 0
        assert timeless(telemetry.collect()) == [expected(step)]
    assert telemetry.collect(drain=True) == []


def test_a_reading_is_of_its_moment() -> None:
    """The optimizer writes its counters in place; what was recorded must not follow."""
    telemetry = Telemetry(torch.device("cpu"))
    for step in range(3):
        for value in record(telemetry, step, "cpu"):
            value.fill_(-1)
    assert timeless(telemetry.collect()) == [expected(step) for step in range(3)]


def test_non_finite_numbers_come_through() -> None:
    telemetry = Telemetry(torch.device("cpu"))
    one = torch.tensor(1.0)
    telemetry.record(0, 1.0, one * float("nan"), one * float("inf"), one, one)
    (reading,) = telemetry.collect()
    assert reading.loss != reading.loss
    assert reading.grad_norm == float("inf")
    assert reading.skipped == 1


def test_a_step_is_timed_from_the_one_before_and_the_first_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("parbank.training.telemetry.time.perf_counter", lambda: now)
    telemetry = Telemetry(torch.device("cpu"))
    now += 200.0  # setting up is no part of a step
    telemetry.restart()
    for step, seconds in enumerate((5.0, 1.0, 3.0)):
        now += seconds
        record(telemetry, step, "cpu")
        (reading,) = telemetry.collect()
        assert reading.seconds == seconds


def busy(work: torch.Tensor, products: int = 1) -> torch.Tensor:
    for _ in range(products):
        work = (work @ work).clamp(-1, 1)
    return work


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_but_for_a_log_step_and_no_number_is_overwritten() -> None:
    telemetry = Telemetry(torch.device("cuda"))
    readings: list[Reading] = []
    work = busy(torch.randn(4096, 4096, device="cuda"))
    torch.cuda.synchronize()
    telemetry.restart()
    for step in range(3 * SLOTS):
        work = busy(work)  # something to be behind
        for value in record(telemetry, step, "cuda"):
            value.fill_(-1)
        log = step % 20 == 19
        readings += telemetry.collect(wait=log)
        assert telemetry.in_flight < SLOTS
        assert not log or telemetry.in_flight <= 1
    readings += telemetry.collect(drain=True)
    assert timeless(readings) == [expected(step) for step in range(3 * SLOTS)]


@pytest.mark.gpu
def test_on_a_gpu_a_step_in_flight_is_not_waited_for() -> None:
    telemetry = Telemetry(torch.device("cuda"))
    work = busy(torch.randn(8192, 8192, device="cuda"))
    values = record(telemetry, 0, "cuda")
    telemetry.collect(drain=True)
    busy(work, 50)  # about a tenth of a second
    telemetry.record(1, 0.01, *values)
    torch.cuda.set_sync_debug_mode(
        "error"
    )  # an implicit wait is an error; an event's own wait is seen by what it returns
    try:
        assert telemetry.collect() == []
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert telemetry.in_flight == 1
    (reading,) = telemetry.collect(drain=True)
    assert reading.seconds > 0.01
