"""Differences with their intervals: one row each, zero as a line, and every pair as a dot."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parbank.report.chart import COLOURS, decimals, figure, marker, ticks
from parbank.report.text import escape, is_number, shown, signed

WIDTH, EDGE = 560, 8
MIDDLE = 12  # the height at which a row's picture has its whiskers
PAIRS = 26  # that of its pairs: on the same height, the whiskers would cover them


@dataclass(frozen=True, kw_only=True)
class Difference:
    name: str
    mean: float
    low: float | None = None
    high: float | None = None
    pairs: Sequence[float] = ()
    words: str = ""
    """The verdict, shown after the row's name."""
    style: int = 0


def difference_chart(
    title: str, rows: Sequence[Difference], form: Callable[[float], str], *, unit: str, note: str = ""
) -> str:
    """A difference that is better lies to the left of zero. Names and words are text of the page, which wraps where a
    phone has no room; below each is a picture, and all of them have one axis."""
    rows = [row for row in rows if is_number(row.mean)]
    if not rows:
        return ""
    values = [0.0]
    for row in rows:
        values += [v for v in (row.mean, row.low, row.high, *row.pairs) if is_number(v)]
    low, high = min(values), max(values)
    pad = 0.05 * (high - low) or 1.0
    low, high = low - pad, high + pad

    def across(value: float) -> float:
        return EDGE + (value - low) / (high - low) * (WIDTH - 2 * EDGE)

    lines = "".join(
        f"<p><span>{shown(row.name)}</span> <span>{escape(form(row.mean))}{f', {shown(row.words)}' if row.words else ''}</span></p>"
        f"{_draw(row, across)}"
        for row in rows
    )
    described = f"{title}. " + " ".join(_describe(row, form) for row in rows)
    marks = ticks(low, high, 6)
    axis = _axis([(across(v), signed(v, decimals(marks)) if v else "0") for v in marks], unit)
    picture = f'<div class="differences" role="img" aria-label="{escape(described)}">{lines}{axis}</div>'
    return figure(title, "", picture, "", note)


def _axis(marks: Sequence[tuple[float, str]], unit: str) -> str:
    parts = [f'<line class="axis" x1="{EDGE}" x2="{WIDTH - EDGE}" y1="1" y2="1"/>']
    for at, said in marks:
        if 24 < at < WIDTH - 24:
            parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="1" y2="5"/>')
            parts.append(f'<text class="tick middle" x="{at:.1f}" y="19">{escape(said)}</text>')
    parts.append(f'<text class="label end" x="{WIDTH - EDGE}" y="38">{escape(unit)}</text>')
    return f'<svg class="chart wide" viewBox="0 0 {WIDTH} 44" aria-hidden="true">{"".join(parts)}</svg>'


def _draw(row: Difference, across: Callable[[float], float]) -> str:
    height = PAIRS + 6 if row.pairs else 2 * MIDDLE
    zero = f'<line class="zero" x1="{across(0):.1f}" x2="{across(0):.1f}" y1="0" y2="{height}"/>'
    parts = [f'<circle class="pair" cx="{across(v):.1f}" cy="{PAIRS}" r="3.2"/>' for v in row.pairs if is_number(v)]
    if is_number(row.low) and is_number(row.high):
        a, b = across(row.low), across(row.high)
        ends = ((a, a, -5, 5), (b, b, -5, 5), (a, b, 0, 0))
        parts += [
            f'<line class="whisker c{row.style % COLOURS}" x1="{x:.1f}" x2="{to:.1f}" y1="{MIDDLE + up}" y2="{MIDDLE + down}"/>'
            for x, to, up, down in ends
        ]
    parts.append(marker(row.style, across(row.mean), MIDDLE, 4.5))
    return (
        f'<svg class="chart wide" viewBox="0 0 {WIDTH} {height}" aria-hidden="true">{zero}'
        f'<g data-pairs="{len(row.pairs)}">{"".join(parts)}</g></svg>'
    )


def _describe(row: Difference, form: Callable[[float], str]) -> str:
    inside = f", from {form(row.low)} to {form(row.high)}" if is_number(row.low) and is_number(row.high) else ""
    return f"{row.name}: {form(row.mean)}{inside}{f', {row.words}' if row.words else ''}."
