"""The playground in a real browser: it streams, colours and measures, and survives what people do to a page."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from parbank.serve.player import Player
from parbank.serve.worker import Item
from tests.faults.ranks import ROOT
from tests.integrations.browser import DESK, PHONE, WAIT_MS, Reader, open_browser, open_reader, read_bits
from tests.serve.site import ARTIFACT, Site, load_player, open_site

HOSTILE = "</script><b>bold</b><img src=x onerror=alert(1)>\u202edlrow\u202c &amp; {{x}}"
LEVELS = (1, 2, 4, 7, 11)
SECONDS = WAIT_MS / 1000

expect.set_options(timeout=WAIT_MS)


class Slow(Player):
    """Writes until its reader leaves."""

    def write(self, prompt: str, **settings: Any) -> Iterator[Item]:
        choice = {"token": 1, "text": "go ", "take": "go ", "probability": 0.5, "chance": 0.5}
        other = {"token": 2, "text": HOSTILE, "take": HOSTILE, "probability": 0.25, "chance": 0.25}
        while True:
            time.sleep(0.02)
            yield {**choice, "likeliest": [choice, other]}


ENDLESS = """
from parbank.cli.main import main
from parbank.serve.player import Player
from tests.integrations.test_browser_playground import Slow
Player.write = Slow.write
main()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def player() -> Player:
    return load_player()


@pytest.fixture(scope="module")
def site(player: Player) -> Iterator[Site]:
    with open_site([player, Slow(HOSTILE, player.model)], most=8) as found:
        yield found


@pytest.fixture
def reader(browser: Browser, site: Site) -> Iterator[Reader]:
    with open_reader(browser) as found:
        visit(found.page, site)
        yield found
        found.check_quiet(site.address.url)


def visit(page: Page, site: Site, *, models: tuple[int, ...] = (0,)) -> None:
    """Opens the page and shows these models."""
    page.goto(site.address.url)
    page.wait_for_selector("body[data-ready]")
    for index in sorted((0, 1), key=lambda index: index not in models):  # one model is always shown
        page.set_checked(f"#model-{index}", index in models)


def write(page: Page, prompt: str, *, tokens: int = 40, temperature: float = 0.0) -> None:
    page.fill("#prompt", prompt)
    page.fill("#tokens", str(tokens))
    set_slider(page, "#temperature", temperature)
    page.click("#write .main")


def set_slider(page: Page, slider: str, value: float) -> None:
    page.locator(slider).fill(str(value))


def paste(page: Page, box: str, text: str) -> None:
    """As from the clipboard."""
    page.locator(box).evaluate(
        """(box, text) => {
            const clipboardData = new DataTransfer();
            clipboardData.setData("text/plain", text);
            box.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
        }""",
        text,
    )
    assert page.locator(box).evaluate("box => box.value.length") == len(text)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def written(page: Page, column: int = 0) -> str:
    return page.locator("#write-columns pre").nth(column).text_content() or ""


def test_a_continuation_streams_in_with_its_alternatives(reader: Reader, player: Player) -> None:
    page = reader.page
    expect(page.locator("#write-columns .before").first).to_have_text("Nothing written yet.")
    write(page, "The sea", tokens=40)
    expect(page.locator("#write-columns .before").first).to_have_text("The sea")
    expect(page.locator("#write-status")).to_contain_text("tokens/s")
    assert written(page) == player.model.sample("The sea", tokens=40, temperature=0.0)
    tokens = page.locator("#write-columns .tokens").first
    tokens.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(tokens.locator("[aria-selected=true]")).to_have_count(1)
    table = page.locator("#write-columns table").first
    expect(table.locator("tbody tr")).to_have_count(10)
    chances = [float(cell.rstrip("%")) for cell in table.locator("tbody tr td:nth-child(2)").all_text_contents()]
    assert chances == sorted(chances, reverse=True)
    assert sum(chances) <= 100.1
    expect(table.locator("tr.taken")).to_have_count(1)
    expect(table.locator("tr.taken td").nth(1)).to_have_text("100.0%")  # at temperature 0


def test_the_text_comes_piece_by_piece(reader: Reader, site: Site) -> None:
    page = reader.page
    visit(page, site, models=(1,))
    write(page, "x")
    options = page.locator("#write-columns .token")
    expect(options.nth(5)).to_be_attached()
    first = options.count()
    expect(options.nth(first + 5)).to_be_attached()
    expect(page.locator("#write-stop")).to_be_enabled()
    page.click("#write-stop")
    expect(page.locator("#write-status")).to_contain_text("Stopped after")
    wait_until(lambda: site.worker.active == 0)


