"""A learning rate chosen inside the clock: the strategies spend the clock that they are given, and choose what is better."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from parbank.errors import ConfigError, TrainingError
from parbank.recipes import get_recipe
from parbank.study.engine import run_study
from parbank.study.kinds import KINDS
from parbank.study.kinds.inside import Bandit, read_strategy, with_budget, with_rate
from parbank.study.ship import make_study
from parbank.study.study import BASE, Job, read_arm
from parbank.training.trainer import Report, Trainer


def test_strategies_on_a_small_run(text_spec: str, tmp_path: Path) -> None:
    study = make_study(
        "inside-clock",
        recipe="nano",
        data=text_spec,
        budget="16steps",  # fewer, and a candidate would end before its first update shows
        seeds=1,
        settings=["train.warmup_steps=0"],
        arms=[],
        extra=["one:strategy=bandit,rates=[1],window=4", "halving:strategy=halving,rates=[0.001,1,0.0001]"],
        score_tokens=1000,
    )
    report = run_study(study, tmp_path / "s", device="cpu", workers=0, quiet=True)
    assert not report.failures
    base, one, halving = (report.results[Job(arm, 0)] for arm in (BASE, "one", "halving"))
    assert one["value"] == base["value"], "a bandit without a choice is the plain run, to the bit"
    assert one["choices"] == [1.0] * 5
    assert halving["rate"] == 1.0
    assert [len(losses) for losses in halving["losses"]] == [3, 2]
    assert halving["steps"] == 8
    assert base["steps"] == 16


def test_a_bandit_takes_what_lowers_the_loss() -> None:
    bandit, loss = Bandit([0.5, 1.0, 2.0], window=1), 5.0
    for _ in range(60):
        loss -= 0.01 if bandit._current == 2 else 0.001
        bandit.choices.append(bandit._rates[bandit._current])
        bandit.learn(loss)
    assert bandit.choices.count(2.0) > 30
    assert {0.5, 1.0, 2.0} == set(bandit.choices), "every factor is tried"
    bandit.learn(float("nan"))  # a skipped step says nothing


def test_a_bandit_begins_with_a_window_that_was_skipped() -> None:
    bandit = Bandit([0.5, 1.0, 2.0], window=1)
    bandit._current = 1
    bandit.learn(float("nan"))
    assert bandit._current == 1
    bandit.learn(5.0)
    assert bandit._current == 0, "the first that was not tried"


@pytest.mark.parametrize("end", ["an error", "no number"])
def test_a_candidate_that_diverges_loses(
    text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    train = Trainer.train

    def diverge(trainer: Trainer, report: Report) -> None:
        high = trainer.config.optim.matrix_lr > 1.5 * get_recipe("nano").optim.matrix_lr
        if high and end == "an error":
            raise TrainingError("loss or gradient was not finite for 10 steps in a row")
        train(trainer, lambda reading: report(replace(reading, loss=math.nan) if high else reading))

    monkeypatch.setattr(Trainer, "train", diverge)
    arm = "halving:strategy=halving,rates=[2,0.0001,1]"
    settings = ["train.warmup_steps=0"]
    study = make_study(
        "inside-clock",
        recipe="nano",
        data=text_spec,
        budget="16steps",
        seeds=1,
        settings=settings,
        arms=[],
        extra=[arm],
    )
    report = run_study(replace(study, score_tokens=1000), tmp_path / "s", device="cpu", workers=0, quiet=True)
    assert not report.failures
    result = report.results[Job("halving", 0)]
    assert result["rate"] == 1.0
    assert result["losses"][0]["2.0"] is None


def test_shares_of_a_budget() -> None:
    base = get_recipe("sprint")
    assert with_budget(base, 0.25).budget.minutes == pytest.approx(0.5)
    assert with_budget(base, 0.25).budget.count_code
    steps = with_budget(replace(base, budget=get_recipe("nano").budget), 0.1)
    assert steps.budget.steps == 2
    assert with_rate(base, 2.0).optim.matrix_lr == 2 * base.optim.matrix_lr
    assert with_rate(base, 2.0).optim.embedding_lr == 2 * base.optim.embedding_lr


def test_wrong_strategies_are_refused() -> None:
    for wrong in ("strategy=greedy", "strategy=bandit,rates=[]", "strategy=halving,explore=1", "speed=3"):
        with pytest.raises(ConfigError):
            read_strategy(read_arm(f"x:{wrong}"))
    with pytest.raises(ConfigError, match="not in tokens"):
        KINDS["inside"].check(make_study("inside-clock", budget="1e6tokens"))
    with pytest.raises(ConfigError, match="--metric must be one of"):
        KINDS["inside"].check(make_study("inside-clock", metric="ttt"))
