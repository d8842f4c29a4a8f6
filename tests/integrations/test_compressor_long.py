"""The compressor in its long form: 500 random lists of files, and commands that are killed half-way."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parbank.artifact.load import LoadedModel
from parbank.data.dataset import open_dataset
from parbank.eval.compressor.archive import compress as write_archive
from parbank.training.load import load_model
from tests.eval.test_compressor import CONTENTS, make_loaded, round_trip
from tests.faults.frozen import freeze

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def loaded(text_spec: str) -> LoadedModel:
    return make_loaded(open_dataset(text_spec, vocab_size=320, say=lambda line: None).tokenizer)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    contents=st.lists(CONTENTS, min_size=1, max_size=4), segments=st.sampled_from([None, 1, 3, 64]), model=st.booleans()
)
def test_500_lists_of_files_come_back(
    loaded: LoadedModel, tmp_path: Path, contents: list[bytes], segments: int | None, model: bool
) -> None:
    assert round_trip(loaded, contents, tmp_path, segments, model) == contents


@pytest.fixture(scope="module")
def model(text_spec: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "nano"
    run(
        "train", "--recipe", "nano", "--data", text_spec, "--steps", 2, "--out", out, "--device", "cpu"
    ).check_returncode()
    return out / "model.pbk"


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "parbank", *map(str, arguments)]


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True, check=False)


def kill_while_writing(folder: Path, *arguments: object) -> None:
    """Kills the command, without a chance to clean up, as soon as its temporary file is there. A command that ended before
    this process saw the file, on a busy machine, is repeated."""
    silent = subprocess.DEVNULL
    for _ in range(10):
        with subprocess.Popen(command(*arguments), cwd=ROOT, stderr=silent, stdout=silent) as process:
            while process.poll() is None:
                if any(folder.glob(".*.tmp")):
                    freeze(process.pid)
                    os.kill(process.pid, signal.SIGKILL if any(folder.glob(".*.tmp")) else signal.SIGCONT)
                time.sleep(0.01)
        if process.returncode == -signal.SIGKILL:
            return
        assert process.returncode == 0
        for path in folder.iterdir():
            path.unlink()
    pytest.fail("ten commands ended before they could be killed")


def test_a_killed_command_leaves_no_half_file_and_the_next_one_succeeds(model: Path, tmp_path: Path) -> None:
    text = "".join(f"def f{i}(a):\n    return a + {i}\n" for i in range(3000)).encode()
    source, packed, back = tmp_path / "a.txt", tmp_path / "out" / "a.pbz", tmp_path / "back"
    source.write_bytes(text)
    packed.parent.mkdir()
    compress = ("compress", source, "--model", model, "-o", packed, "--device", "cpu", "--threads", 1)
    kill_while_writing(packed.parent, *compress)
    assert not packed.exists()
    run(*compress).check_returncode()
    assert [path.name for path in packed.parent.iterdir()] == ["a.pbz"], "the leftover is gone"
    packed.unlink()  # this model has hardly learnt: the command stored the text by xz, and reading that back takes no time
    write_archive([source], load_model(model, torch.device("cpu")), packed, always_model=True)
    decompress = ("decompress", packed, "--model", model, "-o", back)
    back.mkdir()
    kill_while_writing(back, *decompress)
    assert not (back / "a.txt").exists()
    run(*decompress).check_returncode()
    assert [path.name for path in back.iterdir()] == ["a.txt"]
    assert (back / "a.txt").read_bytes() == text
