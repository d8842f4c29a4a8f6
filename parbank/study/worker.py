"""Works on a study until no run is left: claims a job, runs it, stores the result."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parbank import runtime
from parbank.study.kinds import KINDS
from parbank.study.kinds.base import Kind
from parbank.study.machine import Neighbours, describe_machine
from parbank.study.queue import Claim, Queue
from parbank.study.study import Study, read_study
from parbank.threads import compute_with
from parbank.training.display import Display

_POLL = 0.5  # seconds between looks at a queue in which other workers have the last jobs


def work(
    folder: Path,
    *,
    device: str = "auto",
    display: Display | None = None,
    ended: Callable[[], object] = lambda: None,
    kept: dict[Any, Any] | None = None,
) -> int:
    """Runs jobs in this process and calls `ended` after each. Returns how many this process ran.

    `kept` holds what several studies of one process share, such as opened data. It waits while others have the last
    jobs, because a job of a worker that dies comes back. Ctrl-C gives the job back.
    """
    display, queue, count = display or Display(enabled=False), Queue(folder), 0
    study = read_study(folder)
    neighbours = Neighbours(runtime.pick_device(device))
    if others := neighbours.others():
        display.say(f"warning: other processes are on the GPU: {', '.join(others)}; end them, or times mean little")
    with compute_with(None), runtime.start(device) as place:
        kind = KINDS[study.kind](place, folder, display, kept)
        while True:
            study = read_study(folder)  # seeds and arms may have been added
            jobs = study.jobs()
            claim = queue.claim(jobs)
            if claim is not None:
                with queue.beating(claim):
                    _run(queue, claim, kind, study, neighbours)
                count += 1
                ended()
            elif "running" in queue.states(jobs).values():
                time.sleep(_POLL)
            else:
                return count


def _run(queue: Queue, claim: Claim, kind: Kind, study: Study, neighbours: Neighbours) -> None:
    job, began = claim.job, time.time()
    try:
        result = kind.measure(study, job)
    except Exception as error:  # whatever ends a run: it is tried again, and then reported
        queue.fail(claim, error)
        return
    except BaseException:  # Ctrl-C
        queue.release(claim)
        raise
    about = {"arm": job.arm, "seed": job.seed, "settings": list(study.arm(job.arm).settings)}
    times = {"started": began, "ended": time.time()}
    queue.finish(claim, about | result | times | _describe_place(kind.runtime, neighbours, study))


def _describe_place(place: runtime.Runtime, neighbours: Neighbours, study: Study) -> dict[str, Any]:
    about = describe_machine(place.device)
    if place.is_cuda:
        neighbours.settle_once()
        # workers that share a GPU see each other; they may only where the budget is no time
        about["neighbours"] = neighbours.others() if study.seconds is not None else []
    return about
