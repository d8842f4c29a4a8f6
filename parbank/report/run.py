"""The page of one run."""

import math
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from parbank.display import plural
from parbank.report.bars import parted_bar
from parbank.report.chart import MEAN_PARTS, MOST_POINTS, Axis, Point, Series, line_chart, running_mean
from parbank.report.page import Section, grid, missing, page, table, tiles
from parbank.report.record import Record, Values, flatten
from parbank.report.result import bytes_section, sample_section, score_section, surprise_section
from parbank.report.text import (
    count,
    date,
    duration,
    escape,
    is_number,
    listed,
    number,
    share,
    short,
    short_spec,
    shown,
    size,
)

CLOCKS = ((6 * 3600, 3600, "hours"), (1200, 60, "minutes"), (0, 1, "seconds"))
"""(seconds of a run from which it is used, its own seconds, name) of each unit of the clock."""
TOKENS = Axis(label="training tokens", zero=True)
OWN, PAGE_PARTS = "page", ("details for the page", "page")
"""The page's part of the time, and the entries of `finish_parts` that it sums."""
LONGEST_WORD = 40  # letters of a setting that may stay on one line
NO_RECIPE = "The run follows no recipe of this parbank, so all its settings are its own."
RATES = {
    "matrix_lr": "matrices",
    "embedding_lr": "embeddings",
    "head_lr": "head",
    "scalar_lr": "scalars",
}  # settings of optim, and the parameters they are for


def run_page(record: Record, began: float | None = None) -> str:
    """The page of a run, from its budget to its settings. It names records that are missing. `began`: the moment
    (`time.perf_counter`) from which the page counts its own seconds."""
    return page(f"{record.name} · parbank", _head(record), _sections(record, began))


def _head(record: Record) -> str:
    summary, budget = record.summary or {}, record.config.get("budget", {})
    stamp = record.details.get("ended_at") or record.details.get("started_at")
    when = f", {date(stamp)}" if stamp else ""
    about = (
        f"<p>Recipe {shown(record.recipe)} on {shown(short_spec(record.config.get('data', 'unknown data')))}{when}.</p>"
    )
    about += _unended(record)
    last = record.rows[-1] if record.rows else {}
    parameters = record.fact("params")
    seconds = summary.get("train_seconds", last.get("seconds"))
    tokens = summary.get("tokens", last.get("tokens"))
    minutes = budget.get("minutes")
    items = [
        _score_tile(record),
        ("Artifact", size(summary.get("artifact_bytes")), _of_cap(summary)),
        (
            "Training clock",
            duration(seconds),
            f"of {duration(60 * minutes)}" if is_number(minutes) else _steps(record, last),
        ),
        ("Tokens", short(tokens) if is_number(tokens) else "–", _speed(summary, last)),
        ("Parameters", short(parameters) if is_number(parameters) else "–", ""),
        ("Device", shown(record.fact("device") or "–"), _ranks(record)),
    ]
    return f"<h1>{shown(record.name)}</h1>{about}{tiles(items)}"


def _unended(record: Record) -> str:
    """Says why there is no score, and what to do."""
    if record.summary:
        return ""
    if record.is_going:
        return "<p><b>The run trains now.</b> It gets its score and its packed model at the end.</p>"
    step = f" at step {count(record.rows[-1]['step'])}" if record.rows else " before its first step"
    command = f"parbank train --resume --out {shlex.quote(str(record.folder))}"
    return (
        f"<p><b>The run was stopped{step},</b> before its end: it has no score and no packed model. Continue it from its last "
        f"checkpoint:</p><p><code>{shown(command)}</code></p>{_diverged(record)}"
    )


def _diverged(record: Record) -> str:
    """A run that ends itself because of its numbers must not read like one that a person stopped."""
    last = record.rows[-1] if record.rows else {}
    if not last or is_number(last.get("loss")):
        return ""
    skipped = f"; {plural(last['skipped'], 'step')} were skipped" if is_number(last.get("skipped")) else ""
    return (
        f"<p>Its last row has no finite loss{skipped}. The same settings may fail again: lower the learning rates, or look at "
        "the data.</p>"
    )