def test_another_token_is_taken(reader: Reader, player: Player) -> None:
    page = reader.page
    write(page, "The sea", tokens=4)
    expect(page.locator("#write-status")).to_contain_text("tokens/s")
    page.locator("#write-columns .token").first.click()
    page.locator("#write-columns tbody button").first.click()
    expect(page.locator("#prompt")).to_be_focused()
    prompt = page.input_value("#prompt")
    assert prompt.startswith("The sea")
    assert len(prompt) > len("The sea")
    expect(page.locator("#write-status")).to_contain_text("tokens/s")
    assert written(page) == player.model.sample(prompt, tokens=4, temperature=0.0)


def test_the_keyboard_is_enough(reader: Reader) -> None:
    page = reader.page
    page.focus("#prompt")
    order = []
    for _ in range(7):
        order.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
        page.keyboard.press("Tab")
    assert order == ["prompt", "temperature", "top-p", "tokens", "seed", "Continue", "while-typing"]
    page.focus("#temperature")
    before = float(page.input_value("#temperature"))
    page.keyboard.press("ArrowRight")
    assert float(page.input_value("#temperature")) == pytest.approx(before + 0.05)
    expect(page.locator("#temperature-value")).to_have_text(f"{before + 0.05:.2f}")
    page.fill("#tokens", "3")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#write-status")).to_contain_text("tokens/s")


def test_escape_stops_from_anywhere_in_the_section(reader: Reader, site: Site) -> None:
    page = reader.page
    visit(page, site, models=(1,))
    page.fill("#prompt", "x")
    page.focus("#write .main")
    page.keyboard.press("Enter")
    expect(page.locator("#write-columns .token").nth(3)).to_be_attached()
    page.keyboard.press("Escape")
    expect(page.locator("#write-status")).to_contain_text("Stopped after")
    wait_until(lambda: site.worker.active == 0)


def test_a_token_that_is_no_text_cannot_be_taken(reader: Reader, site: Site) -> None:
    page = reader.page
    choice = {"token": 1, "text": "é", "take": "é", "probability": 0.5, "chance": 0.5}
    part = {"token": 2, "text": "<E2>", "take": None, "probability": 0.3, "chance": 0.3}
    other = {"token": 3, "text": "<98>", "take": "€", "probability": 0.2, "chance": 0.2}
    lines = [choice | {"likeliest": [choice, part, other]}, {"end": "length", "text": "", "tokens": 1, "seconds": 1}]
    page.route("**/api/continue", lambda route: route.fulfill(body="".join(json.dumps(line) + "\n" for line in lines)))
    write(page, "caf")
    rows = page.locator("#write-columns tbody tr")
    expect(rows).to_have_count(3)
    assert [row.locator("button").count() for row in rows.all()] == [0, 0, 1]
    rows.nth(2).locator("button").click()
    assert page.input_value("#prompt") == "caf€"


def test_three_models_stand_side_by_side(browser: Browser, player: Player) -> None:
    players = [Player(name, player.model) for name in ("one", "two", "three")]
    with open_site(players, most=8) as site, open_reader(browser, size=(1280, 900)) as reader:
        reader.page.goto(site.address.url)
        reader.page.wait_for_selector("body[data-ready]")
        for columns in ("#write-columns", "#measure-columns"):
            tops = [column.bounding_box() for column in reader.page.locator(f"{columns} article").all()]
            assert len({box["y"] for box in tops if box}) == 1
            assert len({box["x"] for box in tops if box}) == 3


def test_without_a_script_the_page_says_what_to_do(browser: Browser, site: Site) -> None:
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(site.address.url)
    shown = page.locator("body").inner_text()
    assert "This page needs JavaScript" in shown
    assert "Loading" not in shown
    page.context.close()


def test_typing_continues_only_where_that_was_asked_for(reader: Reader) -> None:
    page = reader.page
    page.fill("#tokens", "3")
    page.check("#while-typing")
    page.focus("#prompt")
    page.keyboard.type(" abc")
    expect(page.locator("#write-status")).to_contain_text("tokens/s")


