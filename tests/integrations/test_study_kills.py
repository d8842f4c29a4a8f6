"""Studies whose workers are killed: the table at the end is that of an undisturbed study."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from parbank.files import is_running
from parbank.study.engine import open_study, run_study
from parbank.study.report import make_report
from parbank.study.ship import make_study
from parbank.study.worker import GRACE, work
from tests.faults.frozen import freeze

KILLS = 30


def test_thirty_kills_change_nothing(text_spec: str, tmp_path: Path) -> None:
    study = make_study(
        "seeds",
        recipe="nano",
        data=text_spec,
        budget="12steps",
        seeds=4,
        arms=["value-residual"],
        extra=["slow:optim.matrix_lr=0.0001,optim.embedding_lr=0.0001"],
        score_tokens=5000,
    )
    undisturbed = run_study(study, tmp_path / "alone" / "undisturbed", device="cpu", workers=0, quiet=True)
    seconds = max(run["wall_seconds"] for run in undisturbed.results.values())
    folder = tmp_path / "apart" / "killed"  # beside the other study it would count on the noise found there
    open_study(folder, study)
    forks = multiprocessing.get_context("forkserver")  # imports once, and forks a worker in milliseconds
    forks.set_forkserver_preload(["parbank.study.worker"])
    generator, hits = random.Random(30), 0
    for _ in range(KILLS):
        workers = [forks.Process(target=work, args=(folder,), kwargs={"device": "cpu"}) for _ in range(2)]
        for worker in workers:
            worker.start()
        wait_for_claim(folder)
        time.sleep(generator.random() * seconds)
        for worker in workers:
            hits += worker.is_alive()
            worker.kill()
            worker.join()
        if make_report(folder).is_complete:
            for path in sorted((folder / "results").iterdir())[::2]:  # as if they had never ended: there is work again
                path.unlink()
    assert hits > KILLS, "most kills must meet a worker"
    killed = run_study(None, folder, device="cpu", workers=0, quiet=True)
    assert killed.is_complete
    values = [{job: result["value"] for job, result in report.results.items()} for report in (undisturbed, killed)]
    assert values[0] == values[1]
    assert undisturbed.comparisons == killed.comparisons
    assert not list((folder / "failures").iterdir())


def wait_for_claim(folder: Path, count: int = 1) -> None:
    end = time.monotonic() + 60
    while len(list((folder / "claims").glob("*.json"))) < count and time.monotonic() < end:
        time.sleep(0.01)


def test_a_worker_that_dies_is_replaced_and_its_job_tried_again(text_spec: str, tmp_path: Path) -> None:
    """`study run --workers 2`, one of the two killed while it holds a job. A run is short: the workers' start takes longer."""
    running = subprocess.Popen(study_run(text_spec, tmp_path / "s", workers=2), stdout=subprocess.PIPE, text=True)
    kill_a_holder(tmp_path / "s")
    out, _ = running.communicate(timeout=600)
    assert running.returncode == 0
    report = make_report(tmp_path / "s")
    assert report.is_complete
    assert not report.failures
    (failure,) = (tmp_path / "s" / "failures").iterdir()
    assert "was ended by SIGKILL" in failure.read_text()
    assert "6 of 6  " in out
    assert "| value-residual | 3 " in out


def study_run(text_spec: str, folder: Path, *, workers: int) -> list[str]:
    command = [sys.executable, "-m", "parbank", "study", "run", "seeds", "--recipe", "nano", "--data", text_spec]
    command += ["--budget", "6steps", "--seeds", "3", "--arms", "value-residual", "--device", "cpu"]
    command += ["--score-tokens", "2000", "--set", "train.warmup_steps=0", "--workers", str(workers)]
    return [*command, "--out", str(folder)]


@pytest.mark.parametrize(("workers", "number"), [(2, signal.SIGKILL), (1, signal.SIGTERM)])
def test_workers_do_not_outlive_the_command_that_started_them(
    text_spec: str, tmp_path: Path, workers: int, number: int
) -> None:
    """Otherwise they would go on, and the same command would start as many beside them."""
    command = study_run(text_spec, tmp_path / "s", workers=workers)
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for_claim(tmp_path / "s", workers)
    holders = {json.loads(path.read_text())["pid"] for path in (tmp_path / "s" / "claims").glob("*.json")}
    assert running.pid not in holders
    os.kill(running.pid, number)
    running.wait(60)
    end = time.monotonic() + 2 * GRACE
    while alive := [pid for pid in holders if is_running(pid)]:
        assert time.monotonic() < end, f"{alive} outlived the command"
        time.sleep(0.05)
    assert not make_report(tmp_path / "s").is_complete
    if workers == 2:  # once is enough: it takes seconds
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        assert make_report(tmp_path / "s").is_complete
    assert not list((tmp_path / "s" / "failures").iterdir()), "no run is to blame for that"


DEADLY = """#!/bin/sh
exec {python} -c '
import os, signal, sys
from parbank.study.kinds.training import Training
from parbank.study.worker import main
measure = Training.measure
def deadly(self, study, job):
    if job.key == "value-residual.1":
        os.kill(os.getpid(), signal.SIGSEGV)
    return measure(self, study, job)
Training.measure = deadly
sys.argv[:] = sys.argv[3:]
main()
' "$0" "$@"
"""


def test_a_job_that_kills_the_only_worker_is_noted_and_the_study_goes_on(
    text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text(DEADLY.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    study = make_study(
        "seeds",
        recipe="nano",
        data=text_spec,
        budget="4steps",
        seeds=2,
        arms=["value-residual"],
        settings=["train.warmup_steps=0"],
        score_tokens=1000,
    )
    report = run_study(study, tmp_path / "s", device="cpu", quiet=True)
    assert report.is_complete
    assert {job.key: error for job, error in report.failures.items()} == {
        "value-residual.1": f"worker 0 was ended by SIGSEGV; see {tmp_path / 's' / 'workers' / '0.log'}"
    }
    assert len(report.results) == 3


def kill_a_holder(folder: Path) -> None:
    """Kills a worker that holds a job. A worker that was faster than this test may go on."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        for path in (folder / "claims").glob("*.json"):
            with suppress(OSError, ValueError):  # no claim any more, or no such process
                worker = int(json.loads(path.read_text())["pid"])
                freeze(worker)
                if path.exists() and json.loads(path.read_text())["pid"] == worker:
                    os.kill(worker, signal.SIGKILL)
                    return
                os.kill(worker, signal.SIGCONT)
        time.sleep(0.01)
    raise AssertionError("no worker has claimed a job")
