"""`train` leaves the page of its run in the folder, and no fault of the page ends a run."""

import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import parbank
from parbank.cli.main import app
from parbank.display import Display
from parbank.errors import ParbankError
from parbank.report.record import read_record
from parbank.report.write import write_run_page
from parbank.training.run import DETAILS, PAGE, _write_page
from parbank.training.trainer import Trainer
from tests.report.folders import make_run
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


def test_a_run_that_fails_leaves_its_page(text_spec: str, tmp_path: Path) -> None:
    """And one that is refused writes nothing into the folder of another."""
    options: dict[str, Any] = {"recipe": "nano", "data": text_spec, "steps": 9, "out": tmp_path / "run", "quiet": True}
    settings = ["optim.matrix_lr=1e30", "train.max_skipped=2", "train.warmup_steps=0", "train.log_every=1"]
    with pytest.raises(ParbankError, match="not finite"):
        parbank.train(**options, settings=settings)
    path = tmp_path / "run" / "report.html"
    assert "Its last row has no finite loss; 2 steps were skipped." in Page(path).text
    path.write_text("")
    with pytest.raises(ParbankError):
        parbank.train(**options)
    assert path.read_text() == ""


def test_the_page_of_an_ended_run_needs_no_torch(tmp_path: Path) -> None:
    """PyTorch takes longer to import, above all on a machine with a GPU, than the page to make."""
    folder = make_run(tmp_path / "run", "optim.clip=0.5")
    changes = read_record(folder).changes
    write_run_page(folder, json.loads((folder / "summary.json").read_text()))
    assert read_record(folder).changes == changes == {"optim.clip": (0.3, 0.5)}
    code = f"""if True:
        import sys
        from pathlib import Path
        from parbank.report.listing import list_runs
        from parbank.report.write import write_pages
        folder = Path({str(folder)!r})
        write_pages([folder], folder / "one.html")
        write_pages([folder, folder], folder / "two.html")
        list_runs(folder.parent)
        sys.exit("torch" in sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (folder / "one.html").read_text().count("optim.<wbr>clip") == 2


@pytest.mark.parametrize("kept", [None, [], "x"])
def test_a_run_of_no_recipe_says_so(tmp_path: Path, kept: object) -> None:
    folder = make_run(tmp_path / "run", details={"changes": kept})
    assert "follows no recipe of this parbank" in Page(write_run_page(folder)).text


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