def test_a_text_is_coloured_by_its_bits(reader: Reader, player: Player) -> None:
    page, text = reader.page, "The sea was calm. — ☃\n" * 4
    page.fill("#text", text)
    page.click("#measure .main")
    expect(page.locator("#measure-status")).to_contain_text("Measured in")
    tokens = page.locator("#measure-columns .token").all()
    seen = set()
    for token in tokens:
        bits = read_bits(token.get_attribute("aria-label") or "")
        level = int((token.get_attribute("class") or "").split(" l")[1])
        seen.add(level)
        edges = (0, *LEVELS, 1e9)
        assert edges[level] - 0.051 <= bits < edges[level + 1] + 0.051
    assert len(seen) >= 2
    low, high = (page.locator(f"#legend .l{level}") for level in (0, 5))
    looks = "one => [getComputedStyle(one).backgroundColor, getComputedStyle(one).textDecorationLine]"
    assert low.evaluate(looks)[0] != high.evaluate(looks)[0]
    assert low.evaluate(looks)[1] != high.evaluate(looks)[1], "not by colour alone"
    score = player.model.score(text.encode(), method="streaming")
    rows = dict(
        (row.locator("th").text_content(), row.locator("td").first.text_content())
        for row in page.locator("#result tbody tr").all()
    )
    assert list(rows) == ["v2", "zlib -9", "xz -9", "zstd -19"]
    assert float(rows["v2"] or "") == pytest.approx(score.bpb, abs=1e-3)
    page.locator("#measure-columns .tokens").first.focus()
    page.keyboard.press("End")
    expect(page.locator("#measure-columns .detail").first).to_contain_text(" bits, probability ")


def test_markup_and_bidi_characters_are_text(reader: Reader, site: Site) -> None:
    page = reader.page
    visit(page, site, models=(0, 1))
    write(page, HOSTILE)
    expect(page.locator("#write-columns .token").nth(3)).to_be_attached()
    page.click("#write-stop")
    page.fill("#text", HOSTILE)
    page.click("#measure .main")
    expect(page.locator("#measure-status")).to_contain_text("Measured in")
    shown = "".join(page.locator("#measure-columns .tokens").first.locator(".token").all_text_contents())
    assert shown == HOSTILE.replace("\u202e", "\\u202e").replace("\u202c", "\\u202c")
    coded = HOSTILE.replace("\u202e", "\\u202e").replace("\u202c", "\\u202c")
    for names in ("#write-columns h3", "#measure-columns h3", "#result tbody th"):
        assert coded in page.locator(names).all_text_contents()
    expect(page.locator("#write-status")).to_contain_text(coded)
    whole = page.locator("body").inner_text() + page.title()
    whole += "".join(page.locator("[aria-label]").evaluate_all("all => all.map(one => one.ariaLabel)"))
    assert not {"\u202e", "\u202c"} & set(whole), "nothing reorders the text around it"
    assert "<b>bold</b>" in (page.locator("#write-columns table").nth(1).text_content() or "")
    for foreign in ("main b", "main img", "main script"):
        expect(page.locator(foreign)).to_have_count(0)


def test_a_reload_in_the_middle(reader: Reader, site: Site) -> None:
    page = reader.page
    visit(page, site, models=(1,))
    write(page, "kept prompt", temperature=0.5)
    options = page.locator("#write-columns article:not([hidden]) .token")
    expect(options.nth(8)).to_be_attached()
    page.reload()
    page.wait_for_selector("body[data-ready]")
    wait_until(lambda: site.worker.active == 0)
    assert page.input_value("#prompt") == "kept prompt"
    assert float(page.input_value("#temperature")) == 0.5
    assert options.count() >= 9
    expect(page.locator("#write-status")).to_have_text("Stopped when the page was left.")
    visit(page, site)
    write(page, "again", tokens=3)
    expect(page.locator("#write-status")).to_contain_text("tokens/s")


def test_three_clients_at_once(browser: Browser, site: Site, player: Player) -> None:
    prompts = ("The sea", "def main(", "Once")
    readers = [open_reader(browser) for _ in prompts]
    opened = [one.__enter__() for one in readers]
    try:
        for one in opened:
            visit(one.page, site)
        for one, prompt in zip(opened, prompts):
            write(one.page, prompt, tokens=60)
        for one, prompt in zip(opened, prompts):
            expect(one.page.locator("#write-status")).to_contain_text("tokens/s")
            assert written(one.page) == player.model.sample(prompt, tokens=60, temperature=0.0)
            one.check_quiet(site.address.url)
    finally:
        for one in readers:
            one.__exit__(None, None, None)


