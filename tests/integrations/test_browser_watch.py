"""The page of a run that trains, in a real browser: it grows, and the reader's place stays."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from parbank.files import HOLDER
from parbank.serve.watch import Watched, WatchSite
from tests.faults.ranks import ROOT
from tests.integrations.browser import DESK, PHONE, WAIT_MS, open_browser, open_reader
from tests.report.folders import make_run
from tests.serve.site import open_app

expect.set_options(timeout=WAIT_MS)

COUNT_POINTS = "chart => JSON.parse(chart.dataset.chart).series[0].points.length"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as found:
        yield found


class Growing:
    """A run's folder that gains rows, and at last its summary."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder, self._whole = tmp_path / "growing", make_run(tmp_path / "whole")
        self.folder.mkdir()
        shutil.copy(self._whole / "config.json", self.folder)
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": "now"}
        (self.folder / HOLDER).write_text(json.dumps(about))

    def grow(self, rows: int) -> None:
        lines = (self._whole / "metrics.jsonl").read_text().splitlines(keepends=True)
        (self.folder / "metrics.jsonl").write_text("".join(lines[:rows]))

    def end(self) -> None:
        for name in ("details.json", "summary.json"):
            shutil.copy(self._whole / name, self.folder)
        (self.folder / HOLDER).unlink()


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_the_page_grows_and_the_readers_place_stays(browser: Browser, tmp_path: Path, size: tuple[int, int]) -> None:
    run = Growing(tmp_path)
    run.grow(20)
    site = WatchSite(Watched(run.folder))
    with open_app(site.make_app()) as address, open_reader(browser, size=size) as reader:
        page = reader.page
        page.goto(address.url)
        expect(page.locator("header")).to_contain_text("The run trains now.")
        loss = page.locator("figure:has(figcaption:text-is('Loss by clock')) svg[data-chart]")
        assert loss.evaluate(COUNT_POINTS) == 20
        reader.check_accessible()
        heading = page.locator("#training")  # at the end, the score comes before it
        heading.evaluate("one => one.scrollIntoView()")
        details = page.locator("main details").last
        details.locator("summary").first.click()
        heading.evaluate("one => one.scrollIntoView()")
        focused = page.locator("section:has(#training) svg[data-chart]").first
        focused.evaluate("one => one.focus({ preventScroll: true })")
        place = heading.evaluate("one => one.getBoundingClientRect().top")
        run.grow(40)
        page.wait_for_selector("svg[data-chart*='52.4']", state="attached")  # the clock of row 40
        assert loss.evaluate(COUNT_POINTS) == 40
        assert heading.evaluate("one => one.getBoundingClientRect().top") == pytest.approx(place, abs=1)
        assert details.evaluate("one => one.open")
        assert page.evaluate("document.activeElement.matches('svg[data-chart]')")
        expect(page.locator("#watch-when")).to_contain_text("the numbers changed at")
        run.grow(90)
        run.end()
        expect(page.locator("#watch-end")).to_have_text("The run has ended. The page stays as it is.")
        assert heading.evaluate("one => one.getBoundingClientRect().top") == pytest.approx(place, abs=1)
        expect(page.locator("header")).not_to_contain_text("trains now")
        summary = json.loads((run.folder / "summary.json").read_text())
        expect(page.locator("header .tiles")).to_contain_text(f"{summary['val_bpb']:.4f}")
        reader.check_accessible()
        reader.check_fits()
        reader.check_quiet(address.url)
        site.wait_for_the_end()


def test_pause_holds_the_page(browser: Browser, tmp_path: Path) -> None:
    run = Growing(tmp_path)
    run.grow(20)
    with open_app(WatchSite(Watched(run.folder)).make_app()) as address, open_reader(browser) as reader:
        page = reader.page
        page.goto(address.url)
        with page.expect_response(f"{address.url}page"):  # the page asks by itself
            pass
        page.check("#watch-pause")
        asked = len(reader.asked)
        run.grow(40)
        page.wait_for_timeout(5000)  # twice its pause: one request may have been under way
        assert len(reader.asked) <= asked + 1
        page.uncheck("#watch-pause")
        page.wait_for_selector("svg[data-chart*='52.4']", state="attached")
        reader.check_quiet(address.url)


def test_the_page_goes_on_after_the_way_to_the_server_was_cut(browser: Browser, tmp_path: Path) -> None:
    run = Growing(tmp_path)
    run.grow(20)
    with open_app(WatchSite(Watched(run.folder)).make_app()) as address, open_reader(browser) as reader:
        page = reader.page
        page.goto(address.url)
        page.context.set_offline(True)
        expect(page.locator("#watch-when")).to_contain_text("The server has not answered since")
        run.grow(40)
        page.context.set_offline(False)
        page.wait_for_selector("svg[data-chart*='52.4']", state="attached")
        expect(page.locator("#watch-when")).to_contain_text("the numbers changed at")


def test_train_live_shows_its_run_and_ends(browser: Browser, tmp_path: Path, text_spec: str) -> None:
    out, hold = tmp_path / "run", tmp_path / "hold"
    hold.write_text("step 1 ")  # the run does not end before the page is open
    command = [
        sys.executable,
        "-m",
        "tests.faults.held",
        str(hold),
        "train",
        "--recipe",
        "nano",
        "--data",
        text_spec,
        "--out",
        str(out),
        "--live",
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            url = ""
            for line in process.stdout:
                if found := re.search(r"watch +(http://\S+)", line):
                    url = found[1]
                    break
            assert url
            with open_reader(browser) as reader:
                reader.page.goto(url)
                hold.unlink()
                process.stdout.read()
                assert process.wait(timeout=WAIT_MS / 1000) == 0
                expect(reader.page.locator("#watch-end")).to_have_text("The run has ended. The page stays as it is.")
                summary = json.loads((out / "summary.json").read_text())
                expect(reader.page.locator("header .tiles")).to_contain_text(f"{summary['val_bpb']:.4f}")
                reader.check_quiet(url)
        finally:
            process.kill()
    port = int(url.rstrip("/").rpartition(":")[2])
    deadline = time.monotonic() + WAIT_MS / 1000
    while True:  # the server ends by itself
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except ConnectionRefusedError:
            break
        assert time.monotonic() < deadline
        time.sleep(0.2)
