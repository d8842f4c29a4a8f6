"""`train` leaves the page of its run in the folder, and no fault of the page ends a run."""

import json
from pathlib import Path

import pytest

import parbank
from parbank.api.run import _write_page
from tests.report.test_run_page import Page


def test_a_run_leaves_its_page(text_spec: str, tmp_path: Path) -> None:
    settings = ["train.validate_every=1steps", "train.validate_tokens=64", "train.warmup_steps=0"]
    run = parbank.train(recipe="nano", data=text_spec, steps=2, out=tmp_path / "run", quiet=True, settings=settings)
    page = Page(run.folder / "report.html")
    assert f"{run.summary['val_bpb']:.4f}" in page.text
    assert len(page.chart("Validation by clock")["sample, during training"]) == 2
    assert page.text.count("Not recorded") == 1
    assert "the run was on a CPU" in page.text
    details = json.loads((run.folder / "details.json").read_text())
    assert sum(t["packed_bytes"] for t in details["tensors"]) < run.summary["artifact_bytes"]
    assert details["tensors"][0]["name"] in page.text
    assert details["samples"][0]["text"] == run.summary["sample"]
    assert (run.folder / "summary.json").stat().st_mtime_ns >= (run.folder / "details.json").stat().st_mtime_ns


def test_a_page_that_fails_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_page(tmp_path, quiet=False)
    assert "report.html was not written (ConfigError" in capsys.readouterr().err