def _against_best(summary: Values) -> str:
    others = summary.get("compressors_bpb", {})
    if not others or not is_number(summary.get("val_bpb")):
        return ""
    best = min(others, key=lambda name: others[name])
    return f"{escape(best)}: {number(others[best])}"


def _of_cap(summary: Values) -> str:
    if not is_number(summary.get("artifact_bytes")):
        return ""
    code = summary.get("code_bytes", 0)
    with_code = f", with {size(code)} of code" if code else ""
    return f"{share(summary['artifact_bytes'] + code, summary.get('max_bytes'))} of {size(summary.get('max_bytes'))}{with_code}"


def _score_tile(record: Record) -> tuple[str, str, str]:
    """The score; until there is one, the last validation."""
    validated = [row for row in record.rows if is_number(row.get("val_bpb"))]
    if record.summary or not validated:
        return (
            "Score, bits per byte",
            number((record.summary or {}).get("val_bpb")),
            _against_best(record.summary or {}),
        )
    last = validated[-1]
    return "Last validation, bits per byte", number(last["val_bpb"]), f"of a sample, at step {count(last['step'])}"


def _steps(record: Record, last: Values) -> str:
    """Steps, of how many while the run has not ended."""
    steps, planned = (record.summary or {}).get("steps", last.get("step")), record.config.get("budget", {}).get("steps")
    if not is_number(steps):
        return ""
    if record.summary or not is_number(planned):
        return plural(steps, "step")
    return f"{count(steps)} of {plural(planned, 'step')}"


def _speed(summary: Values, last: Values) -> str:
    """Of the whole run; of the last row while it trains."""
    speed = summary.get("tokens_per_second", last.get("tokens_per_second"))
    return f"{count(speed)} a second" if is_number(speed) else ""


def _ranks(record: Record) -> str:
    world, threads = record.fact("world_size"), record.fact("threads") or {}
    if is_number(world) and world > 1:
        return f"{world} ranks"
    return f"{count(threads.get('cores'))} cores" if is_number(threads.get("cores")) else ""


def _sections(record: Record, began: float | None) -> list[Section]:
    first, then = [curve_section(record), Section("Training", _training(record))], []
    if record.summary:
        first = [score_section(record), *first, bytes_section(record)]
        then += [surprise_section(record), sample_section(record)]
    then += [config_section(record), Section("Machine and versions", _machine(record))]
    own = 0.0 if began is None else time.perf_counter() - began
    return [*first, Section("Time", _time(record, own)), *then]  # made last, so that its own seconds count


def curve_section(record: Record) -> Section:
    note = "" if record.has("val_bpb") else _no_validation(record)
    body = grid(*validation_charts(record), *loss_charts(record))
    lacks = "no row of metrics.jsonl has a finite loss." if record.rows else "metrics.jsonl has no rows."
    return Section("Curves", body or missing(lacks), note)


def _no_validation(record: Record) -> str:
    every = record.config.get("train", {}).get("validate_every", "off")
    if every == "off":
        return "No validation during training: <code>train.validate_every</code> is off."
    when = "none yet" if record.is_going else "none took place: the run was too short"
    return f"Validation during training, every {shown(every)}: {when}."


def find_axes(*records: Record) -> Iterator[tuple[str, str, Axis]]:
    """(name, column of the rows, axis) of clock and tokens. Each axis ends where the longest run ends, so that charts above
    each other share it."""
    for name, key, end in (("clock", "seconds", "train_seconds"), ("tokens", "tokens", "tokens")):
        ends = [(r.summary or {}).get(end) for r in records] + [row.get(key) for r in records for row in r.rows[-1:]]
        reach = max(filter(is_number, ends), default=0.0)
        yield name, key, clock_axis(reach) if name == "clock" else replace(TOKENS, reach=reach)


def clock_axis(reach: float) -> Axis:
    """The axis of a clock that reaches so many seconds, in minutes or hours for a long run."""
    _, scale, unit = next(one for one in CLOCKS if reach >= one[0])
    return Axis(label=f"{unit} of training", zero=True, reach=reach, scale=scale)


def loss_charts(record: Record) -> list[str]:
    y, found = Axis(label="Loss, nats per token", cut=True), []
    gaps = sum(not is_number(row.get("loss")) for row in record.rows)
    note = f"{count(gaps)} of {count(len(record.rows))} rows have no finite loss." if gaps else ""
    for what, key, axis in find_axes(record):
        series = with_mean("training loss", record.column("loss", key), MEAN_PARTS)
        found.append(line_chart(f"Loss by {what}", series, axis, y, wide=True, unit="nats per token", note=note))
    return found


