"""benchmarks/busy.py: shares are computed from medians, and other processes end with the measurement."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def busy(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("busy")


def found(*speeds: float) -> list[dict[str, Any]]:
    return [{"tokens_per_second": speed, "threads": {"cores": 2}} for speed in speeds]


def test_the_shares_are_those_of_the_medians(busy: ModuleType) -> None:
    alone = {busy.DEFAULTS: found(6000, 1, 6600), busy.OURS: found(5940, 5940, 0)}
    later = {busy.OURS: found(1600, 1500, 9000), busy.STEPS: found(1300), busy.DEFAULTS: found(100)}
    rows = {(row.case, row.provider): row for row in busy.make_rows(alone, later, {busy.OURS: found(1200)}, 4)}
    assert rows["alone", busy.DEFAULTS].value == 6000
    assert rows["beside 4 busy processes", busy.OURS].bound == 2000, "2 of 6 threads are ours"
    assert rows["lost alone", busy.OURS].value == pytest.approx(1.0)
    assert rows["of the fair share", busy.OURS].value == pytest.approx(80)
    assert rows["of the fair share", busy.DEFAULTS].value == pytest.approx(5)
    assert rows["of the fair share from the start", busy.OURS].value == pytest.approx(60)


def test_providers_take_turns_within_a_process(busy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(busy.time, "perf_counter", lambda: next(clock))
    one, two = SimpleNamespace(now=1), SimpleNamespace(now=1)
    trainer = SimpleNamespace(config=SimpleNamespace(batch=SimpleNamespace(batch_tokens=10)))
    turns, order = busy.Turns({"a": one, "b": two}, trainer), []
    for _ in range(9):
        order.append((turns.now, trainer.threads is turns.providers[turns.now]))
        turns.note(SimpleNamespace(seconds=0.5))
    assert order == [("a", True)] * 3 + [("b", True)] * 3 + [("a", True)] * 3
    assert (turns.tokens, turns.seconds) == ({"a": 60, "b": 30}, {"a": 3.0, "b": 1.5})


def test_busy_processes_end_with_the_measurement(busy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "SPIN", "import time; time.sleep(100)")
    started = []
    popen = busy.subprocess.Popen
    monkeypatch.setattr(busy.subprocess, "Popen", lambda command: started.append(popen(command)) or started[-1])
    with pytest.raises(KeyError), busy.busy(2):
        raise KeyError
    assert [process.poll() is not None for process in started] == [True, True]
