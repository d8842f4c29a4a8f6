"""The report of a study: a table with a verdict on every arm, and notes on how far to trust it."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parbank.config import to_dict
from parbank.display import plural
from parbank.statistics import Comparison, compare, interval, rank_correlation, smallest_difference
from parbank.study.kinds import KINDS
from parbank.study.noise import Noise, Results, assume_noise, differences
from parbank.study.queue import Queue, State
from parbank.study.study import BASE, Arm, Job, Study, describe_budget, read_study

COLUMNS = (
    "arm",
    "runs",
    "mean",
    "sd",
    "difference",
    "95% interval",
    "verdict",
    "seconds",
    "tokens/s",
    "weights",
    "bytes",
)

INTERESTING = 0.01  # of the base's value: published changes are worth a tenth of it


@dataclass(frozen=True)
class Report:
    """A study with the runs that have ended."""

    study: Study
    results: Results
    states: dict[Job, State]
    failures: dict[Job, str]
    """The last error of every run that was given up."""
    noise: Noise
    comparisons: dict[str, Comparison]

    @property
    def is_complete(self) -> bool:
        return all(state in ("done", "failed") for state in self.states.values())

    @property
    def digits(self) -> int:
        """Decimals of a shown difference."""
        return 2 if self.study.own_baselines else 4

    @property
    def unit(self) -> str:
        """The unit of a difference."""
        return "%" if self.study.own_baselines else ""

    def text(self) -> str:
        """Markdown that reads well as plain text."""
        lines = [f"# {self.study.name}", "", self._describe(), "", *self._table(), ""]
        claims = [self._against_claim(arm) for arm in self.study.arms if arm.claim]
        lines += ["Claims, and what was found here:", "", *claims, ""] if claims else []
        lines += [f"- {note}" for note in self.notes()]
        return "\n".join(lines).rstrip() + "\n"

    def _describe(self) -> str:
        study = self.study
        unit = KINDS[study.kind].unit
        arms = f"{plural(len(study.arms), 'arm')} against the base" if study.arms else "the base alone"
        if study.own_baselines:
            repeated = plural(len(study.seeds), "repetition")
            return f"{plural(len(study.arms), 'arm')}, each against the code it would replace, {repeated}; {unit}."
        if study.checkpoints:
            stored = ", ".join(Path(path).name for path in study.checkpoints)
            how = f"{study.kind}, stored: {stored}"
        else:
            scored = "packed" if study.packed else "before packing"
            scored += "" if study.metric == "chunked" else f", {study.metric}"
            how = f"{study.base.recipe}, {describe_budget(study.base)} a run, {scored}"
        return f"{how}; {arms}, {plural(len(study.seeds), 'seed')}; {unit}; data `{study.base.data}`."

    def _table(self) -> list[str]:
        names = [*([] if self.study.own_baselines else [BASE]), *(arm.name for arm in self.study.arms)]
        rows = [COLUMNS, *map(self._row, names)]
        widths = [max(len(row[n]) for row in rows) for n in range(len(COLUMNS))]
        lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
        return [lines[0], "| " + " | ".join("-" * width for width in widths) + " |", *lines[1:]]

    def _against_claim(self, arm: Arm) -> str:
        found = self.comparisons[arm.name]
        here = "" if math.isnan(found.mean) else f"{found.mean:+.{self.digits}f}{self.unit}, "
        return f"- {arm.name}: {arm.claim.rstrip('.')}. Here: {here}{self.verdict(arm.name)}."

    def verdict(self, arm: str) -> str:
        """The verdict in words. More seeds would not help where every run failed."""
        for name, subject in ((arm, ""), (BASE, "the base ")):
            states = {state for job, state in self.states.items() if job.arm == name}
            if states == {"failed"}:
                return f"{subject}failed in every run"
        found = self.comparisons[arm]
        if not found.pairs:
            return "no pair of runs yet"
        if found.verdict == "too few seeds" and found.pairs > 1 and self.study.checkpoints:
            if len(self.study.checkpoints) == 1:
                return f"undecided: this text cannot show {found.target:.{self.digits}f}"
            return found.describe(self.digits, self.unit).replace("seeds", "checkpoints")
        return found.describe(self.digits, self.unit)

    def runs(self, name: str) -> list[dict[str, Any]]:
        """The ended runs of an arm or of the base."""
        return [result for job, result in self.results.items() if job.arm == name]

    def mean(self, name: str) -> float:
        """The mean of an arm's values. Of one checkpoint, whose runs are parts of a text, the score of the whole text."""
        return statistics.fmean(run.get("whole", run["value"]) for run in self.runs(name))

    def _row(self, name: str) -> tuple[str, ...]:
        runs = self.runs(name)
        values = [run["value"] for run in runs]
        d, unit = self.digits, self.unit
        mean = f"{self.mean(name):.4f}" if values else "-"
        sd = f"{statistics.stdev(values):.5f}" if len(values) > 1 else "-"
        cells = ("", self._mean_interval(values), "")
        if name != BASE:
            found = self.comparisons[name]
            inside = f"{found.low:+.{d}f}{unit} to {found.high:+.{d}f}{unit}" if math.isfinite(found.low) else "-"
            difference = "-" if math.isnan(found.mean) else f"{found.mean:+.{d}f}{unit}"
            cells = (difference, inside, self.verdict(name))
        return (name, str(len(values)), mean, sd, *cells, *_costs(runs))

    def _mean_interval(self, values: Sequence[float]) -> str:
        """The interval of the base's mean, for a study without arms."""
        if self.study.arms or len(values) < 2:
            return ""
        low, high = interval(values)
        return f"{low:.{self.digits}f} to {high:.{self.digits}f}"

    def notes(self) -> list[str]:
        """Everything a reader must know to trust the table."""
        study, runs = self.study, list(self.results.values())
        found = []
        if study.arms:
            difference = "arm minus base at the same seed, below zero is better"
            if study.own_baselines:
                difference = "a share of the time of the code that the arm would replace, below zero is faster"
            over = plural(len(study.arms), "arm")
            found.append(
                f"A difference is {difference}. Intervals are paired t, corrected by Holm over {over}; they alone decide."
            )
        if len(study.checkpoints) == 1:
            found.append(
                "One checkpoint: a run is one part of the text, and `mean` is the score of the whole text. The verdicts are "
                "about this checkpoint on text like this one."
            )
        found += [study.note] if study.note else []
        found += _list_failures(self.failures)
        left = sum(state in ("waiting", "running") for state in self.states.values())
        found += [f"Not complete: {left} of {len(self.states)} runs are still to come."] if left else []
        for added in study.added:
            if added.results:
                names = [_list_all("seed", added.seeds)] if added.seeds else []
                names += [_list_all("arm", added.arms)] if added.arms else []
                found.append(
                    f"Added after {added.results} runs had ended: {' and '.join(names)}. Looking first makes false verdicts "
                    "likelier than 5%; the intervals do not correct for it."
                )
        return found + _notes_on_runs(runs)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for result.json."""
        return {
            "study": to_dict(self.study),
            "noise": asdict(self.noise),
            "arms": {
                name: self._as_json(found) | {"words": self.verdict(name)} for name, found in self.comparisons.items()
            },
            "runs": {job.key: result for job, result in sorted(self.results.items())},
            "failures": {job.key: error for job, error in self.failures.items()},
            "notes": self.notes(),
        }

    def _as_json(self, found: Comparison) -> dict[str, Any]:
        """None for a number that is not finite yet: JSON has no other word for it."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(found).items()}


