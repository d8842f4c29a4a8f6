"""The committed result of simulated studies follows from its pairs, and keeps the promise of 5% and 80%."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """The newest."""
    path = max((ROOT / "benchmarks" / "results" / "study_noise").glob("*/result.json"))
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def test_the_stored_pairs_are_those_of_the_result(result: dict[str, Any]) -> None:
    stored = json.loads((ROOT / "tests" / "nano_pairs.json").read_bytes())
    assert stored["bpb"] == result["bpb"]
    assert stored["commit"] == result["commit"]
    assert len(result["bpb"]) == 30
    assert not result["dirty"]


def test_every_share_is_the_simulation_s_and_is_allowed(
    result: dict[str, Any], benchmark: Callable[[str], ModuleType]
) -> None:
    rows = benchmark("study_noise").rows_of(result["bpb"])
    cases: dict[str, dict[str, float]] = {}
    for row, stored in zip(rows, result["rows"], strict=True):
        assert (row.case, row.provider) == (stored["case"], stored["provider"])
        assert row.value == pytest.approx(stored["value"], rel=1e-9)
        cases.setdefault(row.case, {})[row.provider] = row.value
    shares = {case: found for case, found in cases.items() if "normal" in found}
    assert len(shares) == 8
    for case, found in shares.items():
        for noise in ("stored pairs", "normal"):
            assert found["least allowed"] <= found[noise] <= found.get("most allowed", 100), (case, noise)
