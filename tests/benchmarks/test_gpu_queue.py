"""A queue of GPU work keeps what it has, whatever becomes of a step, and goes on where it stopped."""

import json
import shlex
import sys
import tarfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from parbank.config import override
from parbank.recipes import get_recipe

ROOT = Path(__file__).resolve().parents[2]


def make(gpu_queue: ModuleType, tmp_path: Path, seconds: float, **steps: Any) -> Any:
    return gpu_queue.Queue("text:folder", tmp_path / "work", tmp_path / "out", time.monotonic() + seconds, steps)


def python(code: str) -> str:
    return f"{{python}} -c {shlex.quote(code)}"


def test_a_step_that_fails_or_is_slow_stops_no_other(benchmark: Callable[[str], ModuleType], tmp_path: Path) -> None:
    gpu_queue = benchmark("gpu_queue")
    step = gpu_queue.Step
    writes = python("from pathlib import Path; Path('{results}/found.json').write_text('1'); print('written')")
    steps = {
        "broken": step(1, python("raise SystemExit('no kernel')"), 1.0),
        "slow": step(1, python("import time; print('begun', flush=True); time.sleep(60)"), 1.0, limit=2.0),
        "good": step(2, writes, 1.0),
        "long": step(3, writes, 1000.0),
        "later": step(3, writes, 1.0, needs="{runs}/missing"),
    }
    queue = make(gpu_queue, tmp_path, 60, **steps)
    queue.work_through(list(steps))
    states = {name: found["state"] for name, found in queue.found.items()}
    assert states == {"broken": "failed", "slow": "cut off", "good": "done"}
    assert queue.found["broken"]["said"] == "no kernel"
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as archive:
        assert archive.getnames() == ["found.json"]
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as archive:
        assert archive.getnames() == ["broken.log", "good.log", "slow.log"]
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| long | 3 | open |" in table
    assert "| later | 3 | open |" in table


def test_a_second_call_goes_on(benchmark: Callable[[str], ModuleType], tmp_path: Path) -> None:
    gpu_queue = benchmark("gpu_queue")
    count = python("open('{runs}/count', 'a').write('x')")
    more = python("import sys; f = open('{runs}/more', 'a+'); f.write('x'); sys.exit(f.tell() < 3)")
    steps = {
        "once": gpu_queue.Step(1, count, 1.0),
        "in parts": gpu_queue.Step(5, more, 5000.0, limit=60, goes_on=True),
        "new": gpu_queue.Step(1, count, 1.0, needs="{runs}/ready"),
    }
    for call in range(4):
        if call == 2:
            (tmp_path / "work" / "runs" / "ready").touch()
        queue = make(gpu_queue, tmp_path, 120, **steps)
        queue.work_through(list(steps))
    assert (queue.runs / "count").read_text() == "xx", "each once"
    assert (queue.runs / "more").read_text() == "xxx", "three calls"
    assert {found["state"] for found in json.loads((tmp_path / "out" / "queue.json").read_text()).values()} == {"done"}


def test_archives_stay_below_the_limit(
    benchmark: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: Any
) -> None:
    gpu_queue = benchmark("gpu_queue")
    monkeypatch.setattr(gpu_queue, "MOST_BYTES", 1000)
    folder = tmp_path / "results"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.bin").write_bytes(bytes([number]) * 400)
    gpu_queue.pack(folder, tmp_path, "results", parts=2)
    for path in (tmp_path / "results.tar.gz", tmp_path / "results-2.tar.gz"):
        with tarfile.open(path) as archive:
            assert len(archive.getnames()) == 2
    assert len(list(tmp_path.glob("*.tar.gz"))) == 2


def test_every_step_can_be_started(benchmark: Callable[[str], ModuleType], tmp_path: Path) -> None:
    gpu_queue = benchmark("gpu_queue")
    queue = gpu_queue.Queue("text:a", tmp_path / "work", tmp_path / "out", time.monotonic() + 60, gpu_queue.STEPS)
    for step in gpu_queue.STEPS.values():
        program, *words = queue.command(step, 100.0)
        assert program == sys.executable
        assert words[0] == "-m" or (ROOT / words[0]).is_file(), words
        assert not any("{" in word for word in words), words
    loops = queue.command(gpu_queue.STEPS["auto_9"], 100.0)
    assert "7,8,9" in loops, "seeds that have run are not run again, and the result has all"


def test_the_first_of_smoke_makes_what_others_need(benchmark: Callable[[str], ModuleType]) -> None:
    smoke = benchmark("smoke")
    chosen = smoke.choose(["eval"], "cpu")
    assert set(chosen) == {"train", "chunked", "sliding", "streaming", "ttt", "ttt low-rank", "adaptive"}
    assert smoke.choose([], "cuda") == smoke.CHECKS


@pytest.mark.parametrize("words", [["--help"], ["plan", "--minutes", "x"]])
def test_smoke_says_what_failed(words: list[str], benchmark: Callable[[str], ModuleType]) -> None:
    smoke = benchmark("smoke")
    fault, seconds = smoke.run(smoke.Check(" ".join(words)), {})
    assert seconds > 0
    assert bool(fault) == (words[0] == "plan")


def test_settings_that_only_a_gpu_tries_are_known(benchmark: Callable[[str], ModuleType]) -> None:
    tried = 0
    for check in benchmark("smoke").CHECKS.values():
        for command in check.words.split("&&"):
            words = shlex.split(command)
            settings = [word for before, word in pairwise(words) if before == "--set"]
            if words[0] == "train" and "sprint" in words:
                assert override(get_recipe("sprint"), *settings).budget.steps == 12
                tried += 1
    assert tried >= 6