def with_mean(name: str, points: Sequence[Point], least: int) -> list[Series]:
    """The points behind their running mean; the points alone where they are fewer than `least`."""
    if len(points) < least:
        return [Series(name=name, points=points)]
    return [
        Series(name=name, points=points, style=5, faint=True),
        Series(name="running mean", points=running_mean(points)),
    ]


def validation_charts(record: Record) -> list[str]:
    """The sample's curve, with the score of the whole text at its end."""
    if not record.has("val_bpb"):
        return []
    summary, found = record.summary or {}, []
    note = "The line is the score of a sample of the validation text during training. " + (
        "The markers are the score of the whole text at the end. Another text has another score, so they may lie off the line."
        if record.summary
        else "At the end the whole text is scored, which may have another score."
    )
    for what, key, axis in find_axes(record):
        series = [
            Series(name=f"{_describe_sample(record)}, during training", points=record.column("val_bpb", key), style=1)
        ]
        at = summary.get({"seconds": "train_seconds"}.get(key, key))
        if is_number(at):
            ends = [("whole text, before packing", "val_bpb_before_packing", 0), ("whole text, packed", "val_bpb", 0)]
            series += [
                Series(name=n, points=[(at, summary[k])], style=s, line=False, hollow=k != "val_bpb")
                for n, k, s in ends
                if k in summary
            ]
        y = Axis(label="Bits per byte")
        chart = line_chart(
            f"Validation by {what}", series, axis, y, wide=True, unit="bits per byte of the averaged weights", note=note
        )
        found.append(chart)
    return found


def _describe_sample(record: Record) -> str:
    """The sample has whole windows, and no more than the text."""
    tokens = record.config.get("train", {}).get("validate_tokens")
    window = record.config.get("batch", {}).get("sequence_length")
    if not is_number(tokens) or not is_number(window) or window < 1:
        return "sample"
    whole = (record.summary or {}).get("val_tokens", math.inf)
    return f"sample of {count(min(max(1, tokens // window) * window, whole))} tokens"


def _training(record: Record) -> str:
    _, _, clock = next(find_axes(record))
    charts = [
        line_chart(
            "Learning rates", _rates(record), clock, Axis(label="Learning rate", zero=True), unit="by kind of parameter"
        )
    ]
    for title, name, scale, zero, label in (
        ("Gradient norm", "grad_norm", 1, True, "before clipping"),
        ("Speed", "tokens_per_second", 1, True, "tokens per second"),
        ("Waiting for data", "data_wait", 1e3, True, "milliseconds a step"),
        ("Memory", "memory", 1e-9, True, "peak so far, GB"),
        ("GPU clock", "gpu_clock_mhz", 1, False, "MHz"),
        ("GPU power", "gpu_power_w", 1, True, "watts"),
    ):
        points = [(x, scale * y) for x, y in record.column(name, "seconds")]
        series = with_mean(title, points, MOST_POINTS)  # of more, a noisy line would fill its chart
        charts.append(line_chart(title, series, clock, Axis(label=label, zero=zero), unit=label))
    if not any(charts):
        return ""
    gpu = "" if record.has("gpu_clock_mhz") else missing(_no_gpu(record))
    return grid(*charts) + gpu


def _no_gpu(record: Record) -> str:
    if record.fact("device") == "cpu":
        return "GPU clock and power: the run is on a CPU."
    return "GPU clock and power: nvidia-smi gave none, or the run is older than these columns."


def _rates(record: Record) -> list[Series]:
    """Learning rates of all groups. The rows hold the matrices' rate, and the others are multiples of it, by the settings. Rates
    that were carried over from another width are other multiples: then the matrices' rate is alone."""
    optim, rows = record.config.get("optim", {}), record.column("lr", "seconds")
    peak = optim.get("matrix_lr")
    if not is_number(peak) or not peak or optim.get("tuned_width"):
        return [Series(name=RATES["matrix_lr"], points=rows)]
    tied = record.config.get("model", {}).get("tied")
    groups: dict[float, list[str]] = {}  # groups of one rate are one line: the last drawn would hide the others
    for key, name in RATES.items():
        if is_number(optim.get(key)) and not (key == "head_lr" and tied):
            groups.setdefault(optim[key], []).append(name)
    return [
        Series(name=listed(names), points=[(x, y / peak * rate) for x, y in rows], style=n)
        for n, (rate, names) in enumerate(groups.items())
    ]


