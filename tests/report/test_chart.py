"""Line charts: what a long series keeps, what its mean is, and what stays inside the frame."""

import json
import math
import re

import pytest

from parbank.report.chart import MEAN_PARTS, Axis, Frame, Point, Series, line_chart, running_mean, smooth, thin
from parbank.report.dots import Difference, difference_chart
from parbank.report.text import short, signed

X, Y = Axis(label="seconds", zero=True), Axis(label="nats", cut=True)


def curve(count: int, **spikes: float) -> list[Point]:
    """A loss that falls. `spikes`: values by the number of their point, such as at70=9.0."""
    found = {f"at{n}": 2 + 3 * math.exp(-n / (count / 20)) for n in range(count)} | spikes
    return [(float(n), y) for n, y in enumerate(found.values())]


def read(chart: str) -> list[list[list[float]]]:
    """The places of every line of a chart."""
    lines = re.findall(r'<polyline points="([^"]+)"', chart)
    return [[[float(v) for v in pair.split(",")] for pair in line.split()] for line in lines]


def test_a_spike_among_many_rows_is_kept() -> None:
    points = curve(20_000, at12345=40.0, at777=0.5)
    kept = thin(Series(name="loss", points=points), 600)
    assert len(kept.points) <= 602
    assert {points[12345], points[777], points[0], points[-1]} <= set(kept.points)
    assert list(kept.points) == sorted(kept.points)
    assert "reach 40" in line_chart("Loss", [Series(name="loss", points=points)], X, Y)


def test_a_gap_stays_a_gap() -> None:
    points = curve(5000, at2500=math.nan)
    kept = thin(Series(name="loss", points=points), 100)
    assert [math.isnan(y) for _, y in kept.points].count(True) == 1
    assert len(read(line_chart("Loss", [Series(name="loss", points=points)], X, Axis(label="nats")))) == 2


def test_the_mean_does_not_jump_where_rows_lie_close() -> None:
    """A row of a validation stands a step from a regular row. Windows of so many points would differ there, and the curve
    would fall at one place of the axis."""
    points = sorted([*((10.0 * n, 4.0 if n < 30 else 2.0) for n in range(60)), (300.4, 2.0), (299.6, 4.0)])
    mean = dict(running_mean(points))
    assert mean[299.6] == mean[300.4]
    assert mean[250.0] == 4.0
    assert mean[350.0] == 2.0
    assert running_mean([]) == []


def test_few_points_have_no_mean() -> None:
    points = curve(MEAN_PARTS - 1)
    assert smooth(points) == points
    assert smooth(curve(MEAN_PARTS)) == running_mean(curve(MEAN_PARTS))


def test_a_line_that_leaves_the_frame_is_cut_at_its_top() -> None:
    """It falls, rises again above the frame, and falls: all of that in its steep beginning."""
    points = curve(200, at0=12.0, at2=2.5, at5=11.0, at8=2.5)
    chart = line_chart("Loss", [Series(name="loss", points=points)], X, Y)
    lines = read(chart)
    top = Frame.top
    assert len(lines) > 1
    assert min(y for line in lines for _, y in line) == top
    assert [line[0][1] for line in lines] == [top] * len(lines)
    assert "Values above the frame reach 12." in chart


def test_a_rare_spike_does_not_flatten_the_curve() -> None:
    chart = line_chart("Loss", [Series(name="loss", points=curve(1000, at700=40.0))], X, Y)
    heights = sorted(y for line in read(chart) for _, y in line)
    assert heights[-1] - heights[len(heights) // 10] > 20, "of 178 that the frame has; 40 nats would leave 1"
    often = curve(1000, **{f"at{n}": 40.0 for n in range(300, 900, 10)})
    assert "above the frame" not in line_chart("Loss", [Series(name="loss", points=often)], X, Y)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (1.1303, 1.1306, ["1.13030", "1.13035", "1.13040", "1.13045", "1.13050", "1.13055", "1.13060"]),
        (1234.1, 1234.3, ["1,234.10", "1,234.15", "1,234.20", "1,234.25", "1,234.30"]),
        (0.0, 14_000.0, ["0", "5k", "10k"]),
        (2.0, 4.4, ["2", "2.5", "3", "3.5", "4", "4.5"]),
    ],
)
def test_marks_of_an_axis_look_different(low: float, high: float, labels: list[str]) -> None:
    """Three digits of a validation curve near its end would be 1.13 at every mark."""
    chart = line_chart("Score", [Series(name="bits", points=[(1.0, low), (2.0, high)])], X, Axis(label="bits"))
    assert re.findall(r'<text class="tick end"[^>]*>([^<]*)</text>', chart) == labels


def test_no_mark_lies_beside_the_frame() -> None:
    """A text of one token has one octave."""
    one = Series(name="bits", points=[(0.0, 3.2)])
    chart = line_chart("Score", [one], Axis(label="tokens before it", log=True), Axis(label="bits"))
    assert re.findall(r'<text class="tick middle"[^>]*>([^<]*)</text>', chart) == ["0"]


@pytest.mark.parametrize("value", [0.0, 0.1, -3e17])
def test_roundings_are_no_curve(value: float) -> None:
    points = [(value, value), (value, math.nextafter(value, math.inf))]
    chart = line_chart("Loss", [Series(name="loss", points=points)], Axis(label="steps"), Axis(label="nats"))
    heights = [y for line in read(chart) for _, y in line]
    assert heights[0] == heights[1]
    assert len(re.findall('class="tick end"', chart)) > 2


@pytest.mark.parametrize("spread", [3.0, 4e-4, 7e-9])
def test_marks_of_differences_look_different(spread: float) -> None:
    rows = [Difference(name="a", mean=spread / 3, low=-spread / 2, high=spread)]
    chart = difference_chart("Differences", rows, signed, unit="bits per byte")
    marks = re.findall(r'<text class="tick middle"[^>]*>([^<]*)</text>', chart)
    assert len(marks) > 2
    assert len(set(marks)) == len(marks)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999.4, "999"), (999.7, "1,000"), (9994, "9,994"), (9996, "10k"), (999_400, "999k"), (999_700, "1M"),
     (-1.513e6, "-1.51M"), (999.9e6, "1G"), (2e12, "2T"), (1e30, "1e+30")],
)  # fmt: skip
def test_short_numbers_round_before_they_choose_a_prefix(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize("log", [False, True])
def test_the_axis_begins_at_zero(log: bool) -> None:
    chart = line_chart(
        "Loss", [Series(name="loss", points=[(5.0, 1.0), (9.0, 2.0)])], Axis(label="s", zero=True, log=log), Y
    )
    data = json.loads(re.search(r'data-chart="([^"]+)"', chart)[1].replace("&quot;", '"'))  # type: ignore[index]
    assert data["x"]["frame"][0] == 0


def test_a_marker_upon_another_hides_neither() -> None:
    series = [
        Series(name=name, points=[(5.0, 1.0)], line=False, hollow=hollow)
        for name, hollow in (("a", True), ("b", False))
    ]
    chart = line_chart("Score", series, X, Axis(label="bits"))
    outer, inner = re.findall(r'<circle class="m( hollow)? c0" cx="[\d.]+" cy="[\d.]+" r="([\d.]+)"', chart)[-2:]
    assert outer[0]
    assert not inner[0]
    assert float(outer[1]) > 1.4 * float(inner[1])
