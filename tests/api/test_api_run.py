"""`parbank.train` and `Run`: the command's run, from Python."""

import inspect
import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import parbank
from parbank.api.run import Stopped, configure, read_changes
from parbank.cli import train as command
from parbank.errors import CheckpointError, ConfigError
from parbank.recipes import get_recipe
from parbank.training.checkpoint import find_checkpoint


def test_a_run_has_its_folder_its_summary_and_its_model(first: parbank.Run, home: Path) -> None:
    folder = home / first.folder
    assert first.folder == Path("runs/first")
    assert json.loads((folder / "summary.json").read_text(encoding="utf-8")) == first.summary
    again = parbank.Run.open(folder, device="cpu")
    assert again.summary == first.summary
    assert again.model is again.model, "read once"
    assert again.model.score().bpb == first.summary["val_bpb"], "the summary's score is this model's, to the last bit"
    assert repr(again) == f"Run({str(folder)!r}, steps=4, val_bpb={first.summary['val_bpb']:.4f})"
    assert repr(parbank.Run(folder=Path("x"), summary={})) == "Run('x', steps=None, val_bpb=None)"


def test_quiet_prints_nothing_and_the_default_prints_lines(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    options = {"recipe": "nano", "data": "text:books", "steps": 1, "device": "cpu"}
    with monkeypatch.context() as terminal:
        terminal.setattr(sys.stderr, "isatty", lambda: True)  # where preparing text would show a bar
        terminal.setenv("PARBANK_CACHE", str(tmp_path / "empty"))
        parbank.train(out=tmp_path / "quiet", quiet=True, **options)  # type: ignore[arg-type]
    assert capfd.readouterr() == ("", "")
    parbank.train(out=tmp_path / "loud", **options)  # type: ignore[arg-type]
    assert "val bpb" in capfd.readouterr().out


def test_every_option_of_the_command_is_a_keyword() -> None:
    options, keywords = (set(inspect.signature(function).parameters) for function in (command.train, parbank.train))
    assert options - keywords == {"live"}, "a page in a browser: `started` serves other programs"
    assert keywords - options == {"quiet", "started"}


def test_options_of_the_text_are_parts_of_its_spec(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [json.dumps({"body": path.read_text(encoding="utf-8")}) for path in sorted((home / "books").rglob("*.txt"))]
    assert rows
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, "{broken"]), encoding="utf-8")
    (tmp_path / "notes.md").write_text("left out", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    options = {"glob": "*.jsonl", "field": "body", "skip_bad": True}
    run = parbank.train(recipe="nano", data=Path(), steps=1, out="run", device="cpu", quiet=True, **options)  # type: ignore[arg-type]
    spec = json.loads((run.folder / "config.json").read_text(encoding="utf-8"))["data"]
    assert spec == f"text:train={tmp_path},glob=*.jsonl,field=body,skip-bad=yes"


def test_options_become_settings() -> None:
    options = {"steps": 7, "max_bytes": 9, "seed": 3}
    config = configure("nano", read_changes(**options, settings={"model.layers": 2, "model.value_layers": []}))
    assert (config.budget.steps, config.budget.max_bytes, config.seed) == (7, 9, 3)
    assert (config.model.layers, config.model.value_layers) == (2, ())
    assert config == configure("nano", read_changes(**options, settings=["model.layers=2", "model.value_layers=[]"]))
    written = configure("nano", read_changes(tokens="30_000", max_bytes="16MB")).budget
    assert (written.tokens, written.max_bytes) == (30_000, 16_000_000), "as the command takes them"
    clock = configure("nano", read_changes(minutes=0.5)).budget
    assert (clock.minutes, clock.steps) == (0.5, None), "one budget replaces the recipe's"
    numbers = {"model.layers": np.int64(2), "model.value_layers": np.array([0, 1]), "model.softcap": torch.tensor(3.0)}
    config = configure("nano", read_changes(steps=np.int64(5), seed=np.int64(3), settings=numbers))  # type: ignore[arg-type]
    assert (config.budget.steps, config.seed, config.model.layers, config.model.value_layers) == (5, 3, 2, (0, 1))
    assert config.model.softcap == 3.0
    spec = configure("nano", read_changes(data="text:x.txt")).data
    assert spec == f"text:train={Path('x.txt').absolute()},glob=*"
    assert configure("nano").model == get_recipe("nano").model
    assert configure("demo").tokenizer.case_operators
    shards = "data=shards:x"
    assert not configure("demo", [shards]).tokenizer.case_operators, "they say by themselves what they are"
    assert configure("demo", [shards, "tokenizer.case_operators=true"]).tokenizer.case_operators
    assert configure("demo", ["model.layers=3"]).batch == get_recipe("demo").batch
    assert configure("demo", ["batch.sequence_length=128"]).batch.stages == (), (
        "a length that is given is that of the run"
    )
    assert configure("demo", ["batch.sequence_length=128", "batch.stages=[[0.5,64,4096]]"]).batch.stages


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": 1, "steps": 2}, "give one of"),
        ({"resume": True}, "resume=True continues an earlier run: give its folder by out="),
        ({"resume": True, "recipe": "nano"}, "give its folder by out="),
        ({"settings": "model.layers=6"}, "a table or a list"),
        ({"settings": {"model.layrs": 6}}, "did you mean model.layers"),
        ({"recipe": "nan"}, "did you mean nano"),
        ({"recipe": 3}, "there is no recipe 3; there are demo"),
        ({"recipe": "", "steps": 1}, "there is no recipe ''; there are demo"),
        (
            {"recipe": "nano", "max_bytes": "200 k"},
            "'200 k' is not understood; a size is written as 16MB",
        ),
        ({"recipe": "nano", "minutes": float("nan")}, "budget.minutes must be a number that is finite, got nan"),
        (
            {"recipe": "nano", "seed": object()},
            "seed must be a number, a string, a bool, None or a list of them; got a object",
        ),
        ({"recipe": "nano", "settings": [3]}, r"strings such as 'model.layers=6'; got \[3\]"),
        ({"recipe": "nano", "settings": None}, "strings such as 'model.layers=6'; got None"),
        ({"recipe": "nano", "glob": 3}, r"glob is a pattern such as '\*.txt', or a list of patterns; got 3"),
        ({"recipe": "nano", "threads": "x"}, "threads= is a number from 1 to 1024, got 'x'"),
        ({"recipe": "nano", "tokens": "1MB"}, "'1MB' is not understood; a count is written as 2000000"),
        ({"recipe": "nano", "data": 3}, "data is a spec such as text:books, or a Path; got a int"),
        ({"recipe": "nano", "data": Path("a,b")}, "has a comma, which separates paths"),
    ],
)
def test_bad_arguments_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parbank.train(device="cpu", **options)


