"""Bars: horizontal ones with their value at the end, and one bar of parts."""

from collections.abc import Sequence
from dataclasses import dataclass

from parbank.report.chart import figure
from parbank.report.page import table
from parbank.report.text import escape


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    shown: str
    style: int = 5


def bar_chart(title: str, bars: Sequence[Bar], *, note: str = "") -> str:
    """Each name stands above its bar, so that a long one has room on a phone."""
    if not bars:
        return ""
    top, row = max(bar.value for bar in bars) or 1.0, 38
    parts = []
    for n, bar in enumerate(bars):
        y = n * row
        length = max(1.0, 376 * bar.value / top)
        parts.append(
            f'<text class="value" x="0" y="{y + 13}">{escape(bar.name)}</text>'
            f'<text class="value end" x="380" y="{y + 13}">{escape(bar.shown)}</text>'
            f'<rect class="bar c{bar.style}" x="0" y="{y + 18}" width="{length:.1f}" height="9"/>'
        )
    described = f"{title}: " + "; ".join(f"{bar.name} {bar.shown}" for bar in bars)
    picture = (
        f'<svg class="bars" viewBox="0 0 380 {row * len(bars)}" role="img" aria-label="{escape(described)}">'
        f"{''.join(parts)}</svg>"
    )
    return figure(title, "", picture, "", note)


def parted_bar(title: str, parts: Sequence[tuple[str, float, str]]) -> str:
    """(name, value, shown): one bar, and a table of its parts in the same order. Parts differ by hatching, too."""
    kept = [(n, *part) for n, part in enumerate(parts) if part[1] > 0]
    total = sum(value for _, _, value, _ in kept)
    if not total:
        return ""
    track = "".join(f'<i class="c{n % 6} h{n % 6}" style="width:{100 * v / total:.2f}%"></i>' for n, _, v, _ in kept)
    described = f"{title}: " + ", ".join(f"{name} {shown}" for _, name, _, shown in kept)
    rows = [
        (f'<span class="key c{n % 6} h{n % 6}"></span> {escape(name)}', escape(shown), f"{100 * value / total:.1f}%")
        for n, name, value, shown in kept
    ]
    bar = f'<div class="track" role="img" aria-label="{escape(described)}">{track}</div>'
    return bar + table(("part", "time", "share"), rows, label=title, numeric=(1, 2))
