"""The long form of the fault tests: what it counts as a fault, and that it goes on where it stopped."""

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from parbank.errors import DataError

Import = Callable[[str], ModuleType]


def raise_own() -> None:
    raise DataError("damaged")


def fill_memory() -> None:
    np.ones(10_000_000).sum()


def spin() -> None:
    while True:
        sum(range(1000))


@pytest.mark.parametrize(
    ("action", "ending", "fault"),
    [
        (lambda: None, "success", ""),
        (raise_own, "error", ""),
        (lambda: {}["x"], "broken", "KeyError"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "broken", "the process ended with -9"),
        (fill_memory, "broken", "MB"),
    ],
)
def test_what_is_a_fault(action: Callable[[], object], ending: str, fault: str, benchmark: Import) -> None:
    outcome = benchmark("faults_mutators").judge(0, "kind", 1000, benchmark("faults_processes").measure(action))
    assert (outcome.ending, fault in outcome.fault) == (ending, True)
    assert bool(outcome.fault) == bool(fault)


def test_a_call_that_does_not_end_is_a_fault(benchmark: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = benchmark("faults_processes")
    monkeypatch.setattr(processes, "LIMIT_SECONDS", 0.2)
    assert processes.measure(spin).ending == "fault: the process ended with -14"


def test_a_run_goes_on_where_it_stopped(benchmark: Import, tmp_path: Path) -> None:
    faults, cases = benchmark("faults"), benchmark("faults_cases")
    seen: list[int] = []

    def attempt(shared: int, index: int) -> object:
        seen.append(index)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return cases.Outcome(index, "even" if index % 2 == 0 else "odd", "success", "broke" if index == 4 else "")

    part = cases.Part(lambda folder, seed: seed, attempt, ())
    with pytest.raises(KeyboardInterrupt):
        faults.run(part, tmp_path, 7, 6)
    outcomes = faults.run(part, tmp_path, 7, 6)
    assert seen == [0, 1, 2, 2, 3, 4, 5]
    assert [outcome.index for outcome in outcomes] == list(range(6))
    rows = {(row.case, row.provider): row.value for row in faults.summarise(outcomes)}
    assert rows["all cases", "failed"] == rows["even", "failed"] == 1
    assert rows["odd", "cases"] == 3


def test_mutations_are_drawn_from_their_seed(benchmark: Import) -> None:
    mutators = benchmark("faults_mutators")
    data = bytes(range(256)) * 4
    one, two = (mutators.mutate_bytes(random.Random(5), data) for _ in range(2))
    assert one == two
    changed = [mutators.mutate_bytes(random.Random(seed), data) != data for seed in range(50)]
    assert sum(changed) > 45
