"""What a run can do without does not end it, and what it cannot do without ends it with a sentence and a checkpoint."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from parbank.config import override
from parbank.data.dataset import open_dataset
from parbank.data.progress import Meter, say_on_stderr
from parbank.display import Display
from parbank.errors import CheckpointError
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from parbank.training.budget import Budget, Clock
from parbank.training.checkpoint import list_checkpoints, save_checkpoint
from parbank.training.config import BudgetConfig, RunConfig
from parbank.training.folder import UNFINISHED
from parbank.training.run import run
from parbank.training.seal import SealingWriter

PLACE = Runtime(device=torch.device("cpu"))
TRAIN = [sys.executable, "-m", "parbank", "train", "--device", "cpu"]


def nano(spec: str, *settings: str) -> RunConfig:
    return override(get_recipe("nano"), f"data={json.dumps(spec)}", "budget.steps=4", "train.log_every=2", *settings)


def test_a_full_standard_output_costs_nothing_but_the_words(text_spec: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [*TRAIN, "--recipe", "nano", "--steps", "2", "--data", text_spec, "--out", str(out)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the output cannot be written any more") == 1
    assert json.loads((out / "summary.json").read_text())["steps"] == 2


def test_a_full_standard_error_costs_a_preparation_nothing_but_the_words(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"The sea was calm on day {day}.\n" for day in range(400)))
    command = [sys.executable, "-m", "parbank", "data", "prepare", "a.txt", "--vocab", "300", "--out", "shards"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=full, timeout=300, check=False)
    assert done.returncode == 0
    assert (tmp_path / "shards" / "manifest.json").exists()


def test_progress_goes_on_where_the_terminal_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    other, own = os.openpty()
    reached = False
    with suppress(OSError), open(own, "w") as terminal:  # what is left to write when it is closed
        monkeypatch.setattr(sys, "stderr", terminal)
        with Meter("reading", say_on_stderr, total=4) as meter:
            os.close(other)
            meter.advance(4)
        with Meter("comparing", say_on_stderr, total=4) as meter:
            meter.advance(4)
        reached = True
    assert reached
    with Meter("tokenising", say_on_stderr, total=4) as meter:  # the stream is closed
        meter.advance(4)


def test_closed_standard_streams_cost_nothing_but_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os, sys; from parbank.cli.main import _replace_closed_streams\n"
        "for number in range(3): os.close(number)\n"
        "sys.stdin = sys.stdout = sys.stderr = None; _replace_closed_streams(); print('unheard'); sys.stderr.write('too')\n"
        "sys.exit(os.open(os.devnull, os.O_RDONLY))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=300, check=False)
    assert done.returncode >= 3, "a file must not get the descriptor of a standard stream"
    monkeypatch.setattr(sys, "stdout", None)
    Display().say("unheard")
    monkeypatch.setattr(sys, "stderr", None)
    with Meter("reading", say_on_stderr, total=4) as meter:
        meter.advance(4)


def test_files_that_cannot_be_written_warn_and_the_result_is_the_same(text_spec: str, tmp_path: Path) -> None:
    run(nano(text_spec), PLACE, tmp_path / "sound", display=Display(file=io.StringIO()))
    out, said = tmp_path / "run", io.StringIO()
    (out / "metrics.jsonl").mkdir(parents=True)
    for name in (UNFINISHED, "checkpoint", "tensorboard"):  # files where the run would make folders
        (out / name).write_text("")
    run(nano(text_spec, "train.checkpoint_minutes=0.0001"), PLACE, out, display=Display(file=said))
    lines = said.getvalue().splitlines()
    assert sum("warning: cannot write the checkpoint" in line for line in lines) >= 2, "while it trains and at its end"
    assert sum("warning: the logger jsonl failed and is dropped" in line for line in lines) == 1
    assert sum("warning: the logger tensorboard failed and is dropped" in line for line in lines) == 1
    assert (out / "model.pbk").read_bytes() == (tmp_path / "sound" / "model.pbk").read_bytes()
    assert (out / "summary.json").exists()


def test_a_shard_cut_short_ends_the_run_with_a_checkpoint(text_spec: str, tmp_path: Path) -> None:
    shards, out = tmp_path / "shards", tmp_path / "run"
    shutil.copytree(open_dataset(text_spec, vocab_size=320, say=lambda line: None).folder, shards)
    whole = (shards / "text_train_000000.bin").read_bytes()
    command = [*TRAIN, "--recipe", "nano", "--minutes", "5", "--data", f"shards:{shards}", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        while "step 1 " not in process.stdout.readline():
            assert process.poll() is None
        os.truncate(shards / "text_train_000000.bin", 5000)
        said = process.communicate(timeout=300)[0]
    assert process.returncode == 2, said
    (saved,) = list_checkpoints(out / "checkpoint")
    assert "text_train_000000.bin was cut short while it was read" in said
    assert f"is saved as {saved}" in said
    (shards / "text_train_000000.bin").write_bytes(whole)
    command = [*TRAIN, "--resume", "--out", str(out), "--minutes", "0.0001"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "summary.json").read_text())["steps"] == int(saved.stem.removeprefix("step_"))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_a_signal_in_a_save_is_no_full_disk(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.save turns whatever its file raises into a RuntimeError."""
    save_checkpoint(tmp_path, {"step": 1, "model": {}}, keep=1)

    def interrupted(state: object, file: object) -> None:
        try:
            raise error
        finally:
            raise RuntimeError("unexpected pos 46 vs 0")

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(type(error)):
        save_checkpoint(tmp_path, {"step": 2, "model": {}}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001.pt"]


def test_a_full_disk_in_a_save_says_so_and_keeps_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, {"step": 1, "model": {}}, keep=1)
    monkeypatch.setattr(os, "fsync", _full)
    with pytest.raises(CheckpointError, match=r"step_00000002\.pt: .*free some space"):
        save_checkpoint(tmp_path, {"step": 2, "model": {}}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001.pt"]


def test_a_disk_that_fills_up_while_torch_writes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.save then gives an 'unexpected pos' of its own: the reason is in the error before it."""
    whole = SealingWriter.write

    def write(self: SealingWriter, data: memoryview | bytes) -> int:
        if len(data) >= 4000:
            raise OSError(28, "No space left on device")
        return whole(self, data)

    monkeypatch.setattr(SealingWriter, "write", write)
    with pytest.raises(
        CheckpointError, match=r"step_00000002\.pt: \[Errno 28\] No space left on device; free some space"
    ):
        save_checkpoint(tmp_path, {"step": 2, "model": {"a": torch.zeros(1000)}}, keep=1)
    assert list(tmp_path.iterdir()) == []


def _full(handle: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_stopped_run_that_cannot_be_saved_is_an_error(text_spec: str, tmp_path: Path) -> None:
    for name in (UNFINISHED, "checkpoint"):
        (tmp_path / name).write_text("")
    command = [*TRAIN, "--recipe", "nano", "--minutes", "5", "--data", text_spec, "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        while "step 1 " not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=300)[0]
    assert process.returncode == 2, said
    assert "error: cannot write the checkpoint" in said
    assert "Traceback" not in said


def test_a_suspended_machine_is_named(text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((7.0, 67.0))
    monkeypatch.setattr("parbank.training.trainer.suspended_seconds", lambda: next(seconds))
    said = io.StringIO()
    run(nano(text_spec), PLACE, tmp_path / "run", display=Display(file=said))
    assert "warning: the machine was suspended for 60 s" in said.getvalue()


def test_a_pause_is_noticed_and_a_slow_step_is_not() -> None:
    budget = Budget(BudgetConfig(minutes=1.0, steps=None, tokens=None), 1, Clock())
    assert not budget.is_stall(60.0), "the first step may compile"
    for seconds in (0.1, 0.15, 0.1):
        budget.observe(seconds)
    assert not budget.is_stall(1.9)
    assert not budget.is_stall(2.9)
    assert budget.is_stall(3.1)


def test_a_full_disk_under_tensorboard_fails_in_this_thread(tmp_path: Path) -> None:
    """RLIMIT_FSIZE is a disk that is full after so many bytes of a file; only the events are that long here."""
    out = tmp_path / "run"
    code = (
        "import resource, signal, sys; from pathlib import Path; from parbank.training.loggers import LOGGERS\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))\n"
        "logger = LOGGERS['tensorboard'](Path(sys.argv[1]), resume_step=0)\n"
        "for step in range(100): logger.write({'step': step, 'loss': 1.0})\n"
    )
    command = [sys.executable, "-c", code, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "OSError: [Errno 27] File too large" in done.stderr
    assert "Thread" not in done.stderr
