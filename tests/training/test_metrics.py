"""What a run says while it runs: rows that survive a kill, and a display that knows where it is shown."""

import io
import json
import math
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from parbank.training.metrics import Display, MetricsWriter, format_seconds, memory_bytes


def row(step: int, loss: float = 1.0) -> dict[str, Any]:
    return {"step": step, "loss": loss, "tokens": 512 * step}


def rows(out: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in (out / "metrics.jsonl").read_text().splitlines()]


def events(out: Path, name: str) -> list[tuple[int, float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside tensorboard
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(out / "tensorboard")).Reload()
        return [(event.step, event.value) for event in found.Scalars(name)]


def test_rows_are_on_disk_as_soon_as_they_are_written(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in (1, 5, 10):
        writer.write(row(step, loss=step / 2))
        assert rows(tmp_path)[-1] == row(step, loss=step / 2)
    writer.close()
    assert events(tmp_path, "loss") == [(1, 0.5), (5, 2.5), (10, 5.0)]
    assert events(tmp_path, "tokens") == [(1, 512.0), (5, 2560.0), (10, 5120.0)]


def test_a_loss_that_is_no_number_is_null(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(row(1))
    writer.write(row(2, loss=math.nan))
    writer.write(row(3, loss=math.inf))
    writer.close()
    assert [r["loss"] for r in rows(tmp_path)] == [1.0, None, None]
    assert events(tmp_path, "loss") == [(1, 1.0)]
    assert len(events(tmp_path, "tokens")) == 3


def test_a_resumed_run_drops_what_its_checkpoint_never_saw(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in (1, 5, 10, 15):
        writer.write(row(step))
    writer.close()
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('7\n"text"\n{"loss": 1}\n{"step": "x"}\n{"step": 20, "lo')  # what a kill or an editor may leave
    time.sleep(1.1)  # TensorBoard reads its files in the order of their names, which hold the second they were made in
    writer = MetricsWriter(tmp_path, resume_step=10)
    assert [r["step"] for r in rows(tmp_path)] == [1, 5, 10]
    for step in (11, 15):
        writer.write(row(step, loss=9.0))
    writer.close()
    assert [r["step"] for r in rows(tmp_path)] == [1, 5, 10, 11, 15]
    assert events(tmp_path, "loss") == [(1, 1.0), (5, 1.0), (10, 1.0), (11, 9.0), (15, 9.0)]


def test_a_folder_used_again_from_the_start_forgets_the_first_attempt(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        writer = MetricsWriter(tmp_path)
        writer.write(row(1, loss))
        writer.close()
    assert rows(tmp_path) == [row(1, 2.0)]
    assert events(tmp_path, "loss") == [(1, 2.0)]


def test_memory_is_of_this_process() -> None:
    assert 2**26 < memory_bytes(torch.device("cpu")) < 2**40


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
    monkeypatch.setattr("parbank.training.metrics._SECONDS_BETWEEN_LINES", 0.0)
    stream = io.StringIO()
    with Display(file=stream).progress("scoring") as move:
        move(0.25)
        move(1.0)
    assert stream.getvalue().splitlines() == ["scoring", "scoring: 25%", "scoring: 100%"]


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
    reader.join(timeout=10)
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
    assert capfd.readouterr().err == "nobody reads the output any more; the run goes on\n"
