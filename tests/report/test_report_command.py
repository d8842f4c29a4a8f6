"""`parbank report`: a run, several runs, a study; and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from parbank.cli.main import app
from parbank.errors import ConfigError, FileError
from parbank.recipes import get_recipe
from parbank.study.study import Arm, Study, write_study
from tests.report.folders import make_run
from tests.report.test_run_page import Page


def report(*words: object) -> str:
    found = CliRunner().invoke(app, ["report", *map(str, words)])
    if found.exception is not None:
        raise found.exception
    return found.output


def test_one_run_several_runs_and_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [make_run(tmp_path / f"run-{n}", f"optim.clip={n + 1}", seed=n) for n in range(5)]
    assert f"{folders[0] / 'report.html'}: " in report(folders[0])
    summary = json.loads((folders[0] / "summary.json").read_text())
    assert f"{summary['val_bpb']:.4f}" in Page(folders[0] / "report.html").text
    monkeypatch.chdir(tmp_path)
    assert "report.html: " in report(*folders)
    page = Page(tmp_path / "report.html")
    assert "5 runs compared" in page.text
    assert len(page.chart("Validation by tokens")) == 5
    study = Study(name="widths", base=get_recipe("nano"), arms=(Arm(name="wide", settings=("model.width=64",)),))
    write_study(tmp_path / "study", study)
    report(tmp_path / "study", "-o", tmp_path / "study.html")
    assert "model.width=64" in Page(tmp_path / "study.html").text
    with pytest.raises(ConfigError, match="is a study, which has a page of its own"):
        report(folders[0], tmp_path / "study")


def test_no_other_file_is_replaced(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "report.html").write_text("<p>mine")
    with pytest.raises(FileError, match="is no page of parbank"):
        report(folder)
    assert (folder / "report.html").read_text() == "<p>mine"
    report(folder, "--out", tmp_path / "page.html")
    report(folder, "--out", tmp_path / "page.html")  # an earlier page is replaced
