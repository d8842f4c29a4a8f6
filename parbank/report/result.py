"""The sections of a run's page about its result: score, bytes, surprise and samples."""

import itertools
import math
from typing import Any

from parbank.display import END, plural
from parbank.report.bars import Bar, bar_chart
from parbank.report.chart import Axis, Series, line_chart
from parbank.report.page import Section, grid, missing, table
from parbank.report.record import Record, Values
from parbank.report.text import count, escape, is_number, number, share, shown, signed, size

COLUMNS = {
    "bits a weight": "Everything that the file has of the tensor, its scales included.",
    "coded": "The integers alone, as they are in the file.",
    "entropy": "A bound for a coder that knows how often each integer occurs, and nothing else. The coder learns that from "
    "the integers it has coded, so small tensors take more; where rows differ from each other, it takes less.",
    "error": "The root mean square of the rounding error, as a share of that of the weights.",
    "cost": "What the error is expected to add to the score, in thousandths of a bit per byte.",
}
"""The columns of the table of tensors that need a word of explanation."""
SURPRISE = (1, 2, 4, 7, 11)
"""Bits of a token at which its shade grows darker. 1 bit is a chance of one half, 11 bits one of 2,000."""


def score_section(record: Record) -> Section:
    summary = record.summary or {}
    own = {"this model, packed": "val_bpb", "this model, before packing": "val_bpb_before_packing"}
    bars = [Bar(name, summary[key], number(summary[key]), 0) for name, key in own.items() if key in summary]
    others = summary.get("compressors_bpb", {})
    bars += [Bar(name, value, number(value)) for name, value in sorted(others.items(), key=lambda item: item[1])]
    chart = bar_chart(
        "Bits per byte, beside compressors", bars, note="Lower is better. Compressors have no training text."
    )
    note = (
        f"{_amount(summary.get('val_bytes'), 'byte')} and {_amount(summary.get('val_tokens'), 'token')} of validation text, "
        f"in windows of {count(record.config.get('batch', {}).get('sequence_length'))} tokens."
    )
    if is_number(summary.get("val_overlap")):
        note += f" {share(summary['val_overlap'], 1)} of it also occurs in the training text."
    return Section("Score", grid(chart, *_by_position(record)) + _no_position(record), note)


def _amount(value: Any, word: str) -> str:
    return plural(value, word) if is_number(value) else f"– {word}s"


def _by_position(record: Record) -> list[str]:
    x = Axis(label="tokens before it", log=True, form=lambda value: f"{value:,.0f}")
    series = []
    for style, (name, key) in enumerate((("in the model's window", "by_context"), ("in its document", "by_place"))):
        parts = [part for part in _parts(record.details.get(key)) if part["bytes"]]
        points = [((part["first"] + part["last"]) / 2, part["bits"] / part["bytes"]) for part in parts]
        series.append(Series(name=name, points=points, style=style))
    y = Axis(label="Bits per byte")
    return [line_chart("Score by position of the token", series, x, y, unit="bits per byte")]


def _no_position(record: Record) -> str:
    return "" if record.details.get("by_context") else missing("Score by position: the run is older than details.json.")


def _parts(found: Any) -> list[Values]:
    keys = ("first", "last", "bytes", "bits")
    return [part for part in found or () if all(is_number(part.get(key)) and part[key] >= 0 for key in keys)]


def bytes_section(record: Record) -> Section:
    summary, details = record.summary or {}, record.details
    title = "Where the bytes went"
    tensors = [t for t in details.get("tensors", ()) if is_number(t.get("packed_bytes"))]
    if not tensors:
        return Section(
            title, missing("Bytes by tensor: the run is older than details.json; parbank inspect lists them.")
        )
    per_byte = _bits_per_byte(summary)
    most = max(tensor["packed_bytes"] for tensor in tensors) or 1
    rows = [_tensor_row(tensor, most, per_byte) for tensor in sorted(tensors, key=lambda t: -t["packed_bytes"])]
    sections = details.get("sections", {})
    weights = sum(tensor["packed_bytes"] for tensor in tensors)
    rest = (summary.get("artifact_bytes") or 0) - weights
    tokenizer = sections.get("tokenizer")
    parts = [f"weights {size(weights)}", f"tokenizer {size(tokenizer)}" if is_number(tokenizer) else ""]
    parts += [f"tables and header {size(rest - (tokenizer or 0))}" if rest > 0 else ""]
    lost = _difference(summary.get("val_bpb"), summary.get("val_bpb_before_packing"))
    expected = sum(t["cost_nats"] for t in tensors if is_number(t.get("cost_nats"))) * per_byte
    note = (
        f"{size(summary.get('artifact_bytes'))}: {escape(', '.join(filter(None, parts)))}. Packing cost {signed(lost, 5)} bits "
        "per byte, measured. "
        + (
            f"By the loss's curvature at the weights, {signed(expected, 5)} was expected, tensor by tensor below. "
            if expected
            else ""
        )
    )
    columns = ("tensor", "weights", "bytes", ".bytes as a bar", *COLUMNS)
    meanings = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in COLUMNS.items())
    listed = table(columns, rows, label="Tensors by bytes", numeric=(1, 2, 4, 5, 6, 7, 8))
    return Section(title, f'{listed}<dl class="meanings">{meanings}</dl>', note)


