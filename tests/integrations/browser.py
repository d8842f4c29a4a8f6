"""A real browser for tests of pages: the system's Chromium, driven by Playwright, without any download."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_MS = 120_000
"""The longest that a test waits for a condition: the machine may be busy with other tests."""
PHONE, DESK = (390, 844), (1280, 900)
OVERLAPS = """inside => [...document.querySelectorAll(inside)].flatMap(part => {
  const all = [...part.querySelectorAll("text, span, figcaption, li")]
  const texts = all.filter(one => one.textContent.trim() && !one.matches(".aside"))
  const boxes = texts.map(one => one.getBoundingClientRect()).map(b => [b.left + 1, b.right - 1, b.top + 3, b.bottom - 3])
  const found = []
  texts.forEach((one, a) => texts.forEach((other, b) => {
    if (a >= b || one.contains(other) || other.contains(one)) return
    const [p, q] = [boxes[a], boxes[b]]
    if (p[0] < q[1] && q[0] < p[1] && p[2] < q[3] && q[2] < p[3]) found.push([one.textContent, other.textContent])
  }))
  return found
})"""


@contextmanager
def open_browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.fail("there is no Chromium on this machine; `make browser` installs it, or: apt-get install chromium")
    with sync_playwright() as playwright:
        # Chromium's sandbox needs rights that containers lack, and these pages are our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Reader:
    """A page, and all it has said and asked for."""

    page: Page
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def check_quiet(self, *allowed: str) -> None:
        """No error, no warning, and no request but to the allowed addresses."""
        assert self.said == []
        assert [url for url in self.asked if not url.startswith((*allowed, "data:"))] == []

    def check_accessible(self) -> None:
        """axe-core finds nothing, also in what a reader opens."""
        closed = self.page.evaluate_handle("() => [...document.querySelectorAll('details:not([open])')]")
        closed.evaluate("all => all.forEach((one) => { one.open = true; })")
        found = Axe().run(self.page).response
        closed.evaluate("all => all.forEach((one) => { one.open = false; })")
        assert len(found["passes"]) > 10, "axe has run"
        bad = [
            f"{one['impact']}: {one['id']}: {[node['html'][:200] for node in one['nodes'][:3]]}"
            for one in found["violations"]
        ]
        assert bad == []

    def check_no_text_overlaps(self, inside: str) -> None:
        """No two texts within elements that match a selector lie upon each other."""
        assert self.page.locator(inside).count()
        assert self.page.evaluate(OVERLAPS, inside) == []

    def check_fits(self) -> None:
        """The page does not scroll sideways."""
        wide = self.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert wide[0] <= wide[1]


@contextmanager
def open_reader(browser: Browser, *, size: tuple[int, int] = DESK, scheme: str = "light") -> Iterator[Reader]:
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    context.set_default_timeout(WAIT_MS)
    try:
        reader = Reader(context.new_page())

        def hear(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                reader.said.append(message.text)

        def note(request: Request) -> None:
            reader.asked.append(request.url)

        reader.page.on("console", hear)
        reader.page.on("pageerror", lambda error: reader.said.append(str(error)))
        reader.page.on("request", note)
        yield reader
    finally:
        context.close()


def read_bits(label: str) -> float:
    """The bits in the name of a token, such as "The, 5.7 bits"."""
    found = re.search(r", ([\d,.]+) bits$", label)
    assert found, label
    return float(found[1].replace(",", ""))
