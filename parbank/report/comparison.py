"""The page of several runs beside each other. The first run is the baseline."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parbank.eval.paired import FEWEST, PairedDifference, compare_documents
from parbank.report.chart import MEAN_PARTS, MOST_POINTS, OTHER_TOKENS, Axis, Series, line_chart, smooth
from parbank.report.dots import Difference, difference_chart
from parbank.report.page import Section, grid, missing, page, table
from parbank.report.record import Record, flatten
from parbank.report.run import find_axes, setting, time_parts
from parbank.report.text import count, duration, is_number, listed, number, short, shown, signed, size

LIKE = {"val_text_sha256": "another validation text", "text": "a text that is proved differently"}
OWN = ("seed", "recipe")  # shown with the runs, not as settings that differ


@dataclass(frozen=True)
class Compared:
    """A run against the first."""

    record: Record
    difference: PairedDifference | None
    why_not: str = ""


def comparison_page(records: Sequence[Record]) -> str:
    named = _distinct(records)
    title = f"{len(named)} runs compared"
    first = shown(named[0].name)
    head = f"<h1>{title}</h1><p>Differences are from the first, {first}, in bits per byte. Below zero is better.</p>"
    return page(f"{title} · parbank", head, _sections(named, [_compare(record, named[0]) for record in named[1:]]))


def _distinct(records: Sequence[Record]) -> list[Record]:
    """Folders of one name get the name of their parent, too, and if need be a number."""
    twice = {name for name, n in Counter(record.name for record in records).items() if n > 1}
    named = [replace(r, name=f"{r.folder.resolve().parent.name}/{r.name}") if r.name in twice else r for r in records]
    still = {name for name, n in Counter(record.name for record in named).items() if n > 1}
    return [replace(r, name=f"{r.name} ({n})") if r.name in still else r for n, r in enumerate(named, 1)]


def _sections(records: Sequence[Record], others: Sequence[Compared]) -> Iterator[Section]:
    yield Section("Runs", _runs(records, others))
    yield Section("Differences by document", _by_document(records[0], others), _explain())
    yield Section("Curves", _curves(records))
    yield Section("Settings that differ", _settings(records))
    yield Section("Cost", _cost(records))


def _explain() -> str:
    return (
        "Both models score each document of the validation text. The whiskers are the 95% interval of the difference over "
        "documents like these. They do not cover the chance of a training run: for that, run several seeds "
        "(<code>parbank study</code>)."
    )


def _compare(record: Record, first: Record) -> Compared:
    ours, theirs = record.summary or {}, first.summary or {}
    for one in (first, record):
        if not one.summary:
            return Compared(record, None, f"{one.name} has no score")
    for key, difference in LIKE.items():
        if ours.get(key) == theirs.get(key):
            continue
        if key in ours and key in theirs:
            return Compared(record, None, f"{difference} than {first.name}")
        older = first if key in ours else record
        return Compared(record, None, f"{older.name} is older than the record of the text that a run is scored on")
    windows = [r.config.get("batch", {}).get("sequence_length") for r in (record, first)]
    if windows[0] != windows[1]:
        return Compared(record, None, f"windows of {windows[0]} tokens, {first.name} has {windows[1]}")
    pair = [_documents(r) for r in (record, first)]
    if pair[0] is None or pair[1] is None:
        return Compared(record, None, "no bits by document: a run is older than details.json")
    (sizes, mine), (their_sizes, others) = pair[0], pair[1]
    if sizes != their_sizes:
        return Compared(record, None, f"other documents than {first.name}")
    return Compared(record, compare_documents(sizes, mine, others))


def _documents(record: Record) -> tuple[list[int], list[float]] | None:
    found = record.details.get("documents", {})
    sizes, bits = found.get("bytes"), found.get("bits")
    if not isinstance(sizes, list) or not isinstance(bits, list) or len(sizes) != len(bits) or not sizes:
        return None
    return (sizes, bits) if all(map(is_number, (*sizes, *bits))) and sum(sizes) > 0 else None


def _runs(records: Sequence[Record], others: Sequence[Compared]) -> str:
    found = {one.record.name: one for one in others}
    rows = []
    for record in records:
        summary, other = record.summary or {}, found.get(record.name)
        apart = _score_difference(record, records[0]) if other is not None else None
        rows.append(
            (
                shown(record.name, breaks=True),
                number(summary.get("val_bpb")),
                signed(apart),
                _interval(other),
                size(summary.get("artifact_bytes")),
                shown(record.recipe),
                count(record.config.get("seed")),
                short(summary["params"]) if "params" in summary else "–",
                count(summary.get("steps")),
                shown(summary.get("device", "–")),
            )
        )
    columns = (
        "run",
        "bits per byte",
        "difference",
        "95% interval",
        "artifact",
        "recipe",
        "seed",
        "parameters",
        "steps",
        "device",
    )
    unended = [record.name for record in records if not record.summary]
    said = missing(f"{listed(unended)}: no score.", "Not ended yet. ") if unended else ""
    return table(columns, rows, label="Runs", numeric=(1, 2, 3, 4, 6, 7, 8)) + said


def _score_difference(record: Record, first: Record) -> float | None:
    ours, theirs = (r.summary or {} for r in (record, first))
    same = all(ours.get(key) == theirs.get(key) for key in LIKE)
    return ours["val_bpb"] - theirs["val_bpb"] if same and "val_bpb" in ours and "val_bpb" in theirs else None


def _interval(other: Compared | None) -> str:
    found = other.difference if other else None
    return f"{signed(found.low)} to {signed(found.high)}" if found and found.low is not None else "–"


def _by_document(first: Record, others: Sequence[Compared]) -> str:
    rows: list[Difference] = []
    missed: list[tuple[str, str]] = []  # (the name of what a run lacks, the run and the reason)
    for style, other in enumerate(others, 1):
        found = other.difference
        if found is None:
            missed.append(("Not compared. ", f"{other.record.name} against {first.name}: {other.why_not}."))
            continue
        words = f"better on {count(found.better)} of {count(found.documents)} documents"
        rows.append(Difference(
            name=other.record.name, mean=found.bpb, low=found.low, high=found.high, words=words, style=style
        ))  # fmt: skip
        if found.low is None:
            needed = f"{other.record.name}: {FEWEST} documents are needed, the text has {found.documents}."
            missed.append(("No interval. ", needed))
    chart = difference_chart(f"Bits per byte, minus those of {first.name}", rows, signed, unit="bits per byte")
    return chart + "".join(missing(text, title) for title, text in missed)


def _curves(records: Sequence[Record]) -> str:
    charts, notes = [], {}
    if _differ(records, "model", "vocab_size"):
        notes["loss"] = OTHER_TOKENS
    if _differ(records, "train", "validate_tokens") or _differ(records, "batch", "sequence_length"):
        notes["val_bpb"] = (
            "Samples or windows differ, so the levels of these lines cannot be compared, only their course."
        )
    for title, name, label in (
        ("Validation", "val_bpb", "bits per byte of the sample"),
        ("Loss", "loss", f"nats per token{_say_mean(records)}"),
        ("Speed", "tokens_per_second", "tokens per second"),
    ):
        for what, key, axis in find_axes(*records):
            if name == "tokens_per_second" and key == "tokens":
                continue
            lines = [r.column(name, key) for r in records]
            lines = [smooth(line) if name == "loss" or len(line) > MOST_POINTS else line for line in lines]
            series = [Series(name=r.name, points=line, style=n) for n, (r, line) in enumerate(zip(records, lines))]
            y = Axis(label=label, zero=name == "tokens_per_second", cut=name == "loss")
            charts.append(
                line_chart(f"{title} by {what}", series, axis, y, wide=True, unit=label, note=notes.get(name, ""))
            )
    return grid(*charts) or missing("No run has rows of metrics.")


def _differ(records: Sequence[Record], part: str, name: str) -> bool:
    """Whether a setting is not the same in all runs."""
    return len({str(record.config.get(part, {}).get(name)) for record in records}) > 1


def _say_mean(records: Sequence[Record]) -> str:
    """A run of few rows has no running mean."""
    rows = [len(record.column("loss", "seconds")) for record in records]
    if max(rows) < MEAN_PARTS:
        return ""
    return ", running mean" if min(rows) >= MEAN_PARTS else f", running mean of runs with {MEAN_PARTS} rows and more"


def _settings(records: Sequence[Record]) -> str:
    """The settings that are not the same in all runs."""
    flat = [flatten(record.config) for record in records]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key not in OWN]
    different = [key for key in keys if any(one.get(key) != flat[0].get(key) for one in flat[1:])]
    if not different:
        return '<p class="note">All settings are equal, the seed aside.</p>'
    rows = [(f"<code>{shown(key, breaks=True)}</code>", *(_value(one, key) for one in flat)) for key in different]
    return table(("setting", *(record.name for record in records)), rows, label="Settings that differ")


def _value(settings: dict[str, Any], key: str) -> str:
    return setting(settings[key]) if key in settings else "–"


def _cost(records: Sequence[Record]) -> str:
    names = list(dict.fromkeys(name for record in records for name, _ in time_parts(record.summary or {})))
    rows = []
    for record in records:
        summary = record.summary or {}
        parts = dict(time_parts(summary)) if summary else {}
        rows.append(
            (
                shown(record.name, breaks=True),
                *(duration(parts.get(name)) for name in names),
                duration(sum(parts.values())) if parts else "–",
                count(summary.get("tokens_per_second")),
                size(summary.get("memory_bytes")),
            )
        )
    columns = ("run", *names, "in all", "tokens/s", "memory")
    return table(columns, rows, label="Cost", numeric=range(1, len(columns)))