def test_a_closed_tab_ends_its_work(browser: Browser, site: Site) -> None:
    with open_reader(browser) as reader:
        visit(reader.page, site, models=(1,))
        write(reader.page, "x")
        expect(reader.page.locator("#write-columns .token").nth(3)).to_be_attached()
        wait_until(lambda: site.worker.active == 1)
    wait_until(lambda: site.worker.active == 0)


def test_a_paste_of_a_megabyte(reader: Reader) -> None:
    page, line = reader.page, "The sea was calm, and the ship made good speed towards the coast.\n"
    text = (line * (1_000_000 // len(line) + 1))[:1_000_000]
    paste(page, "#text", text)
    page.click("#measure .main")
    expect(page.locator("#measure-columns .token").nth(100)).to_be_attached()  # long before the end
    expect(page.locator("#measure-status")).to_contain_text("Measured in", timeout=3 * WAIT_MS)
    expect(page.locator("#measure-columns .facts").first).to_contain_text("1,000,000 bytes")
    options = page.locator("#measure-columns .tokens").first.locator(".token")
    expect(options).to_have_count(2000)
    page.click("#measure-columns button:has-text('Next')")
    expect(page.locator("#measure-columns .pager").first).to_contain_text("Pieces 2,001 to 4,000 of")
    page.fill("#text", "short")
    page.click("#measure .main")
    expect(page.locator("#measure-columns .facts").first).to_contain_text("5 bytes")


def test_a_prompt_of_a_megabyte_keeps_nobody_waiting(browser: Browser, reader: Reader, site: Site) -> None:
    page, line = reader.page, "The sea was calm, and the ship made good speed towards the coast.\n"
    page.fill("#tokens", "3")
    page.fill("#prompt", "")
    paste(page, "#prompt", line * (1_000_000 // len(line)))
    page.click("#write .main")
    with open_reader(browser) as other:
        visit(other.page, site)
        write(other.page, "The sea", tokens=3)
        expect(other.page.locator("#write-status")).to_contain_text("tokens/s", timeout=10_000)
    expect(page.locator("#write-status")).to_contain_text("tokens/s", timeout=20_000)


def test_too_much_text_is_refused_in_words(reader: Reader) -> None:
    paste(reader.page, "#text", "x" * 2_000_001)
    reader.page.click("#measure .main")
    expect(reader.page.locator("#measure-status")).to_contain_text("2,000,000 are the most")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_the_page_is_accessible(browser: Browser, site: Site, scheme: str, size: tuple[int, int]) -> None:
    with open_reader(browser, size=size, scheme=scheme) as reader:
        visit(reader.page, site, models=(0, 1))
        reader.check_accessible()
        write(reader.page, "The sea")
        expect(reader.page.locator("#write-columns article").nth(1).locator(".token").nth(3)).to_be_attached()
        reader.page.click("#write-stop")
        reader.page.fill("#text", "The sea was calm.\n" * 40)
        reader.page.click("#measure .main")
        expect(reader.page.locator("#measure-status")).to_contain_text("Measured in")
        reader.page.locator("#measure-columns .token").first.click()
        reader.check_accessible()
        reader.check_fits()
        reader.check_quiet(site.address.url)


def test_ctrl_c_ends_the_command_while_a_page_streams(browser: Browser) -> None:
    """The command itself, with a model that does not come to an end before the signal."""
    command = [sys.executable, "-c", ENDLESS, "serve", str(ARTIFACT), "--port", "0", "--no-open"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"http://\S+", process.stderr.readline())
            assert found
            with open_reader(browser) as reader:
                reader.page.goto(found[0])
                reader.page.wait_for_selector("body[data-ready]")
                write(reader.page, "The sea", tokens=2000)
                expect(reader.page.locator("#write-columns .token").nth(3)).to_be_attached()
                process.send_signal(signal.SIGINT)
                assert process.wait(timeout=SECONDS) == 0
                expect(reader.page.locator("#write-stop")).to_be_disabled()
                expect(reader.page.locator("#write-status")).to_contain_text("server")
            assert process.stderr.read() == ""
        finally:
            process.kill()
