"""Line charts as SVG, drawn here: they are complete without a script, and a reader of the file sees the numbers.

A series differs from the others by its dash and its marker as well as by its colour. After six series colours come again,
with other dashes and markers. The script of the page adds a cursor, by pointer or by arrow keys; it reads the values from
the chart's `data-chart`.
"""

import bisect
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from parbank.report.text import escape, is_number, short

Point = tuple[float, float]

DASHES = ("", "7 4", "2 3", "10 3 2 3", "5 5", "1 4")
MARKERS = "osd^vx"  # circle, square, diamond, triangles, cross
COLOURS = 6  # c0 to c5 of page.css
MOST_POINTS = 600  # of a line; more would be narrower than a pixel each
MOST_IN_CHART = 3000  # of all its lines, so that a page of many runs stays light
MARKED_POINTS = 40  # a line with more points has a marker on some of them only
TABLE_ROWS = 40
MEAN_PARTS = 30  # a running mean reaches so small a share of the axis to each side; fewer points have none
OTHER_TOKENS = "Vocabularies differ: a token is not the same amount of text, so do not compare losses per token."
EARLY = 0.06  # the share of a curve whose steepness may be left out of the frame
RARE = 0.005  # the share of the other points that may be left out, if they alone are far above the rest


@dataclass(frozen=True, kw_only=True)
class Series:
    name: str
    points: Sequence[Point]
    """Sorted by x. Values that are not finite are left out, and break the line."""
    style: int = 0
    """The number of the colour, dash and marker."""
    line: bool = True
    """False draws the markers alone."""
    faint: bool = False
    """A thin line without markers, behind another."""
    hollow: bool = False
    """Markers are larger, and outlines only: one that lies upon another hides neither."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    label: str
    form: Callable[[float], str] = short
    log: bool = False
    zero: bool = False
    """Begins at zero."""
    reach: float = 0.0
    """Goes as far as this, also where the points end before: charts above each other are then compared by eye."""
    scale: float = 1.0
    """The unit that is shown, in that of the points and of `reach`: 60 shows seconds as minutes."""
    cut: bool = False
    """Leaves a steep beginning and rare spikes out of the frame, so that the rest has room. The chart says so."""


@dataclass(frozen=True)
class Frame:
    """The mapping from numbers to positions in the picture."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: int
    height: int
    log_x: bool = False
    left, right, top, bottom = 58, 14, 10, 42

    def across(self, x: float) -> float:
        low, high, at = self.x[0], self.x[1], x
        if self.log_x:
            low, high, at = math.log2(1 + low), math.log2(1 + high), math.log2(1 + x)
        return self.left + (at - low) / (high - low) * (self.width - self.left - self.right)

    def shows(self, y: float) -> bool:
        return y <= self.y[1]

    def cut(self, points: Sequence[Point]) -> list[list[Point]]:
        """The parts of a line that lie in the frame. It leaves and enters at the top."""
        parts: list[list[Point]] = [[]]
        for before, here in zip([None, *points], points):
            if before is not None and self.shows(before[1]) != self.shows(here[1]):
                share = (self.y[1] - before[1]) / (here[1] - before[1])
                edge = (before[0] + share * (here[0] - before[0]), self.y[1])
                if self.shows(here[1]):
                    parts.append([edge])
                else:
                    parts[-1].append(edge)
            if self.shows(here[1]):
                parts[-1].append(here)
        return [part for part in parts if len(part) > 1]

    def down(self, y: float) -> float:
        low, high = self.y
        return self.top + (high - y) / (high - low) * (self.height - self.top - self.bottom)


