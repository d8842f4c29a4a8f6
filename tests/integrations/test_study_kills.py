"""A study that is killed thirty times at random ends with the table of an undisturbed one."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from parbank.study.engine import open_study, run_study
from parbank.study.report import make_report
from parbank.study.ship import make_study

KILLS = 30


def test_thirty_kills_change_nothing(text_spec: str, tmp_path: Path) -> None:
    study = make_study(
        "seeds",
        recipe="nano",
        data=text_spec,
        budget="40steps",
        seeds=6,
        arms=["value-residual", "gated-attention"],
        extra=["slow:optim.matrix_lr=0.0001,optim.embedding_lr=0.0001"],
        score_tokens=5000,
    )
    undisturbed = run_study(study, tmp_path / "undisturbed", device="cpu", quiet=True)
    folder = tmp_path / "killed"
    open_study(folder, study)
    generator, hits = random.Random(30), 0
    for _ in range(KILLS):
        workers = [start(folder) for _ in range(2)]
        wait_for_work(folder, workers)
        time.sleep(generator.random() * 2)
        for worker in workers:
            hits += worker.poll() is None
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        assert not make_report(folder).failures
    assert hits > KILLS / 2, "most kills must meet a worker"
    killed = run_study(None, folder, device="cpu", quiet=True)
    assert killed.is_complete
    values = [{job: result["value"] for job, result in report.results.items()} for report in (undisturbed, killed)]
    assert values[0] == values[1]
    assert undisturbed.comparisons == killed.comparisons
    assert not list((folder / "failures").iterdir())


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "parbank", "study", "work", str(folder), "--device", "cpu", "--quiet"]
    return subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)


def wait_for_work(folder: Path, workers: list[subprocess.Popen[bytes]]) -> None:
    """Until a claim of these workers is there, or they have ended: a kill during imports would prove little."""
    began = time.time()
    while time.time() - began < 120 and any(worker.poll() is None for worker in workers):
        if any(path.stat().st_mtime > began for path in (folder / "claims").glob("*.json")):
            return
        time.sleep(0.02)
