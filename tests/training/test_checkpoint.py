import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from parbank.errors import CheckpointError
from parbank.training.checkpoint import (
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    random_state,
    restore_random_state,
    save_checkpoint,
)


def state(step: int, size: int = 10) -> dict[str, object]:
    return {"step": step, "model": {"w": torch.full((size,), float(step))}}


def test_the_last_k_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    for step in (5, 20, 100):
        save_checkpoint(tmp_path / "checkpoint", state(step), keep=2)
    assert [p.name for p in list_checkpoints(tmp_path / "checkpoint")] == ["step_00000020.pt", "step_00000100.pt"]
    for path in (tmp_path, tmp_path / "checkpoint", tmp_path / "checkpoint" / "step_00000100.pt"):
        assert load_checkpoint(find_checkpoint(path))["step"] == 100


def test_nothing_found_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="give a run folder"):
        find_checkpoint(tmp_path)


def test_damaged_and_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    good = save_checkpoint(tmp_path, state(1, 10_000), keep=1)
    data = good.read_bytes()
    for name, content in {"short.pt": data[: len(data) // 2], "empty.pt": b"", "text.pt": b"hello"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint(tmp_path / name)
    place = data.index(torch.ones(8).numpy().tobytes())
    (tmp_path / "flipped.pt").write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    with pytest.raises(CheckpointError, match=r"flipped\.pt is damaged"):
        load_checkpoint(tmp_path / "flipped.pt")
    torch.save({"weights": 1}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="not a parbank checkpoint"):
        load_checkpoint(tmp_path / "other.pt")
    torch.save({**state(1), "format": 99}, tmp_path / "newer.pt")
    with pytest.raises(CheckpointError, match="format 99"):
        load_checkpoint(tmp_path / "newer.pt")


class Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, ("harm",))


def test_loading_runs_no_pickled_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({**state(1), "format": 1, "extra": Harmful()}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match=r"bad\.pt"):
        load_checkpoint(tmp_path / "bad.pt")
    assert not (tmp_path / "harm").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="choose another --out"):
        save_checkpoint(tmp_path, state(1), keep=1)


def test_a_file_in_the_way_is_an_error_and_leaves_no_rubbish(tmp_path: Path) -> None:
    (tmp_path / "step_00000001.pt").mkdir()
    (tmp_path / "step_00000001.pt" / "x").touch()
    with pytest.raises(CheckpointError, match="cannot write"):
        save_checkpoint(tmp_path, state(1), keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001.pt"]


WRITER = """
import sys, torch
from pathlib import Path
from parbank.training.checkpoint import save_checkpoint
step = 0
while True:
    step += 1
    save_checkpoint(Path(sys.argv[1]), {"step": step, "model": {"w": torch.full((300_000,), float(step))}}, keep=2)
    print(step, flush=True)
"""


def test_kill_9_at_any_moment_leaves_a_readable_checkpoint(tmp_path: Path) -> None:
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "1"
        time.sleep(0.013 * (attempt + 1))  # another phase of the write each time
        process.send_signal(signal.SIGKILL)
        process.communicate()
        loaded = load_checkpoint(find_checkpoint(folder))
        assert torch.equal(loaded["model"]["w"], torch.full((300_000,), float(loaded["step"])))


def test_random_state_round_trip() -> None:
    saved = random_state()
    first = (random.random(), np.random.rand(), torch.rand(1).item())
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    restore_random_state(saved)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == first
