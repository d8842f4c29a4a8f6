"""Takes the pictures in docs/images: pages as a reader sees them, in light and dark, on a desk and on a phone.

    python docs/screenshots.py --run RUN --run RUN --study STUDY --model MODEL.pbk [--model MODEL.pbk ...]

The first run has a page of its own, and README shows two of its charts; all runs together make the comparison. Pictures
of pages that are not named stay as they are. Needs the extras dev and integrations, and Chromium.
"""

import argparse
import io
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from tests.integrations.browser import open_browser, open_reader  # noqa: E402

IMAGES = ROOT / "docs" / "images"
VIEWS = {"light": ((1120, 900), "light"), "dark": ((1120, 900), "dark"), "phone": ((390, 844), "dark")}
README = ("Validation by tokens", "Bits per byte, beside compressors")
README_SIZE = (880, 400)  # as wide as README is shown
KEEP = """names => {
  const charts = [...document.querySelectorAll("figure")]
  const kept = names.map(name => charts.find(chart => chart.querySelector("figcaption").textContent.startsWith(name)))
  kept.forEach(chart => chart.querySelector("details")?.remove())
  const grid = Object.assign(document.createElement("div"), {className: "grid-of", style: "grid-template-columns: 3fr 2fr"})
  grid.append(...kept)
  document.body.style.paddingBottom = "1rem"
  document.body.replaceChildren(grid)
}"""
COLOURS = 256  # of a picture: text and lines need few, and the file is a third
TEXT = """The sea was calm, and the ship made good speed towards the coast. The captain stood on the bridge with a cup of
coffee in his hand and looked at the horizon, where the first lights of the harbour could be seen. Most of the passengers
were asleep. In the dining room, a few of them were still playing cards, and the band had packed its instruments an hour
ago. Nobody on board had expected a quokka at the helm.""".replace("\n", " ")


def take(browser: Browser, name: str, url: str, prepare: Callable[[Page], None]) -> None:
    for view, (size, scheme) in VIEWS.items():
        with open_reader(browser, size=size, scheme=scheme) as reader:
            reader.page.goto(url)
            prepare(reader.page)
            save(reader.page.screenshot(), IMAGES / f"{name}-{view}.png")
            reader.check_quiet(url)


def take_charts(browser: Browser, url: str) -> None:
    """Charts of a run's page beside each other, without the rest of the page."""
    with open_reader(browser, size=README_SIZE) as reader:
        reader.page.goto(url)
        reader.page.evaluate(KEEP, README)
        save(reader.page.locator("body").screenshot(), IMAGES / "readme.png")
        reader.check_quiet(url)


def save(data: bytes, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    # This method keeps colours of few pixels, such as those of a marker; k-means makes those of many pixels exact.
    picture = picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


def use_playground(page: Page) -> None:
    page.wait_for_selector("body[data-ready]")
    page.fill("#prompt", "The history of the railway begins")
    page.fill("#tokens", "48")
    page.locator("#top-p").fill("0.9")
    page.click("#write .main")
    page.wait_for_selector("#write-status:has-text('tokens/s')")
    page.locator("#write-columns .token").nth(4).click()
    page.fill("#text", TEXT)
    page.click("#measure .main")
    page.wait_for_selector("#measure-status:has-text('Measured')")


def show(page: Page, place: str) -> None:
    page.locator(place).evaluate("one => scrollTo(0, one.getBoundingClientRect().top + scrollY - 16)")


def serve_models(browser: Browser, models: list[Path]) -> None:
    command = [sys.executable, "-m", "parbank", "serve", *map(str, models), "--port", "0", "--no-open"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[0]
        try:
            for name, place in (("write", "#write"), ("measure", "#measure")):

                def prepare(page: Page, place: str = place) -> None:
                    use_playground(page)
                    show(page, place)

                take(browser, f"playground-{name}", url, prepare)
        finally:
            process.terminate()


def write_page(folders: list[Path], out: Path) -> str:
    subprocess.run([sys.executable, "-m", "parbank", "report", *map(str, folders), "-o", str(out)], check=True)
    return out.as_uri()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("run", "study", "model"):
        parser.add_argument(f"--{name}", type=Path, action="append", default=[])
    given = parser.parse_args()
    with open_browser() as browser, tempfile.TemporaryDirectory() as folder:
        pages = {"run": given.run[:1], "comparison": given.run if len(given.run) > 1 else [], "study": given.study}
        for name, folders in pages.items():
            if folders:
                url = write_page(folders, Path(folder, f"{name}.html"))
                take(browser, name, url, lambda page: None)
                if name == "run":
                    take_charts(browser, url)
        if given.model:
            serve_models(browser, given.model)


if __name__ == "__main__":
    main()
