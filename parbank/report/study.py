"""The page of a study. It takes the study's result as plain data (`result.json`), so that it depends on no study's code."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parbank.display import plural
from parbank.report.chart import COLOURS, OTHER_TOKENS, Axis, Point, Series, line_chart, running_mean
from parbank.report.dots import Difference, difference_chart
from parbank.report.page import Section, grid, missing, page, table
from parbank.report.record import Values, read_rows
from parbank.report.run import clock_axis, setting
from parbank.report.text import count, duration, is_number, number, short_spec, shown, signed, size

BASE = "base"
GRID = 120  # points of a mean curve


@dataclass(frozen=True)
class StudyRecord:
    """A study's result, and the folder whose runs have curves."""

    result: Values
    folder: Path

    @property
    def study(self) -> Values:
        return dict(self.result["study"])

    @property
    def arms(self) -> list[Values]:
        return list(self.study["arms"])

    @property
    def percent(self) -> bool:
        """Whether differences are in percent: a kernel is measured beside the code it would replace."""
        return bool(self.study.get("own_baselines"))

    @property
    def unit(self) -> str:
        """The unit of a difference."""
        return "percent" if self.percent else "bits per byte"

    def runs(self, arm: str) -> dict[int, Values]:
        """The ended runs by seed."""
        found = {seed: self.result["runs"].get(f"{arm}.{seed}") for seed in self.study["seeds"]}
        return {seed: run for seed, run in found.items() if run is not None}

    def pairs(self, arm: str) -> list[float]:
        """Arm minus base for every seed that both have."""
        base, found = self.runs(BASE), []
        for seed, run in self.runs(arm).items():
            if "against" in run:
                found.append(100 * (run["value"] / run["against"] - 1))
            elif seed in base:
                found.append(run["value"] - base[seed]["value"])
        return found

    def form(self, value: Any, digits: int | None = None) -> str:
        return f"{signed(value, 2 if digits is None else digits)}%" if self.percent else signed(value, digits or 4)


def study_page(result: Values, folder: Path) -> str:
    record = StudyRecord(result, folder)
    study = record.study
    data, recipe = study["base"]["data"], study["base"]["recipe"]
    arms, seeds = plural(len(record.arms), "arm"), plural(len(study["seeds"]), "seed")
    head = (
        f"<h1>{shown(study['name'])}</h1><p>A study of {shown(study['kind'])}: recipe {shown(recipe)} on "
        f"{shown(short_spec(data))}{_budget(record)}, {arms} against the base, {seeds}.</p>"
    )
    return page(f"{study['name']} · parbank study", head, _sections(record))


def _budget(record: StudyRecord) -> str:
    """The budget of a run, and when it is scored. A study of stored runs or of kernels has none."""
    study, budget = record.study, record.study["base"].get("budget", {})
    if record.percent or study.get("checkpoints"):
        return ""
    scored = "scored packed" if study.get("packed") else "scored before packing"
    if is_number(budget.get("minutes")):
        return f", {duration(60 * budget['minutes'])} of training a run, {scored}"
    unit = "steps" if is_number(budget.get("steps")) else "tokens"
    return f", {count(budget.get(unit))} {unit} a run, {scored}"


def _sections(record: StudyRecord) -> Iterator[Section]:
    yield Section("Verdicts", _verdicts(record), _how(record))
    yield Section("Effects", _effects(record))
    yield Section(
        "Curves by clock",
        _curves(record),
        "Training loss, a running mean over time and seeds, against that of the base.",
    )
    yield Section("Cost", _cost(record))
    errors = "The errors of runs that failed are under What to know." if record.result["failures"] else ""
    yield Section("Every run", _runs(record), errors)
    yield Section("What to know", _notes(record))


def _how(record: StudyRecord) -> str:
    return (
        f"Differences are arm minus base, in {record.unit}; below zero is better. The interval decides, and nothing else "
        f"does. The standard deviation of a difference was taken to be "
        f"{record.form(record.result['noise']['sd'], 5).lstrip('+')}{'' if record.percent else ' bits per byte'} "
        f"({shown(record.result['noise']['source'])})."
    )


def _verdicts(record: StudyRecord) -> str:
    rows, has_claims = [], any(arm.get("claim") for arm in record.arms)
    for arm in record.arms:
        found = record.result["arms"].get(arm["name"], {})
        inside = f"{record.form(found['low'])} to {record.form(found['high'])}" if is_number(found.get("low")) else "–"
        rows.append(
            (
                shown(arm["name"]),
                f'<span class="verdict">{shown(found.get("words", "not run yet"))}</span>',
                record.form(found.get("mean")) if is_number(found.get("mean")) else "–",
                inside,
                count(found.get("pairs")),
                "<br>".join(f"<code>{shown(text)}</code>" for text in arm["settings"]) or "–",
                *([shown(arm["claim"]) if arm.get("claim") else "–"] if has_claims else []),
            )
        )
    if not rows:
        return missing("This study has no arms: it measures the base alone.")
    columns = ("arm", "verdict", "difference", "interval", "pairs", "settings", *(["claim"] if has_claims else []))
    return table(columns, rows, label="Verdicts", numeric=(2, 3, 4))