def _tensor_row(tensor: Values, most: float, per_byte: float) -> tuple[str, ...]:
    weights = tensor["count"] if is_number(tensor.get("count")) and tensor["count"] else 1
    each = ["–", "–"]
    if tensor.get("levels"):
        each = [_per_weight(tensor.get(key), weights) for key in ("integer_bits", "entropy_bits")]
    meter = f'<span class="meter" aria-hidden="true"><i style="width:{100 * tensor["packed_bytes"] / most:.1f}%"></i></span>'
    cost = tensor.get("cost_nats")
    return (
        f"<code>{shown(tensor.get('name'), breaks=True)}</code>",
        count(weights),
        count(tensor["packed_bytes"]),
        meter,
        number(8 * tensor["packed_bytes"] / weights, 2),
        *each,
        share(tensor["error"], 1, 2) if is_number(tensor.get("error")) else "–",
        _small(1000 * cost * per_byte) if is_number(cost) else "–",
    )


def _small(value: float) -> str:
    """With four decimals, so that a column can be compared by eye."""
    return "&lt;0.0001" if 0 < value < 0.00005 else number(value, 4)


def _per_weight(bits: Any, weights: float) -> str:
    return number(bits / weights, 2) if is_number(bits) else "–"


def _bits_per_byte(summary: Values) -> float:
    """Bits per byte of the validation text for one nat per token."""
    tokens, total = summary.get("val_tokens"), summary.get("val_bytes")
    return tokens / total / math.log(2) if is_number(tokens) and is_number(total) and total else 0.0


def _difference(a: Any, b: Any) -> float | None:
    return a - b if is_number(a) and is_number(b) else None


def surprise_section(record: Record) -> Section:
    """The text with every token shaded by its bits."""
    title, found = "What surprised the model", record.details.get("surprise", {})
    pieces, bits = (one if isinstance(one, list) else [] for one in (found.get("pieces"), found.get("bits")))
    if not pieces or len(pieces) != len(bits) or not all(map(is_number, bits)):
        return Section(title, missing("Bits by token: the run is older than details.json."))
    spans = "".join(
        f'<span class="shade s{_shade(cost)}" data-bits="{cost:.1f}">{_inner(piece)}</span>'
        for piece, cost in zip(pieces, bits)
    )
    names = ("under 1 bit", *(f"{a} to {b}" for a, b in itertools.pairwise(SURPRISE)), f"{SURPRISE[-1]} and more")
    key = "".join(f'<li><span class="shade s{n}">&nbsp;text&nbsp;</span> {name}</li>' for n, name in enumerate(names))
    total = sum(bits)
    size_ = (
        found["bytes"] if is_number(found.get("bytes")) else len("".join(map(str, pieces)).encode("utf-8", "replace"))
    )
    note = (
        f"The beginning of the validation text, each token shaded by its bits: {count(total)} bits for {count(size_)} bytes, "
        f"{number(total / max(1, size_))} bits per byte here. {END.strip()} stands for the end of a document. "
        "Point at a token, or move by arrow keys, to read its bits."
    )
    dearest = sorted(range(len(bits)), key=lambda n: -bits[n])[:10]
    rows = [
        (f"<code>{shown(repr(pieces[n]))}</code>", number(bits[n], 1), f"<code>{_before(pieces, n)}</code>")
        for n in dearest
    ]
    listed = table(("token", "bits", "after"), rows, label="Most surprising tokens", numeric=(1,))
    return Section(
        title,
        f'<ul class="legend" aria-label="Bits of a token">{key}</ul><output class="reading stays"></output>'
        f'<div class="surprise" role="group" aria-label="The text, token by token" tabindex="0"><bdi>{spans}</bdi></div>'
        f"<details><summary>The ten most surprising tokens</summary>{listed}</details>",
        note,
    )


def _inner(piece: Any) -> str:
    """Escaped text without an element: the whole text is isolated."""
    return shown(piece).removeprefix("<bdi>").removesuffix("</bdi>")


def _before(pieces: list[Any], n: int) -> str:
    return shown("".join(map(str, pieces[max(0, n - 8) : n]))[-40:])


def _shade(bits: float) -> int:
    return sum(bits >= limit for limit in SURPRISE)


def sample_section(record: Record) -> Section:
    summary = record.summary or {}
    found = [s for s in record.details.get("samples", ()) if "text" in s]
    if not found and "sample" in summary:
        found = [{"prompt": "", "text": summary["sample"]}]
    body = ""
    for sample in found:
        prompt = f'<span class="prompt">{_inner(sample.get("prompt", ""))}</span>' if sample.get("prompt") else ""
        title = "After the beginning of a validation text, in grey" if prompt else "From nothing"
        body += f'<h3>{title}</h3><p class="sample"><bdi>{prompt}{_inner(sample["text"])}</bdi></p>'
    return Section("Samples", body, "Written by the packed model.")
