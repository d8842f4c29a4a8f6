"""The benchmark of ops: a result that times a peer's code says which code that was."""

from collections.abc import Callable
from types import ModuleType


def test_a_result_with_dion_names_its_commit_and_what_differs(benchmark: Callable[[str], ModuleType]) -> None:
    symmetric, harness = benchmark("ops_symmetric"), benchmark("harness")
    case = symmetric.bank_case()
    assert symmetric.DION in case.providers
    rows = [harness.Row(case.name, provider, 1.0) for provider in case.providers]
    (peer,) = symmetric.describe_peers(rows)
    assert (peer["name"], len(peer["commit"])) == ("dion", 40)
    assert any("norm" in line for line in peer["differs"])
    assert symmetric.describe_peers([row for row in rows if row.provider != symmetric.DION]) == []
