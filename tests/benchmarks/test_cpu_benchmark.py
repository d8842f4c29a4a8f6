"""benchmarks/cpu.py: the rows of a setting, and their bound."""

from collections.abc import Callable
from types import ModuleType

import pytest


def test_rows_hold_the_step_its_bound_and_the_compilation(benchmark: Callable[[str], ModuleType]) -> None:
    cpu = benchmark("cpu")
    found = {"threads": 2.0, "compile": 40.0, "all": 0.1, "one": 0.13, "product": 5e-12, "flop": 7e9, "tokens": 1024.0}
    rows = {(row.case, row.provider): row for row in cpu.make_rows({"float32": found, "bfloat16, compiled": found})}
    step = rows["a step, CPU time of one thread", "float32"]
    assert (step.value, step.bound) == (pytest.approx(130), pytest.approx(35))
    assert rows["2 threads", "float32"].value == pytest.approx(10_240)
    assert rows["first compilation", "bfloat16, compiled"].value == 40
    assert ("first compilation", "float32") not in rows
