"""What the person who watches a run sees: a display that knows where it is shown."""

import io
import os
import threading
import time

import pytest

from parbank.display import Display, format_seconds


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3725, "62:05")])
def test_seconds_read_as_a_clock(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def show(display: Display) -> None:
    display.say("preparing [bold]text[/bold]")
    display.start("training")
    display.update(0.25, "step 1  loss 2.0", line=True)
    display.update(0.5, "step 2  loss 1.9")
    time.sleep(0.4)  # one refresh of the bar
    display.stop()
    with display.progress("scoring") as move:
        move(0.5)
    display.say("done")


def test_piped_output_is_plain_lines() -> None:
    stream = io.StringIO()
    show(Display(file=stream))
    assert stream.getvalue().splitlines() == [
        "preparing [bold]text[/bold]",
        "step 1  loss 2.0",
        "scoring",
        "done",
    ]


def test_other_ranks_are_silent() -> None:
    stream = io.StringIO()
    show(Display(enabled=False, file=stream))
    assert stream.getvalue() == ""


def test_long_work_says_how_far_it_is_when_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parbank.display._SECONDS_BETWEEN_LINES", 0.0)
    stream = io.StringIO()
    with Display(file=stream).progress("scoring") as move:
        move(0.25)
        move(1.0)
    assert stream.getvalue().splitlines() == ["scoring", "scoring: 25%, 0:00 left", "scoring: 100%, 0:00 left"]


def test_a_terminal_gets_a_bar_with_share_time_and_status(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "100")):
        monkeypatch.setenv(name, value)
    ours, theirs = os.openpty()
    shown = bytearray()

    def read() -> None:
        while True:
            try:
                block = os.read(ours, 4096)
            except OSError:  # the other end is closed
                return
            if not block:
                return
            shown.extend(block)

    reader = threading.Thread(target=read)
    reader.start()
    with open(theirs, "w", encoding="utf-8") as terminal:
        show(Display(file=terminal))
    reader.join(timeout=60)
    os.close(ours)
    text = shown.decode()
    for part in (
        "training",
        "━",
        "50%",
        "0:00:00",
        "step 2  loss 1.9",
        "scoring",
        "preparing [bold]text[/bold]",
        "done",
    ):
        assert part in text, part
    assert "\x1b[?25h" in text, "the cursor is shown again"


def test_a_reader_who_leaves_does_not_end_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as file:
        display = Display(file=file)
        display.say("somebody reads this")
        os.close(read)
        for _ in range(3):
            display.say("nobody reads this")
        display.update(0.5, "nor this", line=True)
    assert (
        capfd.readouterr().err == "the output cannot be written any more ([Errno 32] Broken pipe); the run continues\n"
    )
