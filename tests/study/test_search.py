"""Ranges of a search, and what it says. Trials by Optuna itself are in tests/integrations/test_study_packages.py."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parbank.errors import ConfigError
from parbank.study import search as module
from parbank.study.kinds.training import Training
from parbank.study.search import Range, check_rungs, check_space, describe_rung, read_range, search
from parbank.study.ship import make_study
from parbank.study.study import Job, Study


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


class Proposer:
    """Stands for a study of Optuna in its first trials, which are random."""

    def __init__(self, sampler: int) -> None:
        self._draws = random.Random(sampler)

    def ask(self) -> Any:
        trial = SimpleNamespace(params={})

        def suggest(name: str, low: float, high: float, *, log: bool) -> float:
            found: float = trial.params.setdefault(name, self._draws.uniform(low, high))
            return found

        trial.suggest_float = suggest
        return trial

    def tell(self, trial: Any, value: float | None, state: object = None) -> None: ...

    def add_trial(self, trial: object) -> None: ...


PROPOSALS = SimpleNamespace(
    samplers=SimpleNamespace(TPESampler=lambda seed: seed),
    create_study=Proposer,
    distributions=SimpleNamespace(FloatDistribution=lambda low, high, log: None),
    trial=SimpleNamespace(TrialState=SimpleNamespace(FAIL="fail"), create_trial=lambda **given: given),
)


@pytest.fixture
def find(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A search of so many trials; a rate above 0.06 fails."""

    def measure(self: Training, study: Study, job: Job) -> dict[str, float]:
        rate = study.config(job).optim.matrix_lr
        if rate > 0.06:
            raise RuntimeError("diverged")
        return {"value": 1 + rate}

    def run(trials: int, rungs: tuple[str, ...] = ("4steps",)) -> tuple[Any, list[str]]:
        said: list[str] = []
        base = make_study("seeds", recipe="nano", data=study.base.data)
        space = [read_range("optim.matrix_lr=0.01..0.1")]
        report = search(
            base, tmp_path / "s", space=space, trials=trials, rungs=rungs, seeds=1, workers=0, device="cpu",
            say=said.append,
        )  # fmt: skip
        return report, said

    monkeypatch.setattr(module, "_import_optuna", lambda: PROPOSALS)
    monkeypatch.setattr(Training, "measure", measure)
    return run


def test_a_continued_search_tries_other_values(find: Any) -> None:
    find(3)
    report, _ = find(7)
    settings = [arm.settings for arm in report.study.arms]
    assert len(settings) == len(set(settings)) == 7


def test_more_trials_go_on_to_the_later_rungs(find: Any) -> None:
    rungs = ("4steps", "8steps")
    first, _ = find(3, rungs)
    report, _ = find(9, rungs)
    kept, now = ({arm.name for arm in found.study.arms} for found in (first, report))
    assert kept < now, "a better trial came, and the rung keeps those that it had"
    assert set(report.comparisons) == now
    (added,) = report.study.added
    assert set(added.arms) == now - kept


def test_trials_that_failed_are_not_among_the_best(find: Any) -> None:
    report, said = find(6)
    means = {name: found.mean for name, found in report.comparisons.items() if found.pairs}
    assert 0 < len(means) < 6
    assert f"6 trials against the base; the best: {min(means, key=lambda name: means[name])} " in said[-1]
    assert "nan" not in said[-1]
    assert said[-1] == describe_rung(report, 0)
