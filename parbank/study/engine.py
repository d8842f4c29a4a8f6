"""Runs a study from the first run to the table: states what it can show, keeps workers busy, shows progress.

Everything lies in the study's folder, so a study that was stopped or killed goes on when it is run again.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from parbank.display import Display, format_seconds, plural
from parbank.errors import ConfigError, TrainingError
from parbank.files import write_file, write_json
from parbank.runtime import pick_device
from parbank.statistics import quantile
from parbank.study.crew import Crew, count_gpus
from parbank.study.kinds import KINDS
from parbank.study.noise import assume_noise, find_like
from parbank.study.progress import Progress
from parbank.study.queue import Queue
from parbank.study.report import Report, make_report, smallest_shown
from parbank.study.study import STUDY, TRAINED, Study, describe_budget, read_study, write_study
from parbank.study.worker import work
from parbank.training.signals import watch_signals

BEYOND = 6.0  # seconds that a run is expected to take beyond its clock, until one has been measured
_POLL = 0.5


def run_study(
    study: Study | None, folder: str | Path, *, workers: int | None = None, device: str = "auto", quiet: bool = False
) -> Report:
    """Runs what is left of a study and returns its report, which also lies in the folder as table.md and result.json.

    study: None continues the study in `folder`. workers: processes, one for each GPU if not given; 0 runs everything in this
    process, which a run that crashes then ends.
    """
    folder = Path(folder)
    workers = count_gpus(device) if workers is None else workers
    check_workers(read_study(folder) if study is None else study, workers, device)
    study = open_study(folder, study)
    display = Display(enabled=not quiet)
    for line in introduce(study, folder, max(1, workers)):
        display.say(line)
    try:
        with watch_signals(interrupt):
            _run_jobs(folder, workers, device, display)
    except KeyboardInterrupt:
        display.say(f"stopped; continue with the same command, or with: parbank study run {folder}")
        raise
    finally:
        report = write_report(folder)
    return report


def _run_jobs(folder: Path, workers: int, device: str, display: Display) -> None:
    progress = Progress(folder, display, max(1, workers))
    if workers == 0:
        work(folder, device=device, display=display, ended=progress.show)
        return
    shown = workers == 1 and display.enabled  # then the worker shows what has ended, and a bar
    with Crew(folder, workers, device, shown=shown) as crew:
        while crew.attend():
            time.sleep(_POLL)
            if not shown:
                progress.show()
    if not shown:
        progress.show()


@contextmanager
def keep_working(folder: Path, workers: int, device: str) -> Iterator[Callable[[], Report]]:
    """A function that runs the jobs which were added since its last call. The workers live as long as the block, so that
    later jobs find data and kernels ready."""

    def run_here() -> Report:
        work(folder, device=device)
        return write_report(folder)

    if workers == 0:
        yield run_here
        return
    with Crew(folder, workers, device, stay=True) as crew:

        def run() -> Report:
            while not make_report(folder).is_complete:
                if not crew.attend():
                    raise TrainingError(
                        f"the workers of {folder} have ended, and runs are left; see {folder / 'workers'}"
                    )
                time.sleep(_POLL)
            return write_report(folder)

        yield run


def open_study(folder: Path, study: Study | None) -> Study:
    """The study of a folder. A new one is checked and written; another one than the folder's is refused."""
    if study is None:
        return read_study(folder)
    if not (folder / STUDY).exists():
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty, and holds no study; choose a new or empty --out")
        KINDS[study.kind].check(study)
        study = state(study, folder)
        write_study(folder, study)
        return study
    there = read_study(folder)
    different = [
        name
        for name in ("kind", "base", "packed", "metric", "score_tokens", "keep", "checkpoints", "noise", "difference")
        if getattr(there, name) != getattr(study, name)
    ]
    different += ["arms"] if not set(study.arms) <= set(there.arms) else []
    different += ["seeds"] if not set(study.seeds) <= set(there.seeds) else []
    if different:
        raise ConfigError(
            f"{folder} holds the study {there.name!r} with other {' and '.join(different)}; add seeds or arms by "
            f"`parbank study add {folder}`, or choose another --out"
        )
    return there


def add_to_study(folder: Path, study: Study) -> None:
    """Writes a study with more seeds or arms over the earlier one."""
    KINDS[study.kind].check(study)
    write_study(folder, state(study, folder))


