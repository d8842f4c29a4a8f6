"""What benchmarks/tune.py can search: every launch table there is. Nothing is timed here."""

from collections.abc import Callable
from types import ModuleType

import pytest

from parbank.ops import configs


@pytest.fixture
def tune(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("tune")


def test_every_table_has_something_to_try(tune: ModuleType) -> None:
    """Those of float32 kernels aside, which run only where they are asked for by name."""
    declared = {tunable.op for tunable in tune.collect(tune.Choice())}
    assert declared == {table for table in configs.tables() if not table.endswith("_float32")}


def test_no_case_is_declared_twice(tune: ModuleType) -> None:
    """A result goes by its table and case: a second one of the same name would overwrite the first."""
    names = [(tunable.op, case) for tunable in tune.collect(tune.Choice()) for case in tunable.cases]
    assert len(names) == len(set(names))


def test_candidates_are_launches_of_their_table(tune: ModuleType) -> None:
    for tunable in tune.collect(tune.Choice()):
        shipped = {frozenset(launch.blocks) for _, launch in configs.tables()[tunable.op]["sm90"]}
        assert {frozenset(launch.blocks) for launch in tunable.candidates} == shipped, tunable.op


def test_every_case_has_a_bound(tune: ModuleType) -> None:
    for tunable in tune.collect(tune.Choice()):
        assert tunable.cases.keys() == tunable.flops.keys() | tunable.bytes.keys(), tunable.op
        assert tunable.exact.keys() <= tunable.cases.keys(), tunable.op
