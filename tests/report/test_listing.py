"""`parbank runs`: which folders are runs, in which order, and as JSON."""

import json
import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parbank.cli.main import app
from parbank.errors import ConfigError
from parbank.files import HOLDER
from parbank.report import record
from parbank.report.listing import list_runs
from parbank.report.record import read_rows
from tests.report.folders import make_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "b", val_bpb=1.2, details={"ended_at": "2026-01-03T00:00:00+00:00"})
    make_run(
        root / "deep" / "down" / "a", recipe="demo", val_bpb=1.1, details={"ended_at": "2026-01-02T00:00:00+00:00"}
    )
    old = make_run(root / "old", details=None, val_bpb=1.3)
    os.utime(old / "summary.json", (0, 0))
    running = make_run(root / "running")
    (running / "summary.json").unlink()
    (running / HOLDER).write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    make_run(root / "b" / "checkpoint" / "inside")
    (root / "other").mkdir()
    (root / "other" / "config.json").write_text("no JSON")
    return root


def names(lines: list[object]) -> list[str]:
    return [Path(line.folder).name for line in lines]  # type: ignore[attr-defined]


def test_runs_are_found_sorted_and_chosen(folder: Path) -> None:
    assert names(list_runs(folder, sort="score")) == ["a", "b", "old", "running"]
    assert names(list_runs(folder, sort="score", reverse=True)) == ["old", "b", "a", "running"]
    assert names(list_runs(folder, ended=True)) == ["old", "a", "b"]
    assert names(list_runs(folder, recipe="demo")) == ["a"]
    first = list_runs(folder, sort="score")[1]
    assert (first.recipe, first.bytes, first.score) == ("sprint", 15_844_557 + 140_992, 1.2)
    assert first.minutes == pytest.approx(119.7 / 60)
    assert list_runs(folder, ended=True)[0].date == "1970-01-01T00:00:00+00:00"


def test_the_command_prints_a_table_and_json(folder: Path) -> None:
    call = CliRunner().invoke
    table = call(app, ["runs", str(folder), "--sort", "score"]).output
    assert "1.2000" in table
    assert "15,985,549" in table
    assert "running" in table.splitlines()[-1].split()[1:], "as a state, beside the name"
    listed = json.loads(call(app, ["runs", str(folder), "--ended", "--json"]).output)
    assert [line["score"] for line in listed] == [1.3, 1.1, 1.2]
    assert "no run below" in call(app, ["runs", str(folder / "other")]).output


def test_a_sort_or_a_folder_that_is_none_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--sort must be one of date, score"):
        list_runs(folder, sort="luck")
    with pytest.raises(ConfigError, match="there is no folder"):
        list_runs(folder / "nowhere")


def test_a_list_reads_no_rows_of_ended_runs_and_survives_odd_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of runs may have a hundred thousand rows each."""
    make_run(tmp_path / "ended", val_bpb=1.0)
    odd = make_run(tmp_path / "odd")
    (odd / "summary.json").write_text('{"train_seconds": "long"')
    (odd / "metrics.jsonl").write_text(json.dumps({"step": 1, "seconds": 10**400}) + "\n")
    read: list[Path] = []
    monkeypatch.setattr(record, "read_rows", lambda path: read.append(path) or read_rows(path))
    found = {Path(line.folder).name: line for line in list_runs(tmp_path)}
    assert [path.parent.name for path in read] == ["odd"]
    assert (found["odd"].state, found["odd"].minutes) == ("stopped", None)
    assert found["ended"].state == "ended"
