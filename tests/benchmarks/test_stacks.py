"""benchmarks/stacks.py: every thread's places, with their seconds."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def stacks(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("stacks")


def wait_here(over: threading.Event) -> None:
    over.wait()


def test_every_thread_is_seen_with_its_seconds(stacks: ModuleType, tmp_path: Path) -> None:
    sampler = stacks.Sampler()
    over = threading.Event()
    other = threading.Thread(target=wait_here, args=(over,), name="beside")
    other.start()
    end = time.monotonic() + 60
    while not any(span.thread == "beside" and span.end - span.begin > 0.2 for span in sampler.spans):
        assert time.monotonic() < end, "the thread is not seen"
        time.sleep(0.01)
    over.set()
    other.join()
    sampler.close()
    stacks.write(sampler.spans, tmp_path / "stacks.txt")
    spans = stacks.read(tmp_path / "stacks.txt")
    span = max((one for one in spans if one.thread == "beside"), key=lambda one: one.end - one.begin)
    assert "wait_here" in span.stack
    assert 0.198 < span.end - span.begin < 60  # the file has milliseconds, so 0.2 may lose one
    assert "MainThread" in {span.thread for span in spans}
    assert "sampler" not in {span.thread for span in spans}


def test_short_stays_are_left_out(stacks: ModuleType) -> None:
    ours, other = "parbank/a.py:f:1", "torch/b.py:g:2"
    spans = [
        stacks.Span(0.0, 1.0, "main", f"{ours};{other}"),
        stacks.Span(1.0, 1.5, "main", f"{ours};{other}"),
        stacks.Span(1.5, 1.51, "main", other),
    ]
    assert list(stacks.describe(spans, 0.05)) == ["main", f"     0.00     1.50 s  {ours} > {other}"]
