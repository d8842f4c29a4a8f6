"""The commands of benchmarks/studies/QUEUE.md, with runs that take no time: each must be understood and fit its seconds."""

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from parbank.config import to_dict
from parbank.files import write_json
from parbank.recipes import get_recipe
from parbank.study import engine
from parbank.study.report import make_report
from parbank.study.study import BASE, TRAINED, read_study
from tests.cli.calls import Call

ROOT = Path(__file__).resolve().parents[2]
QUEUE = ROOT / "benchmarks" / "studies" / "QUEUE.md"
SECONDS = 550  # of one command
Benchmark = Callable[[str], ModuleType]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs of a study, without running them."""

    def run_jobs(folder: Path, *arguments: object) -> None:
        study = read_study(folder)
        (folder / "results").mkdir(exist_ok=True)
        for job in study.jobs():
            noise = (7 * job.seed + 3 * len(job.arm)) % 5 / 1000
            value = 1 + job.seed / 100 + noise + len(job.arm) / 100 * (job.arm != BASE)
            against = {"against": 1.0} if study.own_baselines else {}
            (folder / "results" / f"{job.key}.json").write_text(json.dumps({"arm": job.arm, "value": value} | against))

    monkeypatch.setattr(engine, "_run_jobs", run_jobs)


def read_queue() -> dict[str, tuple[int, float, int, list[str]]]:
    """Runs, seconds of a run, commands, and the command itself, by the names of the table."""
    text = QUEUE.read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]
    lines = re.findall(r"```sh\n(.*?)\n```", text.replace("\\\n", " "))
    assert len(rows) == len(lines)
    return {
        row[0].strip("`"): (int(row[1]), float(row[2]), int(row[3]), shlex.split(line))
        for row, line in zip(rows, lines)
    }


def test_every_command_of_the_queue_runs_and_fits(
    call: Call, at_once: None, text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, benchmark: Benchmark
) -> None:
    """In their order: later commands need the folders of earlier ones."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    for name, (runs, seconds, commands, words) in read_queue().items():
        if "study_ranks.py" in words[1]:
            ranks = benchmark("study_ranks")
            studies = [ranks.read_study(tmp_path / word) for word in words[2:]]
            found = {row.case: row for row in ranks.rows_of(*studies)}
            assert found["rank correlation of 6 arms (Spearman)"].value == pytest.approx(1)
            continue
        assert words[words.index("--seconds") + 1] == str(SECONDS)
        given = [text_spec if word == "$DATA" else word for word in words[words.index("--") + 1 :]]
        answer = call("study", "run", *given, "--workers", 0, "--device", "cpu")
        assert answer.code == 0, answer.err
        report = make_report(tmp_path / given[given.index("--out") + 1])
        assert len(report.states) == runs, name
        assert report.study.kind not in TRAINED or seconds > (report.study.seconds or 0), name
        # a run in progress is lost when a command stops, and a start takes half a minute
        assert commands * (SECONDS - 30) - (commands - 1) * seconds >= runs * seconds, name
        if "--keep" in given:  # what the next study starts from
            folder = tmp_path / "runs" / "seeds" / "runs" / "base.0"
            folder.mkdir(parents=True)
            write_json(folder / "config.json", to_dict(get_recipe("sprint")))


def test_ranks_are_read_from_a_folder_or_a_result(
    at_once: None, call: Call, text_spec: str, tmp_path: Path, benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = benchmark("study_ranks")
    arms = ["--arms", "swa,no-softcap,value-residual"]
    nano = ["--recipe", "nano", "--data", text_spec, "--seeds", 2, "--workers", 0, "--device", "cpu"]
    for steps in (6, 12):
        out = tmp_path / str(steps)
        assert call("study", "run", "seeds", *arms, *nano, "--budget", f"{steps}steps", "--out", out).code == 0
    monkeypatch.setattr(
        "sys.argv", ["x", str(tmp_path / "6"), str(tmp_path / "12" / "result.json"), "--out", str(tmp_path)]
    )
    ranks.main()
    (path,) = (tmp_path / "study_ranks").glob("*/result.json")
    found = json.loads(path.read_bytes())
    assert [source["name"] for source in found["sources"]] == ["seeds", "seeds"]
    (correlation,) = (row["value"] for row in found["rows"] if row["case"].startswith("rank correlation of 3 arms"))
    assert math.isclose(correlation, 1)
    assert str(tmp_path) not in path.read_text()
