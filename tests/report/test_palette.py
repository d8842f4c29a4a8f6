"""The colours of a page: enough contrast in light and dark, and told apart without full colour sight."""

import itertools
import re
from importlib.resources import files

import pytest

from parbank.report.page import asset

Colour = tuple[float, float, float]

# Deuteranopia and protanopia, on linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
}


def palettes() -> dict[str, dict[str, str]]:
    """The variables of the style, light and dark."""
    light, dark = re.findall(r":root \{(.*?)\}", asset("page.css"), re.DOTALL)
    found = {name: dict(re.findall(r"--(\w+): ([^;]+);", block)) for name, block in (("light", light), ("dark", dark))}
    return {"light": found["light"], "dark": found["light"] | found["dark"]}


def linear(text: str) -> Colour:
    parts = [int(text[n : n + 2], 16) for n in (1, 3, 5)] if text.startswith("#") else [int(p) for p in text.split(",")]
    r, g, b = ((v / 255 / 12.92) if v <= 10 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in parts)
    return r, g, b


def luminance(colour: Colour) -> float:
    return 0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2]


def contrast(a: Colour, b: Colour) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def lab(colour: Colour, kind: str) -> Colour:
    """CIE L*a*b* of a linear colour as somebody sees it."""
    r, g, b = (min(1.0, max(0.0, sum(m * c for m, c in zip(row, colour)))) for row in BLINDNESS[kind])
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        luminance((r, g, b)),
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_nothing_moves_by_itself() -> None:
    """No animation, and no script that scrolls smoothly, focuses or plays by itself."""
    served = [
        file for file in (files("parbank.serve") / "page").iterdir() if file.name.endswith((".css", ".js", ".html"))
    ]
    texts = [asset("page.css"), asset("page.js"), *(file.read_text(encoding="utf-8") for file in served)]
    assert len(texts) == 7
    for text in texts:
        found = re.search(r"animat|transition|@keyframes|smooth|autoplay|autofocus|marquee|blink|setInterval", text)
        assert found is None, found


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_and_lines_stand_out(mode: str) -> None:
    palette = palettes()[mode]
    paper = linear(palette["paper"])
    for name in ("ink", "soft", "link"):
        assert contrast(linear(palette[name]), paper) >= 4.5, name
    assert contrast(linear(palette["soft"]), linear(palette["raised"])) >= 4.5
    for n in range(6):
        assert contrast(linear(palette[f"c{n}"]), paper) >= 4.5, f"c{n}: also markers and bars"


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_is_legible_on_the_darkest_shade(mode: str) -> None:
    palette = palettes()[mode]
    (most,) = set(re.findall(r"\.s5 \{ background: rgba\(var\(--heat\), (\.\d+)\)", asset("page.css")))

    def mix(a: str, b: str) -> str:  # browsers mix as stored, not linearly
        hot, cold = (
            [int(p) for p in t.split(",")] if "," in t else [int(t[n : n + 2], 16) for n in (1, 3, 5)] for t in (a, b)
        )
        return ",".join(str(round(float(most) * h + (1 - float(most)) * c)) for h, c in zip(hot, cold))

    assert contrast(linear(palette["ink"]), linear(mix(palette["heat"], palette["paper"]))) >= 4.5


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_the_thin_line_of_the_loss_is_seen(mode: str) -> None:
    palette = palettes()[mode]
    (opacity,) = re.findall(r"\.faint \{[^}]*opacity: (\.\d+)", asset("page.css"))
    line, paper = ([int(palette[name][n : n + 2], 16) for n in (1, 3, 5)] for name in ("c5", "paper"))
    mixed = ",".join(str(round(float(opacity) * a + (1 - float(opacity)) * b)) for a, b in zip(line, paper))
    assert contrast(linear(mixed), linear(palette["paper"])) >= 3


def test_a_report_and_the_playground_shade_a_token_alike() -> None:
    play = (files("parbank.serve") / "page" / "playground.css").read_text(encoding="utf-8")
    shades = [
        re.findall(rf"^\.{name}\d (\{{.*\}})$", text, re.M) for name, text in (("s", asset("page.css")), ("l", play))
    ]
    assert len(shades[0]) == 6
    assert shades[0] == shades[1]


@pytest.mark.parametrize("kind", BLINDNESS)
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_the_first_series_are_told_apart(mode: str, kind: str) -> None:
    """Of more than three series, dashes and markers must help: no six colours suit everybody."""
    palette = palettes()[mode]
    for a, b in itertools.combinations(range(3), 2):
        first, second = (lab(linear(palette[f"c{n}"]), kind) for n in (a, b))
        distance = sum((x - y) ** 2 for x, y in zip(first, second)) ** 0.5
        assert distance > 15, f"c{a} and c{b}: {distance:.0f}"
