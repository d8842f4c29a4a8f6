"""Results of studies: the rows of a table, and the rank correlation of two."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from parbank.config import to_dict
from parbank.files import write_json
from parbank.statistics import compare
from parbank.study.engine import open_study
from parbank.study.noise import Noise, differences
from parbank.study.report import Report
from parbank.study.ship import make_study
from parbank.study.study import Job

ROOT = Path(__file__).resolve().parents[2]
Benchmark = Callable[[str], ModuleType]


def test_two_files_have_the_same_six_arms() -> None:
    short, long = (make_study(str(ROOT / "benchmarks" / "studies" / f"levers{s}.toml")) for s in (30, 120))
    assert short.arms == long.arms
    assert len(short.arms) == 6
    assert all(arm.claim for arm in short.arms)
    assert (short.seconds, long.seconds) == (pytest.approx(30), pytest.approx(120))
    assert replace(short.base, budget=long.base.budget, average=long.base.average) == long.base


@pytest.fixture
def kernels() -> Report:
    study = make_study("published-kernels", arms=["one-qkv-product"], seeds=3)
    results = {Job("one-qkv-product", seed): {"value": 2.0 + seed / 1000, "against": 1.0} for seed in range(3)}
    found = compare(differences(study, results), target=1.0)
    return Report(study, results, dict.fromkeys(results, "done"), {}, Noise(1.0, ""), found)  # type: ignore[arg-type]


def test_rows_of_kernels_are_milliseconds_and_percent(kernels: Report, benchmark: Benchmark) -> None:
    rows = {row.case: row for row in benchmark("studies").rows_of(kernels)}
    assert (rows["mean"].value, rows["mean"].unit) == (pytest.approx(2.001), "ms")
    assert (rows["mean of what it would replace"].value, rows["mean of what it would replace"].unit) == (1.0, "ms")
    for case in ("difference", "from", "to"):
        assert rows[case].unit == "%"
    assert rows["difference"].value == pytest.approx(100.1)
    assert rows["difference"].note == "worse"


def study_of(seconds: int, **means: float) -> dict[str, Any]:
    study = make_study("seeds", recipe="sprint", budget=f"{seconds}s", seeds=2)
    arms = {name.replace("_", "-"): {"mean": mean, "pairs": 2} for name, mean in means.items()}
    return {"study": to_dict(study), "arms": arms | {"failed": {"mean": None, "pairs": 0}}, "runs": {}}


def test_ranks_of_two_studies(benchmark: Benchmark) -> None:
    ranks = benchmark("study_ranks")
    short = study_of(30, a=0.1, b=0.2, c=0.3, d=0.4, only_short=9.0)
    long = study_of(120, a=0.01, b=0.03, c=0.02, d=0.04)
    rows = {(row.case, row.provider): row.value for row in ranks.rows_of(short, long)}
    assert rows["rank correlation of 4 arms (Spearman)", "both"] == pytest.approx(0.8)
    assert rows["difference of b", "30 s, 2 seeds"] == 0.2
    assert rows["difference of b", "120 s, 2 seeds"] == 0.03
    # of 24 orders, the same one and three with two neighbours exchanged agree as well
    assert rows["chance of a random order to agree as well", "both"] == pytest.approx(100 * 4 / 24)
    with pytest.raises(SystemExit, match="share 1 arms"):
        ranks.rows_of(study_of(30, a=0.1, b=0.2), study_of(120, a=0.1, c=0.1))
    with pytest.raises(SystemExit, match="no order"):
        ranks.rows_of(study_of(30, a=0.1, b=0.1, c=0.1), study_of(120, a=0.1, b=0.2, c=0.3))


def test_a_study_with_runs_left_is_not_done(
    benchmark: Benchmark, text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is written, and the exit code tells a queue to give the command again."""
    studies, folder = benchmark("studies"), tmp_path / "study"
    study = make_study(
        "seeds", recipe="nano", data=text_spec, budget="4steps", seeds=2, extra=["slow:optim.matrix_lr=0.001"]
    )
    open_study(folder, study)
    (folder / "results").mkdir()
    jobs = study.jobs()
    words = [
        "studies.py",
        "--claim",
        "study_x",
        "--out",
        str(tmp_path / "results"),
        "--",
        "seeds",
        "--out",
        str(folder),
    ]

    def end(count: int) -> None:
        for job in jobs[:count]:
            write_json(folder / "results" / f"{job.key}.json", {"arm": job.arm, "value": 1.0 + job.seed})
        monkeypatch.setattr("sys.argv", list(words))
        studies.main()

    ended = SimpleNamespace(returncode=0, wait=lambda timeout: 0)
    own = SimpleNamespace(Popen=lambda *given, **more: ended, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(studies, "subprocess", own)  # not Popen itself, by which provenance asks git
    with pytest.raises(SystemExit, match="1 of 4 runs are left: give the same command again"):
        end(3)
    (path,) = (tmp_path / "results" / "study_x").glob("*/result.json")
    assert len(json.loads(path.read_bytes())["runs"]) == 3
    end(4)
    assert len(json.loads(path.read_bytes())["runs"]) == 4