def _effects(record: StudyRecord) -> str:
    rows = []
    for n, arm in enumerate(record.arms):
        found = record.result["arms"].get(arm["name"], {})
        rows.append(
            Difference(
                name=arm["name"],
                mean=found.get("mean"),
                low=found.get("low"),
                high=found.get("high"),
                pairs=record.pairs(arm["name"]),
                words=str(found.get("words", "")),
                style=_style(n),
            )
        )
    note = "Marker and whiskers: mean and interval. Grey dots: the pairs, one a seed. Left of zero is better."
    chart = difference_chart(
        f"Arm minus base, {record.unit}",
        rows,
        lambda v: record.form(v, 1 if record.percent else 4),
        unit=record.unit,
        note=note,
    )
    return chart or missing("No pair of runs has ended yet.")


def _style(arm: int) -> int:
    """The style of an arm by its number. No arm has the base's colour."""
    return 1 + arm + arm // (COLOURS - 1)


def _curves(record: StudyRecord) -> str:
    base = _mean_curve(record, BASE)
    charts = []
    for n, arm in enumerate(record.arms):
        own = _mean_curve(record, arm["name"])
        if not own:
            continue
        series = [Series(name=BASE, points=base), Series(name=arm["name"], points=own, style=_style(n))]
        clock, y = clock_axis(max(one.points[-1][0] for one in series if one.points)), Axis(label="Loss", cut=True)
        note = OTHER_TOKENS if any(text.startswith("model.vocab_size=") for text in arm["settings"]) else ""
        charts.append(line_chart(arm["name"], series, clock, y, unit="nats per token", note=note))
    return grid(*charts) or missing("Curves: runs of this kind have none, or their folders are gone.")


def _mean_curve(record: StudyRecord, arm: str) -> list[Point]:
    """The loss at equal seconds, over the seeds. It ends where the first of them ends; empty where they have no time in
    common."""
    curves: list[np.ndarray] = []
    for seed in record.runs(arm):
        rows = read_rows(record.folder / "runs" / f"{arm}.{seed}" / "metrics.jsonl")
        points = [(row["seconds"], row["loss"]) for row in rows if is_number(row.get("loss")) and "seconds" in row]
        curves += [np.array(points)] if len(points) > 1 else []
    if not curves:
        return []
    first, last = max(c[0, 0] for c in curves), min(c[-1, 0] for c in curves)
    if first >= last:
        return []
    seconds = np.linspace(first, last, GRID)
    mean = np.mean([np.interp(seconds, c[:, 0], c[:, 1]) for c in curves], axis=0)
    return running_mean(list(zip(seconds.tolist(), mean.tolist())))


def _cost(record: StudyRecord) -> str:
    names = [*([] if record.percent else [BASE]), *(arm["name"] for arm in record.arms)]
    rows = []
    for name in names:
        runs = list(record.runs(name).values())
        rows.append(
            (
                shown(name),
                count(len(runs)),
                duration(_median(runs, "seconds")),
                duration(_median(runs, "wall_seconds")),
                count(_median(runs, "tokens_per_second")),
                count(_median(runs, "params")),
                size(_median(runs, "bytes")),
            )
        )
    columns = ("arm", "runs", "clock", "whole run", "tokens/s", "parameters", "artifact")
    return table(columns, rows, label="Cost, medians of runs", numeric=range(1, len(columns)))


def _median(runs: Sequence[Values], name: str) -> float | None:
    values = [run[name] for run in runs if is_number(run.get(name))]
    return statistics.median(values) if values else None


def _runs(record: StudyRecord) -> str:
    """All of them: done, failed, and still to come."""
    names = [*([] if record.percent else [BASE]), *(arm["name"] for arm in record.arms)]
    rows = []
    for name in names:
        for seed in record.study["seeds"]:
            run = record.result["runs"].get(f"{name}.{seed}")
            failed = f"{name}.{seed}" in record.result["failures"]
            state = "done" if run else "failed twice" if failed else "to come"
            rows.append(
                (
                    shown(name),
                    str(seed),
                    state,
                    number((run or {}).get("value"), 5),
                    count((run or {}).get("steps")),
                    duration((run or {}).get("seconds")),
                    shown((run or {}).get("device", "–")),
                )
            )
    value = "milliseconds" if record.percent else "bits per byte"
    columns = ("arm", "seed", "state", value, "steps", "clock", "device")
    return table(columns, rows, label="Every run", numeric=(1, 3, 4, 5))


def _notes(record: StudyRecord) -> str:
    notes = "".join(f"<li>{shown(note)}</li>" for note in record.result.get("notes", ()))
    budget = record.study["base"].get("budget", {})
    rows = [("<code>data</code>", setting(record.study["base"]["data"]))]
    rows += [
        (f"<code>budget.{shown(key)}</code>", setting(value)) for key, value in budget.items() if value is not None
    ]
    return (f"<ul>{notes}</ul>" if notes else "") + table(("setting", "value"), rows, label="Text and budget of a run")