def make_report(folder: Path, study: Study | None = None) -> Report:
    study, queue = study or read_study(folder), Queue(folder)
    jobs = study.jobs()
    results, states = queue.results(jobs), queue.states(jobs)
    failures = {job: queue.failures(job)[-1]["error"] for job, state in states.items() if state == "failed"}
    noise = assume_noise(study, folder)
    target = target_of(study, noise, results)
    comparisons = compare(differences(study, results), target=target, assumed_sd=noise.sd)
    return Report(study, results, states, failures, noise, comparisons)


def target_of(study: Study, noise: Noise, results: Results) -> float:
    """The smallest difference of interest: the given one; else the one stated before the seeds ran, but at most a share of
    INTERESTING of the base's value. A study that can only show larger differences must not say "no difference"."""
    if study.difference is not None:
        return study.difference
    base = [result["value"] for job, result in results.items() if job.arm == BASE]
    most = 100 * INTERESTING if study.own_baselines else INTERESTING * statistics.fmean(base) if base else math.inf
    return min(study.stated or smallest_shown(study, noise), most)


def smallest_shown(study: Study, noise: Noise) -> float:
    return smallest_difference(sd=noise.sd, pairs=len(study.seeds), comparisons=max(1, len(study.arms)))


def _costs(runs: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    def median(name: str, form: str) -> str:
        values = [run[name] for run in runs if run.get(name) is not None]
        return form.format(statistics.median(values)) if values else "-"

    counts = {name: median(name, "{:,.0f}") for name in ("tokens_per_second", "params", "bytes")}
    return median("seconds", "{:.1f}"), *counts.values()


def _list_failures(failures: Mapping[Job, str]) -> list[str]:
    """One note for the runs of an arm that failed alike. Errors that differ in the run's folder alone are alike; the first
    stands for all."""
    alike: dict[tuple[str, str], list[Job]] = {}
    for job, error in failures.items():
        alike.setdefault((job.arm, error.replace(job.key, "")), []).append(job)
    return [
        f"Failed twice and left out: {arm}, {_list_all('seed', [job.seed for job in jobs])}: {failures[jobs[0]]}"
        for (arm, _), jobs in alike.items()
    ]


def _list_all(noun: str, items: Sequence[object]) -> str:
    """seed 3; seeds 3, 4."""
    return f"{noun}{'s' * (len(items) > 1)} {', '.join(map(str, items))}"


def _notes_on_runs(runs: Sequence[dict[str, Any]]) -> list[str]:
    found = []
    unpacked = [run["unpacked"] for run in runs if "unpacked" in run]
    found += [f"Before packing: {statistics.fmean(unpacked):.4f} on the whole text."] if unpacked else []
    beyond = [run["wall_seconds"] - run["seconds"] for run in runs if "parts" in run]
    if beyond:
        parts: dict[str, list[float]] = {}
        for run in runs:
            for part, seconds in run.get("parts", {}).items():
                parts.setdefault(part, []).append(seconds)
        median = {part: statistics.median(seconds) for part, seconds in parts.items() if part != "training"}
        listed = ", ".join(f"{part} {seconds:.1f}" for part, seconds in median.items() if seconds >= 0.05)
        found.append(
            f"Beyond its training clock a run took {statistics.median(beyond):.1f} s (median; longest {max(beyond):.1f}): {listed}."
        )
    clocks = [run["gpu"]["clock_mhz"] for run in runs if run.get("gpu")]
    if clocks:
        power = [run["gpu"]["power_w"] for run in runs if run.get("gpu")]
        found.append(
            f"GPU clock {min(clocks):.0f} to {max(clocks):.0f} MHz, power {min(power):.0f} to {max(power):.0f} W (medians of runs)."
        )
    shared = sum(bool(run.get("neighbours")) for run in runs)
    if shared:
        found.append(f"Other processes were on the GPU during {shared} runs; their times are not to be trusted.")
    shares = []
    for arm in dict.fromkeys(run["arm"] for run in runs if run.get("skipped_steps")):
        own = [run for run in runs if run["arm"] == arm]
        shares.append(f"{arm} {sum(run['skipped_steps'] for run in own)} of {sum(run['steps'] for run in own)}")
    found += [f"Steps skipped because a gradient was not finite: {', '.join(shares)}."] if shares else []
    found += [f"{arm}: {idle}." for arm, idle in {run["arm"]: run["idle"] for run in runs if "idle" in run}.items()]
    compiled = sum(run.get("recompilations", 0) for run in runs)
    found += [f"Kernels compiled while a clock ran: {compiled}."] if compiled else []
    stalled = sum(run.get("stalled_seconds", 0) for run in runs)
    found += [f"Steps that stalled took {stalled:.1f} s of the clock."] if stalled else []
    devices = sorted({run["device"] for run in runs if "device" in run})
    found += [f"Run on {', '.join(devices)}."] if devices else []
    return found


def correlate(first: Report, second: Report) -> str:
    """The rank correlation of two studies, by the mean differences of the arms that both have."""
    both = [
        arm
        for arm, found in first.comparisons.items()
        if arm in second.comparisons and found.pairs and second.comparisons[arm].pairs
    ]
    if len(both) < 3:
        return f"{len(both)} arms are in both studies; a rank correlation needs 3"
    values = [[report.comparisons[arm].mean for arm in both] for report in (first, second)]
    found = rank_correlation(*values)
    warning = "" if found >= 0.5 else "; one of them does not rank the other"
    return f"rank correlation of {len(both)} arms (Spearman): {found:+.2f}{warning}"
