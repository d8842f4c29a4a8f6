"""benchmarks/ladder.py: every config of the ladder is one that can run, and a call continues where the last one stopped."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from parbank.config import override
from parbank.display import Display
from parbank.plan.candidates import Request
from parbank.plan.choose import make_plan
from parbank.plan.laws import load_laws
from parbank.plan.texts import PlanText
from parbank.recipes import sprint
from parbank.training.checks import check_size
from tests.plan.machines import H200

CORPUS = PlanText(name="corpus", bytes=182.8e6, hardness=3.233)


@pytest.fixture
def ladder(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("ladder")


@pytest.mark.parametrize("rung", ["20x4", "20x16", "120x4", "120x16"])
def test_every_config_is_planned_and_fits_its_cap(ladder: ModuleType, rung: str) -> None:
    found = ladder.Rung.read(rung)
    configs = found.configs()
    assert len(configs) == (13 if found.seconds < 120 else 5), "12 and 4 by hand, sprint among them"
    for name, options in configs.items():
        settings = (*(word for word in options if "=" in word), "budget.count_code=true")
        if name == "sprint":
            config = override(sprint(), f"budget.max_bytes={found.megabytes * 1e6:.0f}")
        else:
            request = Request(
                minutes=found.seconds / 60, max_bytes=int(found.megabytes * 1e6), text=CORPUS, settings=settings
            )
            config = make_plan(request, H200, load_laws()).best.config
            assert name == "auto" or name.startswith(
                f"{config.model.layers}x{config.model.width}-v{config.model.vocab_size}-"
            )
        check_size(config, Display(enabled=False))


def test_a_call_stops_in_time_and_the_next_one_continues(
    ladder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def climb(job: object, data: str, folder: Path) -> dict[str, object]:
        ran.append(job.key)  # type: ignore[attr-defined]
        assert data == "text:a.txt,holdout=dev"
        if job.config == "sprint":  # type: ignore[attr-defined]
            return {"failed": "parbank train ended with 2", "predicted": None}
        return {"val_bpb": 1.0 + len(ran) / 100, "predicted": {"score": 1.1}}

    monkeypatch.setattr(ladder, "climb", climb)
    words = ["--data", "text:a.txt", "--rungs", "20x4,300x16", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["ladder.py", *words, "--seconds", "370"])
    with pytest.raises(SystemExit, match="1 runs are left"):
        ladder.main()
    assert ran[:2] == ["20s-4MB-auto-s0", "20s-4MB-sprint-s0"], "300 s do not fit 370"
    assert len(ran) == 13
    monkeypatch.setattr(sys, "argv", ["ladder.py", *words])
    ladder.main()
    assert ran[13:] == ["300s-16MB-auto-s0"], "nothing is run twice"
    (path,) = tmp_path.glob("ladder/*/result.json")
    rows = {(row["case"], row["provider"]): row for row in json.loads(path.read_text())["rows"]}
    assert rows["20 s, 4 MB: auto - best", "auto"]["value"] == pytest.approx(-0.02)
    assert rows["20 s, 4 MB: measured - predicted", "auto"]["value"] == pytest.approx(-0.09)
    assert rows["20s-4MB-sprint-s0", "sprint"]["note"] == "parbank train ended with 2"


def test_a_run_that_was_cut_off_is_begun_anew(
    ladder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`parbank train` refuses a folder with a checkpoint, and the config would count as failed for good."""
    (job,) = ladder.make_jobs([ladder.Rung(20, 4)], ["sprint"], [0])
    out = tmp_path / job.key
    (out / "checkpoint").mkdir(parents=True)
    trained = []

    def train(command: list[str], **given: object) -> subprocess.CompletedProcess[str]:
        trained.append(out.exists())
        out.mkdir()
        (out / "summary.json").write_text(json.dumps({"val_bpb": 1.5, "recompilations": len(trained) - 1}))
        (out / "config.json").write_text(json.dumps({"model": {}, "batch": {}}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", train)
    assert ladder.climb(job, "text:a", tmp_path)["val_bpb"] == 1.5
    assert ladder.climb(job, "text:a", tmp_path)["val_bpb"] == 1.5, "a run that has ended is not run again"
    assert trained == [False]
    (out / "summary.json").unlink()
    found = ladder.climb(job, "text:a", tmp_path)
    assert found["failed"] == "1 kernels or graphs were compiled while its clock ran", "and the other runs go on"


@pytest.mark.parametrize("factor", [None, 1.25])
def test_a_prediction_is_that_of_the_laws_alone(
    ladder: ModuleType, monkeypatch: pytest.MonkeyPatch, factor: float | None
) -> None:
    """Whatever ran before: a rung must not profit from the rungs above it."""
    (job,) = ladder.make_jobs([ladder.Rung(20, 4)], ["auto"], [0])
    names = ("tokens", "tokens_per_second", "layers", "width", "vocab_size", "batch_tokens")
    plain = {"score": 1.2, "deviation": 0.2, "packing": 0.04}
    said = {"expected": plain | dict.fromkeys(names, 1), "notes": [], "known": None}
    if factor is not None:
        said["known"] = {"on": "2026-11-19", "bpb": 1.3, "factor": factor, "score": 1.2, "deviation": 0.2}
        said["expected"] = said["expected"] | {"score": factor * 1.2, "deviation": 0.01, "packing": factor * 0.04}
    done = subprocess.CompletedProcess([], 0, stdout=json.dumps(said))
    monkeypatch.setattr(subprocess, "run", lambda *command, **given: done)
    found = ladder.predict(job, "text:a")
    assert {name: found[name] for name in plain} == pytest.approx(plain)
    if factor is not None:
        assert found["with_history"]["score"] == pytest.approx(1.5)
        assert found["with_history"]["on"] == "2026-11-19"
    else:
        assert "with_history" not in found
