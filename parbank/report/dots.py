"""Differences with their intervals: one row each, zero as a line, and every pair as a dot."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parbank.report.chart import COLOURS, figure, marker, ticks
from parbank.report.text import escape, is_number

WIDTH, ROW, EDGE = 560, 50, 8


@dataclass(frozen=True, kw_only=True)
class Difference:
    name: str
    mean: float
    low: float | None = None
    high: float | None = None
    pairs: Sequence[float] = ()
    words: str = ""
    """The verdict, shown at the end of the row's title."""
    style: int = 0


def difference_chart(
    title: str, rows: Sequence[Difference], form: Callable[[float], str], *, unit: str, note: str = ""
) -> str:
    """A difference that is better lies to the left of zero."""
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

    bottom = ROW * len(rows) + 6
    parts = []
    for n, row in enumerate(rows):
        zero = f'x1="{across(0):.1f}" x2="{across(0):.1f}" y1="{n * ROW + 20}" y2="{n * ROW + 45}"'
        parts.append(f'<line class="zero" {zero}/>{_draw(row, n * ROW, across)}')
    for value in ticks(low, high, 6):
        at, said = across(value), form(value) if value else "0"
        if 24 < at < WIDTH - 24:
            parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
            parts.append(f'<text class="tick middle" x="{at:.1f}" y="{bottom + 17}">{escape(said)}</text>')
    parts.append(f'<line class="axis" x1="{EDGE}" x2="{WIDTH - EDGE}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text class="label end" x="{WIDTH - EDGE}" y="{bottom + 34}">{escape(unit)}</text>')
    described = f"{title}. " + " ".join(_describe(row, form) for row in rows)
    picture = (
        f'<svg class="chart wide" viewBox="0 0 {WIDTH} {bottom + 40}" role="img" aria-label="{escape(described)}">'
        f"{''.join(parts)}</svg>"
    )
    return figure(title, "", picture, "", note)


def _draw(row: Difference, top: int, across: Callable[[float], float]) -> str:
    y = top + (28 if row.pairs else 32)  # the pairs have a lane of their own below: the whiskers would cover them
    parts = [f'<text class="value" x="{EDGE}" y="{top + 16}">{escape(row.name)}</text>']
    if row.words:
        parts.append(f'<text class="value end" x="{WIDTH - EDGE}" y="{top + 16}">{escape(row.words)}</text>')
    parts += [f'<circle class="pair" cx="{across(v):.1f}" cy="{top + 40}" r="3.2"/>' for v in row.pairs if is_number(v)]
    if is_number(row.low) and is_number(row.high):
        a, b = across(row.low), across(row.high)
        ends = "".join(
            f'<line class="whisker c{row.style % COLOURS}" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 5}" y2="{y + 5}"/>'
            for x in (a, b)
        )
        parts.append(
            f'<line class="whisker c{row.style % COLOURS}" x1="{a:.1f}" x2="{b:.1f}" y1="{y}" y2="{y}"/>{ends}'
        )
    parts.append(marker(row.style, across(row.mean), y, 4.5))
    return f'<g data-pairs="{len(row.pairs)}">{"".join(parts)}</g>'


def _describe(row: Difference, form: Callable[[float], str]) -> str:
    inside = f", from {form(row.low)} to {form(row.high)}" if is_number(row.low) and is_number(row.high) else ""
    return f"{row.name}: {form(row.mean)}{inside}{f', {row.words}' if row.words else ''}."
