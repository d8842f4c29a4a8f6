"""Works on a study until no run is left: claims a job, runs it, stores the result.

`main` is the whole of a process that `parbank study run` starts (crew.py). It ends when the process that started it does.
"""

import _thread
import argparse
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parbank import runtime
from parbank.display import Display
from parbank.errors import DeviceError, ParbankError, TrainingError
from parbank.study.kinds import KINDS
from parbank.study.kinds.base import Kind
from parbank.study.machine import Neighbours, describe_machine
from parbank.study.progress import Progress
from parbank.study.queue import Claim, Queue
from parbank.study.study import Study, read_study
from parbank.threads import compute_with

DEVICE_LOST = 75  # exit code of a process whose GPU cannot be used any more; EX_TEMPFAIL of sysexits.h
GRACE = 5.0  # seconds in which a worker whose parent has ended may give its job back
_POLL = 0.5  # seconds between looks at a queue in which other workers have the last jobs


class DeviceLost(DeviceError):
    """An error has left the GPU unusable for this process. The job's error is noted; another process may go on."""


def work(
    folder: Path,
    *,
    device: str = "auto",
    display: Display | None = None,
    ended: Callable[[], object] = lambda: None,
    stay: bool = False,
) -> int:
    """Runs jobs in this process and calls `ended` after each. Returns how many this process ran.

    It waits until every job has a result or was given up, because the job of another worker comes back if that worker dies.
    `stay` waits for ever: jobs may be added. Ctrl-C gives the job back.
    """
    display, queue, count = display or Display(enabled=False), Queue(folder), 0
    study = read_study(folder)
    neighbours = Neighbours(runtime.pick_device(device))
    if others := neighbours.others():
        display.say(f"warning: other processes are on the GPU: {', '.join(others)}; end them, or times mean little")
    with compute_with(None), runtime.start(device) as place:
        neighbours.settle()
        kind = KINDS[study.kind](place, folder, display)
        while True:
            study = read_study(folder)  # seeds and arms may have been added
            jobs = study.jobs()
            claim = queue.claim(jobs)
            if claim is not None:
                with queue.beating(claim):
                    _run(queue, claim, kind, study, neighbours)
                count += 1
                ended()
            elif stay or not {"running", "waiting"}.isdisjoint(queue.states(jobs).values()):
                time.sleep(_POLL)
            else:
                return count


def _run(queue: Queue, claim: Claim, kind: Kind, study: Study, neighbours: Neighbours) -> None:
    job, began = claim.job, time.time()
    try:
        result = kind.measure(study, job)
        if not math.isfinite(result["value"]):
            raise TrainingError(f"the result is {result['value']}: the run has diverged")
    except Exception as error:  # whatever ends a run: it is tried again, and then reported
        queue.fail(claim, error)
        _check_device(kind.runtime, error)
        return
    except BaseException:  # Ctrl-C
        queue.release(claim)
        raise
    about = {"arm": job.arm, "seed": job.seed, "settings": list(study.arm(job.arm).settings)}
    times = {"started": began, "ended": time.time()}
    queue.finish(claim, about | result | times | _describe_place(kind.runtime, neighbours))


def _check_device(place: runtime.Runtime, error: Exception) -> None:
    """After some errors, such as an illegal memory access, every later call to CUDA fails in this process. Then the next jobs
    would fail for the fault of this one."""
    try:
        place.synchronize()
    except RuntimeError as lost:
        raise DeviceLost(f"the GPU cannot be used by this process after the error: {error}; start it again") from lost


def _describe_place(place: runtime.Runtime, neighbours: Neighbours) -> dict[str, Any]:
    """Workers that share a GPU see each other: then their values hold, and their times do not."""
    return describe_machine(place.device) | ({"neighbours": neighbours.others()} if place.is_cuda else {})


def main() -> None:
    """The process of a worker. Its standard input is a pipe that nobody writes to: it closes when the parent ends."""
    parser = argparse.ArgumentParser(prog="parbank.study.worker", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--progress", action="store_true", help="show the runs that have ended")
    parser.add_argument("--stay", action="store_true", help="wait for jobs that are added later")
    given = parser.parse_args()
    _end_with_parent()
    display = Display()
    try:
        ended = Progress(given.folder, display, 1).show if given.progress else lambda: None
        work(given.folder, device=given.device, display=display, ended=ended, stay=given.stay)
    except DeviceLost as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(DEVICE_LOST)
    except ParbankError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _end_with_parent() -> None:
    """Interrupts this process when its standard input closes, and ends it if that takes too long."""
    pipe = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # processes that this one starts must not wait for the pipe

    def wait() -> None:
        while os.read(pipe, 1):
            pass
        _thread.interrupt_main()
        time.sleep(GRACE)
        os._exit(130)

    threading.Thread(target=wait, daemon=True, name="study-parent").start()
