"""The pages of `parbank report` in a real browser: offline, without errors, and every foreign text as text."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from parbank.report.write import write_pages, write_study_page
from tests.integrations.browser import DESK, PHONE, WAIT_MS, open_browser, open_reader
from tests.report.folders import make_run
from tests.report.test_comparison import study_result

expect.set_options(timeout=WAIT_MS)

HOSTILE = "</script><b>bold</b><img src=x onerror=alert(1)>\u202edlrow\u202c"
SHOWN = "</script><b>bold</b><img src=x onerror=alert(1)>\\u202edlrow\\u202c"
NAME = "<b>run<i>\u202eeno"  # a folder's name has no slash
POINTS = 90
"""Rows of a run's metrics.jsonl."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs; the first has hostile text wherever a user or a model writes some."""
    parent = tmp_path_factory.mktemp("runs")
    details = {
        "samples": [{"prompt": HOSTILE, "text": HOSTILE}],
        "surprise": {"pieces": ["The ", HOSTILE, " sea"], "bits": [1.0, 9.5, 3.0]},
        "machine": {"processor": HOSTILE, "cores": 2, "memory": 1},
    }
    first = make_run(parent / NAME, f"data={json.dumps('text:' + HOSTILE)}", details=details, sample=HOSTILE)
    return [first, make_run(parent / "other", "optim.clip=0.5", seed=1)]