def test_one_command_starts_a_run_and_continues_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As torchrun's restarts need it: the same words each time."""
    monkeypatch.chdir(home)
    out = tmp_path / "run"

    def train(steps: int, recipe: str = "nano") -> str:
        parbank.train(recipe=recipe, data="text:books", steps=steps, out=out, resume=True, device="cpu")
        return capfd.readouterr().out

    def forget(name: str) -> None:
        shutil.rmtree(out / "checkpoint")
        for path in (out / "summary.json", out / "model.pbk"):
            path.unlink()
        (out / name).write_text("")

    assert f"no checkpoint in {out} to resume from; the run starts at its beginning" in train(1)
    assert "at step 1" in train(2)
    with pytest.raises(ConfigError, match="has the recipe nano, not demo; choose another out="):
        train(2, recipe="demo")
    forget(".unfinished")  # as a run that was killed before its first checkpoint leaves it
    assert "the run starts at its beginning" in train(1)
    forget("notes.txt")
    with pytest.raises(ConfigError, match="is not empty"):
        train(1)


def test_ctrl_c_saves_and_resume_goes_on(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    out = tmp_path / "run"

    def interrupt() -> None:
        while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text(encoding="utf-8"):
            if done.wait(0.02):
                return
        os.kill(os.getpid(), signal.SIGINT)

    done = threading.Event()
    watcher = threading.Thread(target=interrupt)
    watcher.start()
    try:
        with pytest.raises(Stopped) as stopped:
            parbank.train(recipe="nano", data="text:books", minutes=5, out=out, device="cpu", quiet=True,
                          settings={"train.log_every": 1})  # fmt: skip
    finally:
        done.set()
        watcher.join()
    assert isinstance(stopped.value, KeyboardInterrupt)
    with pytest.raises(CheckpointError, match="no run that has ended"):
        parbank.Run.open(out)
    assert parbank.load(out, device="cpu").source == find_checkpoint(out)
    step = int(find_checkpoint(out).stem.removeprefix("step_"))
    run = parbank.train(out=out, resume=True, steps=step + 1, device="cpu", quiet=True)
    assert run.summary["steps"] == step + 1
