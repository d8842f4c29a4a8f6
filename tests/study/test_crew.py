"""Worker processes: replaced when they die at work, ended with the block that started them. The workers here are scripts of
the tests' own, which start at once; tests/integrations/test_study_kills.py has real ones."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from parbank.errors import TrainingError
from parbank.study import crew
from parbank.study.crew import Crew, describe_end
from parbank.study.engine import keep_working, open_study, run_study
from parbank.study.queue import _pid_scope
from parbank.study.study import Study
from parbank.study.worker import DEVICE_LOST

# Notes each start in the study's folder, and can claim and finish jobs.
HEAD = """#!{python} -S
import json, os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[3])
with open(folder / "starts", "a") as file:
    file.write(" ".join(sys.argv[4:]) + os.linesep)
start = len((folder / "starts").read_text().splitlines())

def note(kind, job, **more):
    (folder / kind / (job + ".json")).write_text(json.dumps({{"pid": os.getpid(), **{place}, **more}}))

def finish(jobs):
    for job in jobs:
        note("results", job, arm=job[:-2], value=1 + int(job[-1]) / 10 + ord(job[0]) / 1000)

jobs = {jobs}
"""
Script = Callable[[str], None]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, study: Study) -> Script:
    """Makes workers run these lines."""
    real, jobs = sys.executable, [job.key for job in study.jobs()]

    def use(lines: str) -> None:
        path = tmp_path / "worker"
        path.write_text(HEAD.format(python=real, place=_pid_scope(), jobs=jobs) + lines)
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return use


@pytest.mark.parametrize("quiet", [True, False])
def test_a_job_that_kills_its_only_worker_is_reported_and_the_others_go_on(
    script: Script, study: Study, tmp_path: Path, quiet: bool
) -> None:
    script(
        "if start <= 2:\n    note('claims', 'slow.1', token='x')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "finish(set(jobs) - {'slow.1'})"
    )
    report = run_study(study, tmp_path / "s", device="cpu", quiet=quiet)
    assert report.is_complete
    assert [job.key for job in report.failures] == ["slow.1"]
    where = f"; see {tmp_path / 's' / 'workers' / '0.log'}" if quiet else ""
    assert f"slow, seed 1: worker 0 was ended by SIGKILL{where}\n" in report.text()
    assert report.comparisons["slow"].pairs == 2
    starts = (tmp_path / "s" / "starts").read_text().splitlines()
    assert starts == [f"--device cpu{'' if quiet else ' --progress'}"] * 3


def test_a_worker_that_lost_its_gpu_is_replaced(script: Script, study: Study, tmp_path: Path) -> None:
    """It holds no job: it has noted the error itself."""
    script(f"sys.exit({DEVICE_LOST}) if start == 1 else finish(jobs)")
    report = run_study(study, tmp_path / "s", device="cpu", quiet=True)
    assert report.is_complete
    assert not report.failures


def test_workers_that_cannot_start_end_the_study(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for workers in (1, 2):
        with pytest.raises(TrainingError, match=r"worker [01] ended with code 1: it left no message"):
            run_study(study, tmp_path / "s", workers=workers, device="cpu", quiet=True)


@pytest.mark.parametrize("given", [None, "1", "64", "4,2"])
def test_workers_of_one_machine_divide_its_cores(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """OMP_NUM_THREADS is an upper limit: as many threads in each worker would wait for each other, spinning."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(crew, "count_cores", lambda: 6)
    worker = tmp_path / "worker"
    worker.write_text('#!/bin/sh\necho "threads: $OMP_NUM_THREADS"\nexit 1\n')
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    with pytest.raises(TrainingError, match=f"threads: {1 if given == '1' else 3}$"):
        run_study(study, tmp_path / "s", workers=2, device="cpu", quiet=True)


def test_workers_end_with_the_block_by_their_pipe_or_by_force(
    script: Script, study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the block a worker that stays is alive, and idle. A worker that does not watch its pipe is killed."""
    monkeypatch.setattr(crew, "GRACE", 0.1)
    for watches in (True, False):
        folder = tmp_path / f"{watches}"
        open_study(folder, study)
        script(f"note('claims', 'slow.1', token='x')\n{'sys.stdin.read()' if watches else 'time.sleep(60)'}")
        with Crew(folder, 1, "cpu", stay=True) as workers:
            (process,) = workers._running.values()
            end = time.monotonic() + 30
            while not list((folder / "claims").iterdir()):
                assert time.monotonic() < end
                time.sleep(0.01)
            assert workers.attend()
        assert process.returncode == (0 if watches else -9)
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_added_jobs_are_run_by_the_same_worker(script: Script, study: Study, tmp_path: Path) -> None:
    """As a search needs it: a new process for every trial would import and compile again."""
    folder = tmp_path / "s"
    open_study(folder, study)
    (folder / "results").mkdir()
    script(
        "finish(set(jobs) - {'slow.1'})\nwhile not (folder / 'more').exists(): time.sleep(0.01)\n"
        "finish(jobs)\nsys.stdin.read()"
    )
    (folder / "results" / "slow.1.json").write_text('{"arm": "slow", "value": 2.0}')
    with keep_working(folder, 1, "cpu") as run:
        assert run().is_complete
        (folder / "results" / "slow.1.json").unlink()  # as if it had been added now
        (folder / "more").touch()
        assert run().is_complete
    assert (folder / "starts").read_text().splitlines() == ["--device cpu --stay"]


def test_a_worker_runs_the_code_of_the_process_that_started_it(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of a folder named parbank where the command is given."""
    for place in ("here", "own"):
        folder = tmp_path / place / "parbank" / "study"
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder.parent / "__init__.py").touch()
        (folder / "worker.py").write_text(f"def main():\n    raise SystemExit('the code is {place}')\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "own"), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "here"))
    with pytest.raises(TrainingError, match="worker 0 ended with code 1: the code is own"):
        run_study(study, tmp_path / "s", device="cpu", quiet=True)


def test_ends_in_words() -> None:
    assert describe_end(-9) == "was ended by SIGKILL"
    assert describe_end(-200) == "was ended by signal 200"
    assert describe_end(3) == "ended with code 3"
