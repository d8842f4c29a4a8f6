"""Studies with other packages: workers submitted by submitit, trials proposed by Optuna."""

from pathlib import Path
from typing import Any

import pytest

from parbank.errors import ConfigError
from parbank.study.crew import Crew
from parbank.study.engine import open_study
from parbank.study.kinds.training import Training
from parbank.study.report import make_report
from parbank.study.search import read_range, search
from parbank.study.ship import make_study
from parbank.study.slurm import submit_workers
from parbank.study.study import Job, Study


def small(text_spec: str, **more: Any) -> Study:
    return make_study("seeds", recipe="nano", data=text_spec, budget="6steps", score_tokens=1000, **more)


def test_submitted_workers_complete_a_study(text_spec: str, tmp_path: Path) -> None:
    """By submitit's local executor, which starts what Slurm would start."""
    study = small(text_spec, seeds=2, extra=["slow:optim.matrix_lr=0.0001"])
    open_study(tmp_path / "s", study)
    jobs = submit_workers(tmp_path / "s", 2, cluster="local", options={"timeout_min": 10}, device="cpu")
    assert sum(job.result() for job in jobs) == len(study.jobs())
    assert make_report(tmp_path / "s").is_complete
    with pytest.raises(ConfigError, match="submitit refuses"):
        submit_workers(tmp_path / "s", 1, cluster="local", options={"no_such_option": 1})


def objective(self: Training, study: Study, job: Job) -> dict[str, Any]:
    """Best at 0.03; short schedules like higher rates a little more."""
    config = study.config(job)
    steps = config.budget.steps or 0
    return {"value": 1 + 100 * (config.optim.matrix_lr - 0.03 - 0.02 / steps) ** 2 + job.seed / 1000}


def test_a_search_halves_its_trials_and_says_how_rungs_rank(
    text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Training, "measure", objective)
    said: list[str] = []
    space = [read_range("optim.matrix_lr=0.001..0.1:log"), read_range("optim.warmdown=[0.3,0.6]")]

    def run(trials: int) -> Any:
        rungs = ["10steps", "40steps"]
        return search(
            small(text_spec),
            tmp_path / "s",
            space=space,
            trials=trials,
            rungs=rungs,
            seeds=3,
            device="cpu",
            workers=0,
            say=said.append,
        )

    report = run(8)
    assert len(report.study.arms) == 4
    assert report.study.seeds == (0, 1, 2)
    assert report.study.base.budget.steps == 40
    assert {arm.name for arm in make_report(tmp_path / "s" / "rung-0").study.arms} == {
        f"trial-{n:03d}" for n in range(8)
    }
    assert any(line.startswith("rungs 0 and 1: rank correlation of 4 arms (Spearman): +1.00") for line in said)
    best = min(report.comparisons, key=lambda name: report.comparisons[name].mean)
    assert abs(float(report.study.arm(best).settings[0].partition("=")[2]) - 0.03) < 0.03
    assert not report.study.added, "trials are not second looks"
    with pytest.raises(ConfigError, match="has 8 trials already"):
        run(4)
    with pytest.raises(ConfigError, match="another seeds"):
        search(small(text_spec), tmp_path / "s", space=space, trials=8, rungs=["10steps", "40steps"], seeds=2)
    for other in (small(text_spec, settings=["optim.clip=0.5"]), small(text_spec, holdout="val")):
        with pytest.raises(ConfigError, match="another base"):
            search(other, tmp_path / "s", space=space, trials=8, rungs=["10steps", "40steps"], seeds=3)


def test_a_trial_that_cannot_run_is_named_and_passed_over(
    text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each value is allowed, and not every pair of them: a head of 4 channels has none for 8 rotated ones."""
    monkeypatch.setattr(Training, "measure", objective)
    space = [read_range("model.heads=[4,8]"), read_range("model.rope_dims=[4,8]")]
    said: list[str] = []
    arguments: dict[str, Any] = {"space": space, "trials": 12, "rungs": ["10steps"], "seeds": 1, "workers": 0}
    for _ in range(2):  # the second call meets what the first has stored
        report = search(small(text_spec), tmp_path / "s", **arguments, device="cpu", say=said.append)
        refused = [line for line in said if ": not run: " in line]
        assert 0 < len(refused) < 12
        assert len(report.study.arms) == 12 - len(refused)
        said.clear()


def test_trials_share_one_worker(text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process, which imports and opens the text once."""
    starts, start = [], Crew._start
    monkeypatch.setattr(Crew, "_start", lambda self, number: (starts.append(number), start(self, number)))
    space = [read_range("optim.matrix_lr=0.01..0.1:log")]
    study = small(text_spec, settings=["train.warmup_steps=0"])
    report = search(study, tmp_path / "s", space=space, trials=2, rungs=["4steps"], seeds=1, device="cpu", quiet=True)
    assert len(report.results) == 3
    assert starts == [0]


def test_a_search_that_was_stopped_goes_on(text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def measure(self: Training, study: Study, job: Job) -> dict[str, Any]:
        if len(ran) == 4:
            ran.append("stopped")
            raise KeyboardInterrupt
        ran.append(f"{job.key} {study.base.budget.steps}")
        return objective(self, study, job)

    monkeypatch.setattr(Training, "measure", measure)
    arguments: dict[str, Any] = {
        "space": [read_range("optim.matrix_lr=0.001..0.1:log")],
        "trials": 5,
        "rungs": ["10steps"],
    }
    with pytest.raises(KeyboardInterrupt):
        search(small(text_spec), tmp_path / "s", **arguments, seeds=1, device="cpu", workers=0, quiet=True)
    report = search(small(text_spec), tmp_path / "s", **arguments, seeds=1, device="cpu", workers=0, quiet=True)
    assert len(report.study.arms) == 5
    assert len(ran) == len(set(ran)) == 7, "every run once, and the interruption"