@pytest.fixture(scope="module")
def pages(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("pages")
    result = study_result()
    return {
        "run": write_pages(folders[:1], out / "run.html"),
        "comparison": write_pages(folders, out / "comparison.html"),
        "study": write_study_page(result, out, out / "study.html"),
    }


def count_points(page: Page, chart: str) -> dict[str, int]:
    """Points of every series of a chart, as its data says."""
    data = page.locator(f"figure:has(figcaption:text-is('{chart}')) svg[data-chart]").first.get_attribute("data-chart")
    return {one["name"]: len(one["points"]) for one in json.loads(data or "")["series"]}


def test_curves_have_a_point_for_every_row(browser: Browser, pages: dict[str, Path]) -> None:
    with open_reader(browser) as reader:
        reader.page.goto(pages["run"].as_uri())
        for chart in ("Loss by clock", "Loss by tokens"):
            assert count_points(reader.page, chart) == {"training loss": POINTS, "running mean": POINTS}
        figure = reader.page.locator("figure:has(figcaption:text-is('Loss by clock'))")
        line = figure.locator("polyline").first
        drawn = line.evaluate("one => one.points.numberOfItems")
        above = "above the frame" in (figure.text_content() or "")  # the first values, as the figure then says
        assert POINTS - 10 < drawn < POINTS if above else drawn == POINTS
        box, frame = line.bounding_box(), figure.locator("svg[data-chart]").bounding_box()
        assert box
        assert frame
        assert box["width"] > frame["width"] / 2
        assert box["height"] > frame["height"] / 3
        assert box["y"] >= frame["y"], "no line crosses the legend"


def test_the_comparison_shows_the_numbers_of_the_summaries(
    browser: Browser, pages: dict[str, Path], folders: list[Path]
) -> None:
    with open_reader(browser) as reader:
        reader.page.goto(pages["comparison"].as_uri())
        rows = reader.page.locator("section:has(h2:text-is('Runs')) tbody tr")
        expect(rows).to_have_count(2)
        scores = [json.loads((folder / "summary.json").read_text())["val_bpb"] for folder in folders]
        for row, score in zip(rows.all(), scores):
            assert f"{score:.4f}" in row.locator("td").all_text_contents()
        difference = f"{scores[1] - scores[0]:+.4f}".replace("-", "−")
        assert any(difference in cell for cell in rows.nth(1).locator("td").all_text_contents())
        assert sorted(count_points(reader.page, "Loss by tokens").values()) == [POINTS, POINTS]


@pytest.mark.parametrize("kind", ["run", "comparison", "study"])
def test_markup_and_bidi_characters_are_text(browser: Browser, pages: dict[str, Path], kind: str) -> None:
    with open_reader(browser) as reader:
        reader.page.goto(pages[kind].as_uri())
        shown = reader.page.locator("body").inner_text()
        assert "<b>" in shown or "</script>" in shown, "the hostile text is there"
        assert not {"\u202e", "\u202c"} & set(shown), "nothing reorders the text around it"
        if kind == "run":
            assert SHOWN in shown
        for foreign in ("b:text-is('bold')", "img", "body script:not(:last-of-type)"):
            expect(reader.page.locator(foreign)).to_have_count(0)
        reader.check_quiet(pages[kind].as_uri())


def test_a_chart_is_read_by_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    with open_reader(browser) as reader:
        reader.page.goto(pages["run"].as_uri())
        figure = reader.page.locator("figure:has(figcaption:text-is('Loss by clock'))")
        figure.locator("svg[data-chart]").focus()
        reader.page.keyboard.press("Home")
        expect(figure.locator(".reading")).to_contain_text("seconds of training")
        first = figure.locator(".reading").text_content()
        reader.page.keyboard.press("ArrowRight")
        assert figure.locator(".reading").text_content() != first


def test_the_shaded_text_is_read_by_keyboard_and_by_pointer(browser: Browser, pages: dict[str, Path]) -> None:
    with open_reader(browser) as reader:
        reader.page.goto(pages["run"].as_uri())
        section = reader.page.locator("section:has(.surprise)")
        section.locator(".surprise").focus()
        reader.page.keyboard.press("End")
        expect(section.locator(".reading")).to_have_text('" sea": 3.0 bits')
        reader.page.keyboard.press("ArrowLeft")
        expect(section.locator(".reading")).to_contain_text(": 9.5 bits")
        expect(section.locator(".chosen")).to_have_count(1)
        section.locator("[data-bits]").first.hover()
        expect(section.locator(".reading")).to_have_text('"The ": 1.0 bits')


@pytest.mark.parametrize("size", [DESK, PHONE, (320, 700)], ids=["desk", "phone", "small phone"])
def test_no_text_lies_upon_another(browser: Browser, tmp_path: Path, size: tuple[int, int]) -> None:
    """With names as `train` gives them."""
    names = ("sprint-20261118-091501-1a2b3c41", "sprint-20261118-101733-9f8e7d62")
    runs = [make_run(tmp_path / name, seed=n) for n, name in enumerate(names)]
    with open_reader(browser, size=size) as reader:
        reader.page.goto(write_pages(runs, tmp_path / "two.html").as_uri())
        reader.check_no_text_overlaps("figure")
        score = reader.page.locator("section:has(h2:text-is('Runs')) tbody td").first.bounding_box()
        assert score
        assert score["x"] + score["width"] <= size[0], "the score is in sight"
        reader.page.goto(write_pages(runs[:1], tmp_path / "one.html").as_uri())
        reader.check_no_text_overlaps("figure")


def test_scores_stay_in_sight_of_long_names(browser: Browser, tmp_path: Path) -> None:
    """And names of settings stay on their line where the names of five runs stand beside them."""
    long = make_run(tmp_path / ("x" * 200))
    runs = [make_run(tmp_path / f"sprint-20261118-09150{n}-1a2b3c41", f"optim.clip=0.{n}", seed=n) for n in range(1, 6)]
    with open_reader(browser) as reader:
        reader.page.goto(write_pages([long, runs[0]], tmp_path / "long.html").as_uri())
        score = reader.page.locator("section:has(h2:text-is('Runs')) tbody td").first.bounding_box()
        assert score
        assert score["x"] + score["width"] <= DESK[0]
        reader.page.goto(write_pages(runs, tmp_path / "five.html").as_uri())
        rows = reader.page.locator("section:has(h2:text-is('Settings that differ')) tbody tr")
        expect(rows).to_have_count(1)
        name = rows.locator("th").first.bounding_box()
        assert name
        assert name["height"] < 40, "a line"
        reader.check_fits()


def test_charts_of_a_row_begin_at_one_height(browser: Browser, pages: dict[str, Path]) -> None:
    """One of them has a legend, the others have none."""
    with open_reader(browser) as reader:
        reader.page.goto(pages["run"].as_uri())
        row = [f"figure:has(figcaption:text-is('{name}'))" for name in ("Learning rates", "Gradient norm", "Speed")]
        captions, charts = (
            {round(box["y"]) for one in row if (box := reader.page.locator(f"{one} {part}").first.bounding_box())}
            for part in ("figcaption", "svg[data-chart]")
        )
        assert len(captions) == 1, "they are a row"
        assert len(charts) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_pages_are_accessible_offline_and_quiet(
    browser: Browser, pages: dict[str, Path], scheme: str, size: tuple[int, int]
) -> None:
    for path in pages.values():
        with open_reader(browser, size=size, scheme=scheme) as reader:
            reader.page.context.set_offline(True)
            reader.page.goto(path.as_uri())
            reader.check_accessible()
            reader.check_fits()
            reader.check_quiet(path.as_uri())
