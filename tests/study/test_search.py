"""Ranges of a search. The search itself needs Optuna: tests/integrations/test_study_packages.py."""

import pytest

from parbank.errors import ConfigError
from parbank.study.search import Range, read_range


def test_ranges() -> None:
    assert read_range("optim.matrix_lr=0.01..0.05:log") == Range(name="optim.matrix_lr", low=0.01, high=0.05, log=True)
    assert read_range("model.layers=8..12") == Range(name="model.layers", low=8, high=12, whole=True)
    assert read_range("optim.clip=1e-2..1") == Range(name="optim.clip", low=0.01, high=1.0)
    assert read_range("batch.order=[shuffled, contiguous]").choices == ("shuffled", "contiguous")
    assert read_range("model.xsa_layers=[0,4,-1]").choices == (0, 4, -1)


@pytest.mark.parametrize("wrong", ["a.b", "a.b=3", "a.b=5..3", "a.b=0..3:log", "a.b=[]", "a.b=1..2..3"])
def test_what_is_no_range_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--space"):
        read_range(wrong)
