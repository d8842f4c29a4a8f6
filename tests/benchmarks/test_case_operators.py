"""The benchmark of case operators trains both kinds on one text and scores both on the same bytes."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def operators(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("case_operators")


def test_both_kinds_are_trained_and_scored_on_the_same_text(
    operators: ModuleType, text_spec: str, tmp_path: Path
) -> None:
    found = operators.prepare(text_spec, 320, tmp_path)
    assert {name: dataset.tokenizer.case_operators for name, dataset in found.items()} == {
        "plain": False,
        "case operators": True,
    }
    assert len({dataset.val_bytes for dataset in found.values()}) == 1
    scores = [operators.train(dataset, "nano", 2, 0, []) for dataset in found.values()]
    assert all(score["bpb"] > 1 for score in scores)
    assert scores[0]["tokens"] != scores[1]["tokens"]
