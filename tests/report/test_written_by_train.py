"""`train` leaves the page of its run in the folder, and no fault of the page ends a run."""

import io
import json
import re
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

import parbank
from parbank.cli.main import app
from parbank.display import Display
from parbank.report.write import write_run_page
from parbank.training.run import DETAILS, PAGE, _write_page
from parbank.training.trainer import Trainer
from tests.report.test_run_page import Page


def test_a_run_leaves_its_page(text_spec: str, tmp_path: Path) -> None:
    settings = ["train.validate_every=1steps", "train.validate_tokens=64", "train.warmup_steps=0"]
    run = parbank.train(recipe="nano", data=text_spec, steps=2, out=tmp_path / "run", quiet=True, settings=settings)
    page = Page(run.folder / "report.html")
    assert f"{run.summary['val_bpb']:.4f}" in page.text
    assert len(page.chart("Validation by clock")["sample of 64 tokens, during training"]) == 2
    assert page.text.count("Not recorded") == 1
    assert "the run is on a CPU" in page.text
    details = json.loads((run.folder / "details.json").read_text())
    assert sum(t["packed_bytes"] for t in details["tensors"]) < run.summary["artifact_bytes"]
    assert details["tensors"][0]["name"] in page.text
    assert details["samples"][0]["text"] == run.summary["sample"]
    written = [(run.folder / name).stat().st_mtime_ns for name in ("details.json", "report.html", "summary.json")]
    assert written == sorted(written), "a run with a summary has ended"
    parts = run.summary["finish_parts"]
    assert min(parts[DETAILS], parts[PAGE], parts["sample"]) > 0
    assert run.summary["finish_seconds"] == pytest.approx(sum(parts.values()))
    assert run.summary == json.loads((run.folder / "summary.json").read_text())
    again = Page(write_run_page(run.folder))
    assert page.time_of("page") <= again.time_of("page"), "the first page has no seconds of its own writing"
    assert again.time_of("page") == pytest.approx(1000 * (parts[DETAILS] + parts[PAGE]), abs=51)  # shown in tenths


def test_a_run_that_is_stopped_leaves_a_page_that_says_how_to_go_on(
    text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(trainer: Trainer, display: Display, **more: object) -> None:
        trainer.stop_signal = signal.SIGINT

    monkeypatch.setattr("parbank.training.run.train_with_reports", stop)
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        parbank.train(recipe="nano", data=text_spec, steps=2, out=out, quiet=True, settings=["train.warmup_steps=0"])
    page = Page(out / "report.html")
    assert f"parbank train --resume --out {out}" in page.text
    assert "The run trains now" not in page.text
    details = json.loads((out / "details.json").read_text())
    assert details["device"] == "cpu"
    assert f"{details['params'] / 1000:.3g}k" in page.text


def test_the_command_names_the_page(text_spec: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["train", "--recipe", "nano", "--data", text_spec, "--steps", "1", "--out", str(out)]
    said = CliRunner().invoke(app, [*words, "--set", "train.warmup_steps=0"])
    assert re.search(rf"^page +{re.escape(str(out / 'report.html'))}, to open in a browser$", said.output, re.MULTILINE)


def test_a_page_that_fails_is_a_warning(tmp_path: Path) -> None:
    said = io.StringIO()
    _write_page(write_run_page, tmp_path, {}, Display(file=said))
    assert "warning: the page of the run could not be written (ConfigError" in said.getvalue()
