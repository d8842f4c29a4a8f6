"""The runs of a study as files in its folder. Any number of workers, on any number of machines, may share it.

    results/JOB.json     a run that has ended
    failures/JOB.json    the errors of a run: after the first it is tried again, after the second it is given up
    claims/JOB.json      a run in progress, and the process that runs it

A worker looks for a job and claims it under one file lock, so that two workers never take the same job. While it
works, a thread renews the time of the claim. A claim of a process that has ended on this machine, or that was not
renewed for PATIENCE seconds, goes back. If the worker was only asleep, it finds its claim gone and its result does not
count.
"""

import os
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from parbank.config import parse_json
from parbank.errors import FileError
from parbank.files import is_running, write_json
from parbank.study.study import Job

HEARTBEAT = 5.0
PATIENCE = 60.0  # seconds without a heartbeat after which a worker elsewhere counts as dead
LOCK_PATIENCE = 600.0  # a worker holds the lock for milliseconds, for seconds on a slow file system with many jobs
TRIES = 2
FAILED = "failures/evaluated"  # of studies on stored runs: errors that all seeds of an arm share

State = Literal["waiting", "running", "done", "failed"]


@dataclass(frozen=True)
class Claim:
    job: Job
    token: str


class Queue:
    """The jobs of one folder, as one worker sees them."""

    def __init__(self, folder: Path, *, heartbeat: float = HEARTBEAT, patience: float = PATIENCE) -> None:
        self.folder = folder
        self._heartbeat, self._patience = heartbeat, patience

    def make_folders(self) -> None:
        """Call it before writing. A reader leaves the folder as it is."""
        for name in ("results", "failures", "claims"):
            (self.folder / name).mkdir(exist_ok=True)

    def claim(self, jobs: Sequence[Job]) -> Claim | None:
        """The first job that waits, now this worker's. A job that failed once goes last."""
        self.make_folders()
        with self._locked():
            states = self._states(jobs)
            job = self.next_of(states)
            if job is None:
                return None
            token = secrets.token_hex(8)
            write_json(self._claim(job), {"token": token, "pid": os.getpid(), **_pid_scope(), "since": time.time()})
            return Claim(job, token)

    def next_of(self, states: Mapping[Job, State]) -> Job | None:
        """The job that is claimed next."""
        waiting = [job for job, state in states.items() if state == "waiting"]
        return min(waiting, key=lambda job: len(self.failures(job)), default=None)

    @contextmanager
    def beating(self, claim: Claim) -> Iterator[None]:
        """Renews the claim inside the block."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(self._heartbeat):
                if self._holds(claim):  # else the job has gone to another worker, whose claim is not ours to renew
                    with suppress(OSError):
                        os.utime(self._claim(claim.job))

        thread = threading.Thread(target=beat, daemon=True, name="study-heartbeat")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def finish(self, claim: Claim, result: dict[str, Any]) -> bool:
        """Stores the result, unless the job has gone to another worker meanwhile. Returns whether it was stored."""
        with self._locked():
            if not self._holds(claim):
                return False
            write_json(self._result(claim.job), result)
            self._claim(claim.job).unlink()
            return True

    def fail(self, claim: Claim, error: BaseException | str) -> None:
        """Notes an error and gives the job back; after TRIES errors it is given up."""
        with self._locked():
            if self._holds(claim):
                self._note(claim.job, error)

    def fail_worker(self, pid: int, error: str) -> bool:
        """Notes an error for the job that a worker of this machine held when it ended. Returns whether it held one."""
        with self._locked():
            for path in (self.folder / "claims").glob("*.json"):
                if (held := _read(path)) and held.get("pid") == pid and _is_here(held):
                    self._note(_job(path), error)
                    return True
        return False

    def release(self, claim: Claim) -> None:
        """Gives the job back as if nothing had happened."""
        with self._locked():
            if self._holds(claim):
                self._claim(claim.job).unlink()

    def forget_failures(self, jobs: Sequence[Job]) -> int:
        """Lets jobs that were given up be tried again. Returns how many."""
        with self._locked():
            failed = [job for job, state in self._states(jobs).items() if state == "failed"]
            for job in failed:
                self._failures(job).unlink()
            for path in (self.folder / FAILED).glob("*.json"):
                path.unlink()
            return len(failed)

    def states(self, jobs: Sequence[Job]) -> dict[Job, State]:
        """The state of every job, also in a folder that this user may only read."""
        if not os.access(self.folder, os.W_OK):
            return self._states(jobs)
        with self._locked():
            return self._states(jobs)

    def failures(self, job: Job) -> list[dict[str, Any]]:
        """The errors of a job, the last one last; none where their file is damaged."""
        found = (_read(self._failures(job)) or {}).get("failures")
        return [one for one in found if isinstance(one, dict) and "error" in one] if isinstance(found, list) else []

    def results(self, jobs: Sequence[Job]) -> dict[Job, dict[str, Any]]:
        found = {job: self._read_result(job) for job in jobs}
        return {job: result for job, result in found.items() if result is not None}

    def _read_result(self, job: Job) -> dict[str, Any] | None:
        """The result of a run. A damaged file is none: the job is run again."""
        found = _read(self._result(job))
        return found if found is not None and isinstance(found.get("value"), (int, float)) else None

    def _states(self, jobs: Sequence[Job]) -> dict[Job, State]:
        now = self._now()
        found: dict[Job, State] = {}
        for job in jobs:
            if self._read_result(job) is not None:
                found[job] = "done"
            elif len(self.failures(job)) >= TRIES:
                found[job] = "failed"
            elif self._is_running(job, now):
                found[job] = "running"
            else:
                found[job] = "waiting"
        return found

    def _is_running(self, job: Job, now: float) -> bool:
        """Whether a living worker holds the job. The claim of a dead worker stays until the job is claimed again."""
        path = self._claim(job)
        try:
            age = now - path.stat().st_mtime
        except OSError:
            return False
        held = _read(path)
        if held is None or age >= self._patience:
            return False
        return not _is_here(held) or (isinstance(held.get("pid"), int) and is_running(held["pid"]))

    def _note(self, job: Job, error: BaseException | str) -> None:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        trace = "" if isinstance(error, str) else "".join(traceback.format_exception(error))
        failure = {"error": text, "trace": trace, **_pid_scope(), "time": time.time()}
        write_json(self._failures(job), {"failures": [*self.failures(job), failure]})
        self._claim(job).unlink(missing_ok=True)

    def _now(self) -> float:
        """The time by the clock of the file system, which all machines that share it agree on. Without the right to write, the
        time by this machine's clock."""
        probe = self.folder / ".clock"
        with suppress(OSError):
            probe.touch()
            return probe.stat().st_mtime
        return time.time()

    def _holds(self, claim: Claim) -> bool:
        held = _read(self._claim(claim.job))
        return held is not None and held.get("token") == claim.token

    def _claim(self, job: Job) -> Path:
        return self.folder / "claims" / f"{job.key}.json"

    def _failures(self, job: Job) -> Path:
        return self.folder / "failures" / f"{job.key}.json"

    def _result(self, job: Job) -> Path:
        return self.folder / "results" / f"{job.key}.json"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path = self.folder / ".lock"
        try:
            held = FileLock(path).acquire(timeout=LOCK_PATIENCE, poll_interval=0.02)
        except Timeout:
            raise FileError(
                f"another process has held {path} for {LOCK_PATIENCE:.0f} s; it may have been suspended: resume or end it, then "
                "start this again"
            ) from None
        with held:
            yield


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _job(path: Path) -> Job:
    arm, _, seed = path.stem.rpartition(".")
    return Job(arm, int(seed))


def _pid_scope() -> dict[str, Any]:
    """The scope of process numbers: a machine, and a container on it."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return {"host": socket.gethostname(), "pid_space": space}


def _is_here(held: dict[str, Any]) -> bool:
    return all(held.get(name) == value for name, value in _pid_scope().items())
