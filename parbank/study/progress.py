"""The runs of a study as they end: each result, the next run, the time left, and the verdicts so far."""

import math
import statistics
from pathlib import Path

from parbank.display import Display, format_seconds
from parbank.study.queue import Queue
from parbank.study.report import Report, make_report
from parbank.study.study import BASE, Job


class Progress:
    """Shows newly ended runs, running and remaining jobs, and the verdicts so far."""

    def __init__(self, folder: Path, display: Display, workers: int) -> None:
        self._folder, self._display, self._workers = folder, display, workers
        report = make_report(folder)
        self._seen = set(report.results) | set(report.failures)
        self._queue = Queue(folder)
        self._failed_once = {job for job in report.study.jobs() if self._queue.failures(job)}

    def show(self) -> Report:
        report = make_report(self._folder)
        for job in report.study.jobs():
            if job not in self._failed_once and (failures := self._queue.failures(job)):
                self._failed_once.add(job)
                if job not in report.failures:
                    self._display.say(
                        f"{job.arm}, seed {job.seed}: failed, to be tried again at the end: {failures[0]['error']}"
                    )
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
        if not running and (job := self._queue.next_of(report.states)):
            parts.append(f"next {job.key}")
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
    result, base = report.results[job], report.results.get(Job(BASE, job.seed))
    against = f", {result['value'] - base['value']:+.4f} against the base" if base and job.arm != BASE else ""
    if "against" in result:
        against = f", {100 * (result['value'] / result['against'] - 1):+.1f}% of its baseline"
    seconds = f" ({result['wall_seconds']:.1f} s)" if "wall_seconds" in result else ""
    return f"{job.arm}, seed {job.seed}: {result['value']:.4f}{against}{seconds}"
