"""The queue of a study: a job runs once, a dead worker's job comes back, an error is met twice at most."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from parbank.errors import FileError
from parbank.study.queue import Claim, Queue
from parbank.study.study import Job

JOBS = [Job(arm, seed) for seed in range(10) for arm in ("base", "wide")]


def take_all(folder: Path) -> list[Job]:
    queue, taken = Queue(folder), []
    while (claim := queue.claim(JOBS)) is not None:
        taken.append(claim.job)
        time.sleep(0.002)
        assert queue.finish(claim, {"value": 1.0})
    return taken


def test_workers_at_once_take_every_job_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        taken = [job for jobs in pool.map(take_all, [tmp_path] * 6) for job in jobs]
    assert sorted(taken) == sorted(JOBS)
    queue = Queue(tmp_path)
    assert set(queue.states(JOBS).values()) == {"done"}
    assert queue.claim(JOBS) is None


def test_jobs_are_taken_in_their_order_and_a_released_one_again(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    first, second = claimed(queue), claimed(queue)
    assert [first.job, second.job] == JOBS[:2]
    queue.release(first)
    assert claimed(queue).job == JOBS[0]
    assert queue.failures(JOBS[0]) == []


def claimed(queue: Queue) -> Claim:
    claim = queue.claim(JOBS)
    assert claim is not None
    return claim


def test_an_error_is_met_twice_and_then_reported(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    for attempt in range(2):
        claim = queue.claim(JOBS[:1])
        assert claim is not None, attempt
        queue.fail(claim, RuntimeError(f"bad luck {attempt}"))
    assert queue.claim(JOBS[:1]) is None
    assert queue.states(JOBS[:1]) == {JOBS[0]: "failed"}
    errors = [failure["error"] for failure in queue.failures(JOBS[0])]
    assert errors == ["RuntimeError: bad luck 0", "RuntimeError: bad luck 1"]


def test_a_job_that_failed_waits_until_the_others_have_run(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    queue.fail(claimed(queue), "out of memory")
    order = [claimed(queue).job for _ in range(len(JOBS))]
    assert order == [*JOBS[1:], JOBS[0]]


def test_a_dead_process_gives_its_job_back_at_once(tmp_path: Path) -> None:
    script = "import sys\nfrom pathlib import Path\nfrom tests.study.test_queue import JOBS, Queue\n"
    script += "Queue(Path(sys.argv[1])).claim(JOBS); print('claimed', flush=True); sys.stdin.read()"
    worker = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"claimed\n"
    queue = Queue(tmp_path)
    assert queue.states(JOBS)[JOBS[0]] == "running"
    worker.kill()
    worker.communicate()
    assert queue.states(JOBS)[JOBS[0]] == "waiting"
    assert queue.failures(JOBS[0]) == []  # a kill is not the job's fault
    assert claimed(queue).job == JOBS[0]


def test_the_death_of_a_watched_worker_counts_as_an_error_of_its_job(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    claimed(queue)
    assert queue.fail_worker(os.getpid(), "worker 0 ended with code -11")
    assert not queue.fail_worker(os.getpid(), "again")
    assert [failure["error"] for failure in queue.failures(JOBS[0])] == ["worker 0 ended with code -11"]


def pretend_elsewhere(folder: Path, job: Job) -> None:
    """Makes a claim look like that of a worker on another machine."""
    path = folder / "claims" / f"{job.key}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": "elsewhere", "pid": 1}))


def make_older(folder: Path, job: Job, seconds: float) -> Path:
    """Makes a claim look as if it had not been renewed for some time."""
    path = folder / "claims" / f"{job.key}.json"
    os.utime(path, times=(time.time() - seconds,) * 2)
    return path


def test_a_silent_worker_elsewhere_loses_its_job_and_its_late_result(tmp_path: Path) -> None:
    queue = Queue(tmp_path, patience=1000)
    lost = claimed(queue)
    pretend_elsewhere(tmp_path, lost.job)
    assert queue.states(JOBS)[lost.job] == "running"
    make_older(tmp_path, lost.job, 2000)
    again = claimed(queue)
    assert again.job == lost.job
    assert not queue.finish(lost, {"value": 666.0})
    queue.fail(lost, "too late as well")
    assert queue.finish(again, {"value": 1.0})
    assert queue.results(JOBS) == {lost.job: {"value": 1.0}}
    assert queue.failures(lost.job) == []


def test_a_worker_elsewhere_that_beats_keeps_its_job(tmp_path: Path) -> None:
    queue = Queue(tmp_path, heartbeat=0.05, patience=1000)
    claim = claimed(queue)
    pretend_elsewhere(tmp_path, claim.job)
    path = make_older(tmp_path, claim.job, 2000)
    with queue.beating(claim):
        end = time.monotonic() + 60
        while path.stat().st_mtime < time.time() - 1000:
            assert time.monotonic() < end, "no beat has come"
            time.sleep(0.01)
        assert queue.states(JOBS)[claim.job] == "running"
    assert "study-heartbeat" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("left", ["", "{", "[]"])
def test_a_claim_that_was_cut_off_is_no_claim(tmp_path: Path, left: str) -> None:
    queue = Queue(tmp_path)
    claim = claimed(queue)
    (tmp_path / "claims" / f"{claim.job.key}.json").write_text(left)
    assert claimed(queue).job == claim.job


@pytest.mark.parametrize("left", ["", '{"value": ', "{}", "[1]", '{"value": null}', '{"value": "1.0"}'])
def test_a_damaged_result_is_run_again(tmp_path: Path, left: str) -> None:
    """It would otherwise count as done, and its pair would be missing without a word."""
    queue = Queue(tmp_path)
    claim = claimed(queue)
    assert queue.finish(claim, {"value": 1.0})
    (tmp_path / "results" / f"{claim.job.key}.json").write_text(left)
    assert queue.states(JOBS)[claim.job] == "waiting"
    again = claimed(queue)
    assert again.job == claim.job
    assert queue.finish(again, {"value": 2.0})
    assert queue.results(JOBS) == {claim.job: {"value": 2.0}}


@pytest.mark.parametrize("left", ["{", "[]", '{"failures": 3}', '{"failures": [7, {}]}', "{}"])
def test_damaged_errors_are_none(tmp_path: Path, left: str) -> None:
    queue = Queue(tmp_path)
    for _ in range(2):
        queue.fail(claimed(queue), "out of memory")
    path = next((tmp_path / "failures").iterdir())
    path.write_text(left)
    assert queue.states(JOBS)[JOBS[0]] == "waiting"


@pytest.mark.parametrize("pid", ["x", None, 1.5])
def test_a_claim_of_no_process_is_no_claim(tmp_path: Path, pid: object) -> None:
    queue = Queue(tmp_path)
    path = tmp_path / "claims" / f"{claimed(queue).job.key}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": pid}))
    assert queue.states(JOBS)[JOBS[0]] == "waiting"


def test_a_folder_that_may_only_be_read_is_shown_and_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(tmp_path)
    assert queue.finish(claimed(queue), {"value": 1.0})
    claimed(queue)
    for name in (".lock", ".clock"):
        (tmp_path / name).unlink(missing_ok=True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(Path, "touch", refuse)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    states = Queue(tmp_path).states(JOBS)
    assert [states[job] for job in JOBS[:3]] == ["done", "running", "waiting"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def refuse(path: Path) -> None:
    raise PermissionError(13, "Permission denied", str(path))


def test_a_worker_that_lost_its_job_does_not_renew_the_claim_of_another(tmp_path: Path) -> None:
    """The other one may have died, too: then its claim must expire."""
    queue = Queue(tmp_path, heartbeat=0.01, patience=1000)
    lost = claimed(queue)
    make_older(tmp_path, lost.job, 2000)
    assert claimed(queue).job == lost.job
    pretend_elsewhere(tmp_path, lost.job)
    path = make_older(tmp_path, lost.job, 2000)
    with queue.beating(lost):
        time.sleep(0.5)
    assert path.stat().st_mtime < time.time() - 1000


def test_a_lock_that_is_never_given_back_ends_with_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended process keeps its locks."""
    monkeypatch.setattr("parbank.study.queue.LOCK_PATIENCE", 0.1)
    with FileLock(tmp_path / ".lock"), pytest.raises(FileError, match=r"has held .* it may have been suspended"):
        Queue(tmp_path).states(JOBS)
