"""benchmarks/quality.py: a call that was cut off leaves nothing in the way of the next one."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def test_a_run_that_was_cut_off_is_begun_anew(
    benchmark: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`parbank train` refuses a folder with a checkpoint."""
    quality, out, trained = benchmark("quality"), tmp_path / "7", []
    (out / "checkpoint").mkdir(parents=True)

    def train(command: list[str], **given: object) -> subprocess.CompletedProcess[str]:
        trained.append(out.exists())
        out.mkdir()
        summary = {"data_wait_seconds": 1.0, "train_seconds": 4.0, "val_bpb": 1.5}
        (out / "summary.json").write_text(json.dumps(summary))
        (out / "metrics.jsonl").write_text(json.dumps({"seconds": 1.0, "step": 1, "loss": 2.0}) + "\n")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", train)
    for _ in range(2):
        found = quality.train("nano", "text:a", 7, out, [])
        assert (found["val_bpb"], found["data_wait_share"], found["curve"]) == (1.5, 0.25, [[1.0, 1, 2.0]])
    assert trained == [False], "the second call finds it ended"
