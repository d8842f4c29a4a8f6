"""Runs a study from the first run to the table: states what it can show, keeps workers busy, shows progress.

Everything lies in the study's folder, so a study that was stopped or killed goes on when it is run again.
"""

import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from parbank.cores import count_cores
from parbank.errors import ConfigError, TrainingError
from parbank.files import write_file, write_json
from parbank.runtime import pick_device
from parbank.statistics import quantile
from parbank.study.kinds import KINDS
from parbank.study.noise import assume_noise, find_like
from parbank.study.queue import Queue
from parbank.study.report import Report, count, make_report, smallest_shown
from parbank.study.study import STUDY, Job, Study, describe_budget, read_study, write_study
from parbank.study.worker import work
from parbank.training.display import Display, format_seconds

BEYOND = 6.0  # seconds that a run is expected to take beyond its clock, until one has been measured
TRAINED = ("training", "inside")  # kinds whose runs have a budget
_POLL = 0.5


def run_study(
    study: Study | None,
    folder: str | Path,
    *,
    workers: int | None = None,
    device: str = "auto",
    quiet: bool = False,
    kept: dict[Any, Any] | None = None,
) -> Report:
    """Runs what is left of a study and returns its report, which also lies in the folder as table.md and result.json.

    study: None continues the study in `folder`. workers: processes; one for each GPU if not given.
    kept: what several studies of one process share, such as opened data.
    """
    folder = Path(folder)
    study = open_study(folder, study)
    workers = count_gpus(device) if workers is None else workers
    _check_workers(study, workers, device)
    display = Display(enabled=not quiet)
    for line in introduce(study, folder, workers):
        display.say(line)
    progress = Progress(folder, display, workers)
    try:
        if workers == 1:
            work(folder, device=device, display=display, ended=progress.show, kept=kept)
        else:
            _run_workers(folder, workers, device, progress)
    except KeyboardInterrupt:
        display.say(f"stopped; continue with the same command, or with: parbank study run {folder}")
        raise
    finally:
        report = write_report(folder)
    return report


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
        for name in ("kind", "base", "packed", "score_tokens", "checkpoints")
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
    arms = count(len(study.arms), "arm") + ("" if study.own_baselines else " and the base")
    budget = f", {describe_budget(study.base)} each" if study.kind in TRAINED else ""
    lines = [
        f"{study.name}: {arms}, {count(n, 'seed')}{budget}: {count(len(jobs), 'run')}, {done} of them done; in {folder}"
    ]
    if study.arms:
        smallest = smallest_shown(study, noise)
        shown = "nothing: two seeds are needed" if math.isinf(smallest) else f"{smallest:.2g} {unit}"
        why = f"80% power, Holm over {count(len(study.arms), 'arm')}"
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


class Progress:
    """Shows newly ended runs, running and remaining jobs, and the verdicts so far."""

    def __init__(self, folder: Path, display: Display, workers: int) -> None:
        self._folder, self._display, self._workers = folder, display, workers
        report = make_report(folder)
        self._seen = set(report.results) | set(report.failures)

    def show(self) -> Report:
        report = make_report(self._folder)
        for job in report.study.jobs():
            if job in self._seen or not (job in report.results or job in report.failures):
                continue
            self._seen.add(job)
            self._display.say(
                f"{len(self._seen)} of {len(report.states)}  {_describe_run(report, job)}; {self._left(report)}"
            )
        return report

    def _left(self, report: Report) -> str:
        running = [job.key for job, state in report.states.items() if state == "running"]
        left = sum(state in ("waiting", "running") for state in report.states.values())
        walls = [run["wall_seconds"] for run in report.results.values() if "wall_seconds" in run]
        parts = [f"running {', '.join(running)}"] if running else []
        if left and walls:
            parts.append(f"{format_seconds(statistics.median(walls) * math.ceil(left / self._workers))} left")
        counts: dict[str, int] = {}
        for found in report.comparisons.values():
            word = found.verdict if found.verdict in ("better", "worse") else "open"
            counts[word] = counts.get(word, 0) + 1
        parts += ["so far " + ", ".join(f"{n} {word}" for word, n in sorted(counts.items()))] if counts else []
        return "; ".join(parts) or "all runs have ended"


def _describe_run(report: Report, job: Job) -> str:
    if job in report.failures:
        return f"{job.arm}, seed {job.seed}: failed twice: {report.failures[job]}"
    result, base = report.results[job], report.results.get(Job("base", job.seed))
    against = f", {result['value'] - base['value']:+.4f} against the base" if base and job.arm != "base" else ""
    if "against" in result:
        against = f", {100 * (result['value'] / result['against'] - 1):+.1f}% of its baseline"
    seconds = f" ({result['wall_seconds']:.1f} s)" if "wall_seconds" in result else ""
    return f"{job.arm}, seed {job.seed}: {result['value']:.4f}{against}{seconds}"


def write_report(folder: Path) -> Report:
    report = make_report(folder)
    write_file(folder / "table.md", report.text().encode("utf-8"))
    write_json(folder / "result.json", report.to_dict())
    return report


def count_gpus(device: str) -> int:
    """The GPUs that `device` leaves open; 1 on a CPU."""
    chosen = pick_device(device)
    return torch.cuda.device_count() if chosen.type == "cuda" and chosen.index is None else 1


def _check_workers(study: Study, workers: int, device: str) -> None:
    if workers < 1:
        raise ConfigError(f"--workers must be at least 1, got {workers}")
    gpus = count_gpus(device)
    if workers > gpus and study.seconds is not None:
        where = count(gpus, "GPU") if pick_device(device).type == "cuda" else "a machine without a GPU"
        raise ConfigError(
            f"{workers} workers on {where} would slow each other down, and the budget is a time; use --workers {gpus}, "
            "or a budget in steps"
        )


def _run_workers(folder: Path, workers: int, device: str, progress: Progress) -> None:
    """Keeps that many worker processes alive until no job is left. A worker's death counts as an error of its job."""
    queue, logs = Queue(folder), folder / "workers"
    logs.mkdir(exist_ok=True)
    running: dict[int, subprocess.Popen[bytes]] = {n: _start(folder, n, workers, device) for n in range(workers)}
    try:
        while running:
            time.sleep(_POLL)
            progress.show()
            for n, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[n]
                if process.returncode == 0:
                    continue
                log = logs / f"{n}.log"
                if queue.fail_worker(process.pid, f"worker {n} ended with code {process.returncode}; see {log}"):
                    running[n] = _start(folder, n, workers, device)
                elif not running:  # it died between jobs, or before the first, and nobody is left to go on
                    raise TrainingError(f"worker {n} ended with code {process.returncode}: {_last_line(log)}")
        progress.show()
    except BaseException:
        for process in running.values():
            process.terminate()
        raise
    finally:
        for process in running.values():
            process.wait()


def _start(folder: Path, number: int, workers: int, device: str) -> subprocess.Popen[bytes]:
    gpus = count_gpus(device)
    chosen = f"cuda:{number % gpus}" if gpus > 1 else device
    command = [sys.executable, "-m", "parbank", "study", "work", str(folder), "--device", chosen]
    env = dict(os.environ)
    if workers > gpus:  # they share a device: more threads than cores would wait for each other
        share, given = max(1, count_cores() // workers), env.get("OMP_NUM_THREADS", "")
        env["OMP_NUM_THREADS"] = str(min(share, int(given)) if given.isdecimal() and int(given) else share)
    with open(folder / "workers" / f"{number}.log", "ab") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it left no message"
