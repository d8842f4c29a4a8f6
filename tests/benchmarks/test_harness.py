"""A time that contains a compilation is no result: the provider, the row or the whole benchmark fails."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from parbank.training import compiled


@pytest.fixture
def harness(benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The harness with a clock of its own: a call takes as many milliseconds as it returns."""
    module = benchmark("harness")
    monkeypatch.setattr(compiled, "_kernels", {True: 0, False: 3})  # three were built before
    cuda = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(module, "torch", SimpleNamespace(empty=lambda *_, **__: None, int8=None, cuda=cuda))
    monkeypatch.setattr(module, "bound_ms", lambda flops, bytes_: 0.0)

    def time(call: Callable[[], Any], flush: None) -> tuple[Any, None]:
        took = call()
        return SimpleNamespace(elapsed_time=lambda end: took), None

    monkeypatch.setattr(module, "_time", time)
    return module


def _compile(after: int) -> Callable[[], float]:
    """A call of 2 ms that builds a kernel at its n-th time."""
    calls = 0

    def call() -> float:
        nonlocal calls
        calls += 1
        compiled._kernels[False] += calls == after
        return 2.0

    return call


def test_a_provider_that_compiles_while_it_is_timed_fails_alone(harness: ModuleType) -> None:
    settings = harness.Settings(quick=True)
    providers = {
        "warm": lambda: lambda: 1.0,
        "compiles first": lambda: _compile(after=1),
        "compiles again": lambda: _compile(after=settings.warmup + 2),
    }
    rows = {row.provider: row for row in harness.run_case(harness.Case("op", "case", providers), settings)}
    assert (rows["warm"].value, rows["warm"].note) == (1.0, "")
    assert (rows["compiles first"].value, rows["compiles first"].note) == (2.0, ""), "in its warm-up"
    assert rows["compiles again"].value is None
    assert rows["compiles again"].note == "Recompiled: 1 kernels or graphs were compiled while it was timed"


def test_a_time_alone_is_refused(harness: ModuleType) -> None:
    settings = harness.Settings(quick=True)
    assert harness.measure(_compile(after=1), settings=settings) == 2.0
    with pytest.raises(harness.Recompiled, match="1 kernels or graphs"):
        harness.measure(_compile(after=settings.warmup + settings.repeats), settings=settings)


def test_a_run_that_compiled_while_its_clock_ran_is_no_result(
    benchmark: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    quality = benchmark("quality")
    summary = {"recompilations": 0, "data_wait_seconds": 0.5, "train_seconds": 2.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "command_seconds.json").write_text("4.0")
    (tmp_path / "metrics.jsonl").write_text("")
    assert quality.train("nano", "stdlib", 7, tmp_path, [])["data_wait_share"] == 0.25
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"recompilations": 2}))
    with pytest.raises(SystemExit, match="seed 7 is no result: 2 kernels or graphs were compiled"):
        quality.train("nano", "stdlib", 7, tmp_path, [])
