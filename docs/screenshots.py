"""Takes the pictures in docs/images: pages as a reader sees them, in light and dark, on a desk and on a phone.

    python docs/screenshots.py --run RUN --run RUN --study STUDY --model MODEL.pbk [--model MODEL.pbk ...]

The first run has a page of its own, and README shows two of its charts; it is also watched as if it were in the middle of
its training. All runs together make the comparison, and all models stand side by side. Pictures of pages that are not named
stay as they are. Needs the extras dev and integrations, and Chromium.
"""

import argparse
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from parbank.files import HOLDER  # noqa: E402
from tests.integrations.browser import open_browser, open_reader  # noqa: E402

IMAGES = ROOT / "docs" / "images"
VIEWS = {"light": ((1120, 940), "light"), "dark": ((1120, 940), "dark"), "phone": ((390, 844), "dark")}
TALL = {"playground-write": 1120}  # pictures that need more height, of a desk
README = ("Validation by tokens", "Bits per byte, beside compressors")
README_SIZE = (880, 400)  # as wide as README is shown
RUN_PARTS = {"run": "body", "bytes": "#where-the-bytes-went", "time": "#time", "samples": "#samples"}
"""Pictures of a run's page: from where each begins."""
KEEP = """names => {
  const charts = [...document.querySelectorAll("figure")]
  const kept = names.map(name => charts.find(chart => chart.querySelector("figcaption").textContent.startsWith(name)))
  kept.forEach(chart => chart.querySelectorAll("details, .reading").forEach(one => one.remove()))
  const grid = Object.assign(document.createElement("div"), {className: "grid-of", style: "grid-template-columns: 3fr 2fr"})
  grid.append(...kept)
  document.body.style.paddingBottom = "1rem"
  document.body.replaceChildren(grid)
}"""
COLOURS = 256  # of a picture: text and lines need few, and the file is a third
PROMPT = "def read_lines(path):\n"
TEXT = '''class Ferry:
    """A ship that carries cars from one harbour to another."""

    def __init__(self, name, places=40):
        self.name = name
        self.places = places
        self.cars = []

    def load(self, car):
        if len(self.cars) >= self.places:
            raise ValueError("the ferry is full")
        self.cars.append(car)

    def quokka(self):
        return None
'''


def take(
    browser: Browser, url: str, pictures: Mapping[str, str], prepare: Callable[[Page], None] | None = None
) -> None:
    """Pictures of a page, {name: the element at their top}, in every view."""
    for view, (size, scheme) in VIEWS.items():
        with open_reader(browser, size=size, scheme=scheme) as reader:
            reader.page.goto(url)
            if prepare is not None:
                prepare(reader.page)
            for name, place in pictures.items():
                tall = TALL.get(name, size[1]) if view != "phone" else size[1]
                reader.page.set_viewport_size({"width": size[0], "height": tall})
                show(reader.page, place)
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
    page.fill("#prompt", PROMPT)
    page.fill("#tokens", "64")
    page.locator("#temperature").fill("0.6")
    page.locator("#top-p").fill("0.9")
    page.click("#write .main")
    page.wait_for_selector("#write-status:has-text('tokens/s')")
    for tokens in page.locator("#write-columns .tokens").all():
        tokens.locator(".token").nth(4).click()
    page.fill("#text", TEXT)
    page.click("#measure .main")
    page.wait_for_selector("#measure-status:has-text('Measured')")


def show(page: Page, place: str) -> None:
    page.locator(place).first.evaluate("one => scrollTo(0, one.getBoundingClientRect().top + scrollY - 16)")


@contextmanager
def served(*words: str) -> Iterator[str]:
    """The address that a command of parbank serves."""
    command = [sys.executable, "-m", "parbank", *words, "--port", "0", "--no-open"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield process.stderr.readline().split()[0]
        finally:
            process.terminate()


def halve(run: Path, out: Path) -> Path:
    """The run's folder in the middle of its training, held by this process."""
    out.mkdir()
    shutil.copy(run / "config.json", out)
    known = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    details = json.loads((run / "details.json").read_text(encoding="utf-8"))
    start = {name: known[name] for name in ("params", "device", "world_size", "versions")}
    start |= {name: details[name] for name in ("machine", "commit")} | {"started_at": details["ended_at"]}
    (out / "details.json").write_text(json.dumps(start), encoding="utf-8")
    rows = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(rows[: len(rows) // 2]), encoding="utf-8")
    (out / HOLDER).write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}), encoding="utf-8")
    return out


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
                take(browser, url, RUN_PARTS if name == "run" else {name: "body"})
                if name == "run":
                    take_charts(browser, url)
        if given.run:
            with served("watch", str(halve(given.run[0], Path(folder, given.run[0].name)))) as url:
                take(browser, url, {"watch": "body"})
        if given.model:
            with served("serve", *map(str, given.model)) as url:
                parts = {"playground-write": "#write-title", "playground-measure": "#measure-title"}
                take(browser, url, parts, use_playground)


if __name__ == "__main__":
    main()