def time_parts(summary: Values) -> list[tuple[str, float]]:
    """Setup, training, packing, scoring, and the rest."""
    finish = summary.get("finish_parts", {})
    packing, scoring, page_parts = (
        sum(finish.get(name, 0) for name in names)
        for names in (("calibration", "packing"), ("scoring", "scoring the packed model"), PAGE_PARTS)
    )
    rest = summary.get("finish_seconds", 0) - packing - scoring - page_parts
    parts = [
        ("setup", summary.get("setup_seconds", 0)),
        ("training", summary.get("train_seconds", 0)),
        ("packing", packing),
        ("scoring", scoring),
        ("compressors and the rest", rest),
    ]
    parts += [(OWN, page_parts)] if page_parts else []  # older runs did not measure it
    return [(name, max(0.0, seconds)) for name, seconds in parts]


def _time(record: Record, own: float) -> str:
    """`own`: seconds of this page that the summary does not have yet."""
    summary = record.summary
    if not summary:
        return ""
    parts = [(name, seconds + own * (name == OWN)) for name, seconds in time_parts(summary)]
    bar = parted_bar("Seconds of the run", [(n, s, duration(s)) for n, s in parts])
    setup = ", ".join(f"{name} {duration(s)}" for name, s in summary.get("setup_parts", {}).items() if s >= 0.05)
    waited = share(summary.get("data_wait_seconds"), summary.get("train_seconds"), 2)
    notes = [f"Setup: {escape(setup)}." if setup else ""]
    notes += [f"Waiting for data took {waited} of the training clock."] if "data_wait_seconds" in summary else []
    if stalled := summary.get("stalled_seconds"):
        notes.append(f"Steps that stalled took {duration(stalled)} of the clock.")
    if skipped := summary.get("skipped_steps"):
        notes.append(f"{count(skipped)} steps were skipped: their loss or gradient was not finite.")
    return bar + f'<p class="note">{" ".join(filter(None, notes))}</p>'


def config_section(record: Record) -> Section:
    """Settings: first those that differ from the recipe, then all."""
    changes = record.changes
    rows = [
        (f"<code>{shown(k, breaks=True)}</code>", setting(was), setting(now))
        for k, (was, now) in (changes or {}).items()
    ]
    body = table(("setting", "recipe", "this run"), rows, label="Settings that differ from the recipe") if rows else ""
    said = "" if rows else NO_RECIPE if changes is None else "No setting differs from the recipe."
    everything = flatten(record.config)
    all_rows = [(f"<code>{shown(key, breaks=True)}</code>", setting(value)) for key, value in everything.items()]
    listed = table(("setting", "value"), all_rows, label="All settings")
    full = f"<details><summary>All {len(everything)} settings</summary>{listed}</details>"
    return Section("Settings", body + full, said)


def setting(value: Any) -> str:
    """The value of a setting, as HTML."""
    if value is None:
        return "none"
    text = str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)
    return shown(text) if len(text) <= LONGEST_WORD else f'<span class="long">{shown(text)}</span>'


def _machine(record: Record) -> str:
    details = record.details
    found: list[tuple[str, Any]] = [("device", record.fact("device")), *details.get("machine", {}).items()]
    found += [("ranks", record.fact("world_size")), ("seed", record.config.get("seed"))]
    found += [("commit", details.get("commit")), *(record.fact("versions") or {}).items()]
    rows = [(escape(name), shown(_amount(name, value))) for name, value in found if value is not None]
    if not rows:
        return missing("summary.json, which names machine and versions.")
    lacks = (
        ""
        if "machine" in details
        else missing("Processor, memory, commit and date: the run is older than details.json.")
    )
    return table(("item", "value"), rows, label="Machine and versions") + lacks


def _amount(name: str, value: Any) -> Any:
    return size(value) if name.endswith("memory") and is_number(value) else value