def forget_failures(folder: Path) -> int:
    """Lets runs that have failed twice be tried again. Returns how many."""
    return Queue(folder).forget_failures(read_study(folder).jobs())


def state(study: Study, folder: Path) -> Study:
    """The study with the smallest difference that its seeds can show, by the noise that is known now."""
    smallest = smallest_shown(study, assume_noise(study, folder))
    return replace(study, stated=smallest if math.isfinite(smallest) else None)


def introduce(study: Study, folder: Path, workers: int) -> list[str]:
    """Describes a study before its first run: the runs, the smallest difference that it can show, and the time."""
    jobs, queue = study.jobs(), Queue(folder)
    done = len(queue.results(jobs))
    noise, n = assume_noise(study, folder), len(study.seeds)
    unit = "%" if study.own_baselines else KINDS[study.kind].unit
    arms = plural(len(study.arms), "arm") + ("" if study.own_baselines else " and the base")
    budget = f", {describe_budget(study.base)} each" if study.kind in TRAINED else ""
    lines = [
        f"{study.name}: {arms}, {plural(n, 'seed')}{budget}: {plural(len(jobs), 'run')}, {done} of them done; in {folder}"
    ]
    if study.arms:
        smallest = smallest_shown(study, noise)
        shown = "nothing: two seeds are needed" if math.isinf(smallest) else f"{smallest:.2g} {unit}"
        why = f"80% power, Holm over {plural(len(study.arms), 'arm')}"
        lines.append(
            f"smallest difference it can show: {shown} ({why}), if paired differences have the standard deviation {noise.sd:.2g} "
            f"({noise.source})"
        )
    elif n > 1:
        half = quantile(0.05, n - 1) * noise.sd / math.sqrt(2 * n)
        lines.append(
            f"the mean will be known to +-{half:.2g} {unit}, if runs have the standard deviation {noise.sd / math.sqrt(2):.2g} "
            f"({noise.source})"
        )
    return [*lines, _describe_time(study, folder, workers)]


def _describe_time(study: Study, folder: Path, workers: int) -> str:
    queue, jobs = Queue(folder), study.jobs()
    states = queue.states(jobs)
    left = sum(state in ("waiting", "running") for state in states.values())
    walls = [run["wall_seconds"] for run in queue.results(jobs).values() if "wall_seconds" in run]
    rounds = math.ceil(left / workers)
    if walls:
        each = statistics.median(walls)
        return f"time: about {format_seconds(each * rounds)} for {left} runs ({each:.1f} s each so far)"
    for place, like in find_like(study, folder):
        if walls := [
            run["wall_seconds"] for run in Queue(place).results(like.jobs()).values() if "wall_seconds" in run
        ]:
            each = statistics.median(walls)
            return f"time: about {format_seconds(each * rounds)} for {left} runs ({each:.1f} s each in {place.name})"
    if study.kind in TRAINED and study.seconds is not None:
        each = study.seconds + BEYOND
        return (
            f"time: about {format_seconds(each * rounds)} for {left} runs ({study.seconds:g} s of training and some {BEYOND:g} s "
            "beyond it each), and the first start: data and kernels"
        )
    return f"time: known after the first of {left} runs"


def write_report(folder: Path) -> Report:
    report = make_report(folder)
    write_file(folder / "table.md", report.text().encode("utf-8"))
    write_json(folder / "result.json", report.to_dict())
    return report


def check_workers(study: Study, workers: int, device: str) -> None:
    if workers < 0:
        raise ConfigError(f"--workers must be 0 (this process) or more, got {workers}")
    gpus = count_gpus(device)
    if workers > gpus and study.is_timed:
        where = plural(gpus, "GPU") if pick_device(device).type == "cuda" else "a machine without a GPU"
        reason = "kernels are timed" if study.kind == "kernels" else "the budget is a time"
        remedy = "" if study.kind == "kernels" else ", or a budget in steps"
        raise ConfigError(
            f"{workers} workers on {where} would slow each other down, and {reason}; use --workers {gpus}{remedy}"
        )


def interrupt(number: int) -> None:
    """SIGTERM and a closed terminal stop a study as Ctrl-C does."""
    raise KeyboardInterrupt
