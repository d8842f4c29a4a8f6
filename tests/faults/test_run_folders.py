"""A run folder: one run at a time, and no file in it that parbank did not write is changed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from parbank.api.run import _new_folder
from parbank.errors import ConfigError, FileError
from parbank.files import locked
from parbank.runtime import Runtime
from parbank.training.folder import UNFINISHED, open_folder

PLACE = Runtime(device=torch.device("cpu"))
TRAIN = [sys.executable, "-m", "parbank", "train", "--recipe", "nano", "--device", "cpu"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start(spec: str, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [*TRAIN, "--data", spec, "--out", str(out), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the process ended before it said {text!r}")


@pytest.mark.parametrize("name", ["tensorboard/events", "config.json", "metrics.jsonl", "model.pbk", "notes.txt"])
def test_a_folder_of_the_user_is_refused_and_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    with (
        pytest.raises(ConfigError, match=r"is not empty .*choose a new or empty --out"),
        open_folder(tmp_path, False, PLACE),
    ):
        pass
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "model.pbk", "summary.json", "details.json", "report.html"])
def test_a_resume_beside_a_loose_checkpoint_overwrites_nothing(name: str, tmp_path: Path) -> None:
    """Somebody's folder with a copy of a checkpoint. A run has its config.json beside every file that it writes."""
    (tmp_path / "step_00000006.pt").write_bytes(b"")
    (tmp_path / name).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=f"holds {name} and no config.json"), open_folder(tmp_path, True, PLACE):
        pass
    assert contents(tmp_path) == before
    (tmp_path / "config.json").write_text("{}")
    with open_folder(tmp_path, True, PLACE) as folder:
        assert folder.checkpoint == tmp_path / "step_00000006.pt"


@pytest.mark.parametrize("name", [".run.lock", ".run.json"])
def test_a_file_of_the_user_with_the_name_of_a_lock_is_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"pid": "mine"}')
    with pytest.raises(FileError, match=f"{name} is a file of another program"), open_folder(tmp_path, False, PLACE):
        pass
    assert contents(tmp_path) == {name: b'{"pid": "mine"}'}


def test_an_attempt_that_failed_before_its_first_checkpoint_may_be_repeated(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def fail() -> None:
        with open_folder(out, False, PLACE) as folder:
            folder.started = True
            (out / "config.json").write_text("{}")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert sorted(contents(out)) == [UNFINISHED, "config.json"]
    with open_folder(out, False, PLACE) as folder:
        folder.started = True
    assert sorted(contents(out)) == ["config.json"], "a run that has ended leaves no marker and no lock"
    with pytest.raises(ConfigError, match="is not empty"), open_folder(out, False, PLACE):
        pass


@pytest.mark.parametrize("name", [".run.json", ".unfinished", "config.json"])
def test_what_a_kill_left_of_a_first_write_is_no_file_of_the_user(name: str, tmp_path: Path) -> None:
    (tmp_path / f".{name}.0123456789ab.tmp").write_text("{")
    with open_folder(tmp_path, False, PLACE):
        assert {path.name for path in tmp_path.iterdir()} == {".run.lock", ".run.json", UNFINISHED}


def test_a_model_without_a_summary_is_not_overwritten(tmp_path: Path) -> None:
    for name in (UNFINISHED, "model.pbk"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match="is not empty"), open_folder(tmp_path, False, PLACE):
        pass


def test_a_failure_before_training_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), open_folder(tmp_path / "a" / "run", False, PLACE):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_two_runs_of_the_same_second_have_two_folders() -> None:
    assert len({_new_folder("nano", PLACE) for _ in range(20)}) == 20


def test_the_second_run_is_told_of_the_first_and_a_kill_frees_the_folder(text_spec: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with start(text_spec, out, "--minutes", "5") as first:
        wait_for(first, "the clock starts now")
        with start(text_spec, out, "--steps", "2") as second:
            said = second.communicate(timeout=300)[0]
        assert second.returncode == 2
        assert f"{out} is in use by process {first.pid} on " in said
        assert "since 20" in said
        first.kill()
    assert (out / UNFINISHED).exists()
    with start(text_spec, out, "--steps", "2") as third:
        said = third.communicate(timeout=300)[0]
    assert third.returncode == 0, said
    assert {path.name for path in out.iterdir()} == {
        "config.json", "metrics.jsonl", "tensorboard", "checkpoint", "model.pbk", "details.json", "summary.json",
        "report.html",
    }  # fmt: skip
    assert json.loads((out / "summary.json").read_text())["steps"] == 2


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from parbank.files import locked\n"
        "with locked(Path(sys.argv[1]) / 'x.lock', Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        wait_for(process, "held")
        with pytest.raises(FileError, match=f"in use by process {process.pid}"), locked(tmp_path / "x.lock", tmp_path):
            pass
        os.kill(process.pid, signal.SIGKILL)
    said: list[str] = []
    began = time.monotonic()
    with locked(tmp_path / "x.lock", tmp_path, wait=said.append):
        pass
    assert said == []
    assert time.monotonic() - began < 60
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_has_just_taken_the_lock_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FileLock(tmp_path / "x.lock", is_singleton=False)
    holder = {"pid": 4711, "host": "here", "since": "2026-01-01 00:00:00"}

    def write_meanwhile(seconds: float) -> None:
        (tmp_path / "x.json").write_text(json.dumps(holder), encoding="utf-8")

    with lock:
        monkeypatch.setattr("parbank.files.time.sleep", write_meanwhile)
        with pytest.raises(FileError, match="in use by process 4711 on here"), locked(tmp_path / "x.lock", tmp_path):
            pass


def test_a_resumed_run_has_no_summary_until_it_ends(text_spec: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with start(text_spec, out, "--steps", "2") as process:
        said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    command = [
        sys.executable,
        "-m",
        "parbank",
        "train",
        "--resume",
        "--device",
        "cpu",
        "--out",
        str(out),
        "--minutes",
        "5",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as again:
        wait_for(again, "the clock starts now")
        again.kill()
    assert not (out / "summary.json").exists()
    assert (out / "model.pbk").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_deletes_no_run(tmp_path: Path) -> None:
    """A second demo is trained in a folder of its own; `make clean` deletes what make can build again."""

    def commands(target: str) -> list[str]:
        makefile = Path(__file__).parents[2] / "Makefile"
        command = ["make", "--dry-run", "--always-make", "--file", str(makefile), target]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "DEMO_OUT"))}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    for name in ("pyproject.toml", "README.md"):  # what the targets depend on
        (tmp_path / name).touch()
    assert commands("demo")[-1].split()[-2:] == ["--out", "runs/demo"]
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert "--out" not in commands("demo")[-1]
    deleted = [line for target in ("demo", "clean") for line in commands(target) if line.startswith("rm ")]
    assert deleted
    assert not any("runs" in line for line in deleted)
