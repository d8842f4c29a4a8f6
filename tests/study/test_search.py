"""Ranges of a search. The search itself needs Optuna: tests/integrations/test_study_packages.py."""

import pytest

from parbank.errors import ConfigError
from parbank.study.search import Range, check_rungs, check_space, read_range
from parbank.study.ship import make_study


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


def test_every_choice_and_both_ends_of_a_range_are_checked() -> None:
    study = make_study("seeds", recipe="nano")
    check_space(study, [read_range("batch.order=[shuffled,contiguous]"), read_range("model.layers=4..6")])
    for wrong in ("batch.order=[shuffled,sorted]", "optim.warmdown=0.5..1.5"):
        with pytest.raises(ConfigError):
            check_space(study, [read_range(wrong)])


@pytest.mark.parametrize("rungs", [[], ["30s", "10s"], ["30s", "30s"], ["30s", "2000steps"], ["10s", "30s", "20s"]])
def test_rungs_that_do_not_get_longer_are_refused(rungs: list[str]) -> None:
    study = make_study("seeds", recipe="nano")
    check_rungs(study, ["30s", "1min", "2min"])
    with pytest.raises(ConfigError, match="rung"):
        check_rungs(study, rungs)