def line_chart(
    title: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    wide: bool = False,
    unit: str = "",
    note: str = "",
) -> str:
    """A figure: caption, legend, picture, and its numbers as a table."""
    found = [one for one in series if any(map(is_point, one.points))]
    if not found:
        return ""
    if x.scale != 1:
        found = [replace(one, points=[(a / x.scale, b) for a, b in one.points]) for one in found]
        x = replace(x, reach=x.reach / x.scale, scale=1.0)
    kept = [thin(one, min(MOST_POINTS, MOST_IN_CHART // len(found))) for one in found]
    points = [point for one in kept for point in one.points if is_point(point)]
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    top = _top(found) if y.cut else max(ys)
    frame = Frame(
        _span(0.0 if x.zero else min(xs), max(*xs, x.reach)),
        _padded(0.0 if y.zero else min(ys), top, zero=y.zero),
        560 if wide else 380,
        290 if wide else 230,
        x.log,
    )
    drawn = "".join(draw_series(one, frame, alone=len(kept) == 1) for one in kept)
    if top < max(ys):
        note = f"{note} Values above the frame reach {escape(y.form(max(ys)))}.".strip()
    described = f"{title}. {_describe(kept, y)}"
    data = {
        "x": {"label": x.label, "frame": [*frame.x, frame.left, frame.width - frame.right, int(x.log)]},
        "series": [{"name": one.name, "points": [_rounded(p) for p in one.points if is_point(p)]} for one in kept],
    }
    picture = (
        f'<svg class="chart{" wide" if wide else ""}" viewBox="0 0 {frame.width} {frame.height}" role="img" tabindex="0" '
        f'aria-label="{escape(described)}" data-chart="{escape(json.dumps(data, separators=(",", ":")))}">'
        f'{_axes(frame, x, y)}{drawn}<line class="cursor" y1="{frame.top}" y2="{frame.height - frame.bottom}" hidden></line></svg>'
    )
    numbers = _table(title, kept, x, y)
    return figure(title, legend(kept), picture + '<output class="reading"></output>', numbers, note, unit)


def figure(title: str, legend: str, picture: str, table: str, note: str = "", unit: str = "") -> str:
    more = f'<p class="note">{note}</p>' if note else ""
    numbers = (
        f'<details><summary>Numbers<span class="aside"> of {escape(title)}</span></summary>{table}</details>'
        if table
        else ""
    )
    measure = f" <small>{escape(unit)}</small>" if unit else ""
    caption = f"<figcaption>{escape(title)}{measure}</figcaption>"
    return f'<figure>{caption}{legend}<div class="picture">{picture}{more}{numbers}</div></figure>'


def legend(series: Sequence[Series]) -> str:
    """One entry for each series, with its line as drawn. A single series needs none."""
    if len(series) < 2:
        return ""
    items = []
    for one in series:
        line = f'<line x1="1" y1="6" x2="29" y2="6" {_stroke(one)}/>' if one.line else ""
        mark = "" if one.faint else marker(one.style, 15, 6, hollow=one.hollow)
        swatch = f'<svg class="swatch" viewBox="0 0 30 12" aria-hidden="true">{line}{mark}</svg>'
        items.append(f"<li>{swatch}<bdi>{escape(one.name)}</bdi></li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _top(series: Sequence[Series]) -> float:
    """The highest value that the frame has: without the values before EARLY of each series, and without RARE values after
    it, where they would take much of the height."""
    values, later = [], []
    for one in series:
        points = [p for p in one.points if is_point(p)]
        begin = points[0][0] + EARLY * (points[-1][0] - points[0][0])
        values += [p[1] for p in points]
        later += [p[1] for p in points if p[0] >= begin]
    lowest, top = min(values), max(values)
    later.sort()
    for found in (later[-1], later[-1 - int(RARE * len(later))]):
        top = found if lowest < found and found - lowest < 0.62 * (top - lowest) else top
    return top


def draw_series(one: Series, frame: Frame, *, alone: bool = False) -> str:
    """Lines between points that follow each other, and markers: on a long line only some, and none if it is alone."""
    lines, places = [], [p for p in one.points if is_point(p)]
    for finite, run in itertools.groupby(one.points, key=is_point):
        for part in frame.cut(list(run)) if finite and one.line else ():
            placed = " ".join(f"{frame.across(a):.1f},{frame.down(b):.1f}" for a, b in part)
            lines.append(f'<polyline points="{placed}" {_stroke(one)}/>')
    many = one.line and (one.faint or len(places) > MARKED_POINTS)
    marked = places[:: math.ceil(len(places) / 8)] if many else places
    marked = [] if many and (alone or one.faint) else marked
    shown = [(frame.across(a), frame.down(b)) for a, b in marked if frame.shows(b)]
    marks = "".join(marker(one.style, x, y, hollow=one.hollow) for x, y in shown)
    return f'<g class="series" data-points="{len(places)}">{"".join(lines)}{marks}</g>'


def marker(style: int, x: float, y: float, r: float = 3.2, *, hollow: bool = False) -> str:
    kind, c = MARKERS[_turn(style) % len(MARKERS)], f'class="m{" hollow" if hollow else ""} c{style % COLOURS}"'
    r = 1.6 * r if hollow else r
    if kind == "o":
        return f'<circle {c} cx="{x:.1f}" cy="{y:.1f}" r="{r}"/>'
    if kind == "s":
        return f'<rect {c} x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r}" height="{2 * r}"/>'
    d = r * 1.25
    shape = {
        "d": ((0, -d), (d, 0), (0, d), (-d, 0)),
        "^": ((0, -d), (d, d), (-d, d)),
        "v": ((0, d), (d, -d), (-d, -d)),
        "x": _cross(d),
    }[kind]
    corners = " ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in shape)
    return f'<polygon {c} points="{corners}"/>'


def _cross(r: float) -> list[tuple[float, float]]:
    """The corners of a marker in the shape of an x."""
    a, b = r, r / 2.2
    corner = [(0, -b), (a - b, -a), (a, b - a)]
    turns = ((1, 0), (0, 1), (-1, 0), (0, -1))
    return [(x * c - y * s, x * s + y * c) for c, s in turns for x, y in corner]


def _turn(style: int) -> int:
    """The number of a dash and a marker: no two of 36 styles have colour, dash and marker in common."""
    return style + style // COLOURS


def _stroke(one: Series) -> str:
    dash = "" if one.faint else DASHES[_turn(one.style) % len(DASHES)]
    return f'class="l{" faint" if one.faint else ""} c{one.style % COLOURS}"' + (
        f' stroke-dasharray="{dash}"' if dash else ""
    )


def _axes(frame: Frame, x: Axis, y: Axis) -> str:
    bottom, right = frame.height - frame.bottom, frame.width - frame.right
    parts = []
    marks = ticks(*frame.y, 7)
    for value, said in zip(marks, _labels(marks, y.form)):
        at = frame.down(value)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick end" x="{frame.left - 7}" y="{at + 4:.1f}">{escape(said)}</text>')
    marks = _log_ticks(*frame.x) if x.log else ticks(*frame.x, 6 if frame.width > 400 else 5)
    for value, said in zip(marks, _labels(marks, x.form)):
        at = frame.across(value)
        parts.append(f'<line class="grid short" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="tick middle" x="{at:.1f}" y="{bottom + 17}">{escape(said)}</text>')
    parts.append(f'<line class="axis" x1="{frame.left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text class="label end" x="{right}" y="{frame.height - 5}">{escape(x.label)}</text>')
    return "".join(parts)


def _labels(marks: Sequence[float], form: Callable[[float], str]) -> list[str]:
    """With as many decimals as tell the marks apart: the end of a curve may move in its fourth digit alone."""
    found = [form(value) for value in marks]
    if form is not short:
        return found
    if len(set(found)) < len(found):
        return [f"{value:,.{decimals(marks)}f}" for value in marks]
    if max(map(abs, marks), default=0.0) >= 10_000:  # 5k below 10k, not 5,000
        found = [f"{value / 1000:g}k" if 1000 <= abs(value) < 10_000 else said for value, said in zip(marks, found)]
    return found


def decimals(marks: Sequence[float]) -> int:
    """Those of the step between marks."""
    return max(0, -math.floor(math.log10(marks[1] - marks[0]) + 1e-9))


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers inside an interval: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{n * step:.15g}") for n in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """0, then powers of two, no more than eight."""
    octaves = range(max(0, math.ceil(math.log2(max(low, 1)))), math.floor(math.log2(max(high, 1))) + 1)
    every = max(1, math.ceil(len(octaves) / 7))
    return ([0.0] if low <= 0 else []) + [
        float(2**n) for n in octaves if n % every == (octaves[-1] % every) and 2**n <= high
    ]


def thin(one: Series, most: int) -> Series:
    """About so many points: the first, the last, and of each group between them the lowest and the highest, so that no
    spike is lost. A value that is not finite stays, too."""
    if len(one.points) <= most:
        return one
    first, *between, last = one.points
    size = math.ceil(2 * len(between) / max(2, most - 2))
    kept = [first]
    for start in range(0, len(between), size):
        group = between[start : start + size]
        finite = {n: point[1] for n, point in enumerate(group) if is_point(point)}
        gaps = [n for n in range(len(group)) if n not in finite] if len(finite) < len(group) else []
        ends = [min(finite, key=finite.__getitem__), max(finite, key=finite.__getitem__)] if finite else []
        kept += [group[n] for n in sorted({*gaps[:1], *ends})]
    return replace(one, points=[*kept, last])


def running_mean(points: Sequence[Point]) -> list[Point]:
    """The mean over a fifteenth of the axis around each point; over more of it where that would be less than seven points,
    on average. The beginning, where a loss falls steeply, has shorter windows. Points may lie closer in some places than in
    others, so distances count, not numbers of points."""
    kept = [point for point in points if is_point(point)]
    xs, sums = [x for x, _ in kept], [0.0, *itertools.accumulate(y for _, y in kept)]
    reach = (xs[-1] - xs[0]) * max(1 / MEAN_PARTS, 3 / len(xs)) if kept else 0.0
    found = []
    for x in xs:
        near = min(x - xs[0], reach)
        first, end = bisect.bisect_left(xs, x - near), bisect.bisect_right(xs, x + near)
        found.append((x, (sums[end] - sums[first]) / (end - first)))
    return found


def smooth(points: Sequence[Point]) -> list[Point]:
    """The running mean; the points themselves where they are too few for one."""
    return running_mean(points) if len(points) >= MEAN_PARTS else list(points)


def is_point(point: Point) -> bool:
    return is_number(point[0]) and is_number(point[1])


def _span(low: float, high: float) -> tuple[float, float]:
    around = 0.5 + 0.1 * abs(low)
    return (low - around, low + around) if _is_flat(low, high) else (low, high)


def _is_flat(low: float, high: float) -> bool:
    """Also if only roundings differ: between them there is no room for marks."""
    return high - low <= 1e-9 * max(abs(low), abs(high), 1e-200)


def _padded(low: float, high: float, *, zero: bool) -> tuple[float, float]:
    if _is_flat(low, high):
        spread = abs(high) * 0.1 or 1.0
        return (0.0 if zero else low - spread), high + spread
    pad = 0.06 * (high - low)
    return (0.0 if zero else low - pad), high + pad


def _rounded(point: Point) -> list[float]:
    return [float(f"{value:.6g}") for value in point]


def _describe(series: Sequence[Series], y: Axis) -> str:
    """Describes the chart in words, for people who do not see the picture."""
    parts = []
    for one in series:
        values = [p[1] for p in one.points if is_point(p)]
        parts.append(
            f"{one.name}: {len(values)} points from {y.form(values[0])} to {y.form(values[-1])}, "
            f"lowest {y.form(min(values))}, highest {y.form(max(values))}"
        )
    return f"{y.label}. " + "; ".join(parts) + "."


def _table(title: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Some of the points, evenly chosen."""
    found = []
    for one in series:
        points = [p for p in one.points if is_point(p)]
        every = max(1, math.ceil(len(points) / TABLE_ROWS))
        rows = "".join(
            f"<tr><td>{escape(x.form(a))}</td><td>{_exact(b)}</td></tr>"
            for a, b in dict.fromkeys([*points[::every], points[-1]])
        )
        name = f"<caption><bdi>{escape(one.name)}</bdi></caption>"
        found.append(
            f"<table>{name}<thead><tr><th scope=col>{escape(x.label)}</th><th scope=col>{escape(y.label)}</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>"
        )
    return (
        f'<div class="tables" role="group" aria-label="Numbers of {escape(title)}" tabindex="0">{"".join(found)}</div>'
    )


def _exact(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.6g}"
