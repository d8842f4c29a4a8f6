"""A queue of GPU work keeps what it has, whatever becomes of a step, and goes on where it stopped."""

import json
import shlex
import signal
import subprocess
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
        "broken": step(1, python("raise SystemExit('no kernel')"), 1.0, limit=300),
        "slow": step(1, python("import time; print('begun', flush=True); time.sleep(600)"), 1.0, limit=0.5),
        "good": step(2, writes, 1.0, limit=300),
        "long": step(3, writes, 1e6),
        "later": step(3, writes, 1.0, after=("long",)),
        "after all": step(3, writes, 1.0, after=("good", "broken")),
    }
    queue = make(gpu_queue, tmp_path, 600, **steps)
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
    assert "| after all | 3 | open |" in table


def test_a_second_call_goes_on(benchmark: Callable[[str], ModuleType], tmp_path: Path) -> None:
    gpu_queue = benchmark("gpu_queue")
    count = python("open('{runs}/count', 'a').write('x')")
    more = python("import sys; f = open('{runs}/more', 'a+'); f.write('x'); sys.exit(f.tell() < 3)")
    steps = {
        "once": gpu_queue.Step(1, count, 1.0, limit=300),
        "in parts": gpu_queue.Step(5, more, 5000.0, limit=300, goes_on=True),
        "new": gpu_queue.Step(1, count, 1.0, limit=300, after=("in parts",)),
    }
    for _ in range(4):
        queue = make(gpu_queue, tmp_path, 1200, **steps)
        queue.work_through(list(steps))
    assert (queue.runs / "count").read_text() == "xx", "each once"
    assert (queue.runs / "more").read_text() == "xxx", "three calls"
    assert {found["state"] for found in json.loads((tmp_path / "out" / "queue.json").read_text()).values()} == {"done"}


def test_a_step_that_the_end_of_a_call_cut_off_comes_first_once(
    benchmark: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the most valuable. One that hangs makes way for the others."""
    gpu_queue = benchmark("gpu_queue")
    steps = {
        "hangs": gpu_queue.Step(1, python("import time; time.sleep(600)"), 0.4, limit=300),
        "other": gpu_queue.Step(1, python("pass"), 100.0, limit=300),
    }
    states = []
    for left in (0.5, 0.5, 600.0):
        monkeypatch.setattr(gpu_queue.Queue, "left", property(lambda self, left=left: left))
        queue = make(gpu_queue, tmp_path, 0, **steps)
        if left == 600:
            monkeypatch.setattr(queue, "run", states.append)
            queue.work_through(list(steps))
        else:
            queue.work_through(list(steps))
            states.append(queue.state("hangs"))
    assert states == ["open", "cut off", "other", "hangs"]


def test_a_step_that_an_earlier_call_left_is_ended(benchmark: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """A killed call leaves its step, which has a session of its own, on the GPU."""
    gpu_queue = benchmark("gpu_queue")
    queue = make(gpu_queue, tmp_path, 60)
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as left:
        assert left.stdout is not None
        left.stdout.readline()  # from here on the process has its command line
        running = tmp_path / "work" / "running.json"
        running.write_text(json.dumps({"pid": left.pid, "command": ["python", "another"]}))
        queue.end_leftover()
        assert left.poll() is None, "a number that belongs to another process now"
        assert not running.exists()
        queue.end_leftover()
        running.write_text(json.dumps({"pid": left.pid, "command": command}))
        queue.end_leftover()
        assert left.wait(60) == -signal.SIGKILL


def test_an_interrupt_ends_the_step(
    benchmark: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_queue = benchmark("gpu_queue")
    queue = make(gpu_queue, tmp_path, 60, slow=gpu_queue.Step(1, python("import time; time.sleep(600)"), 1.0))
    real, begun = subprocess.Popen.wait, []

    def wait(process: Any, timeout: float | None = None) -> int:
        if not begun:
            begun.append(process)
            raise KeyboardInterrupt
        return real(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        queue.work_through(["slow"])
    assert begun[0].returncode is not None
    assert queue.state("slow") == "open"


def test_results_of_an_unknown_commit_are_announced(
    benchmark: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_queue = benchmark("gpu_queue")
    for dirty in (True, False):
        found = {"commit": "a" * 40, "dirty": dirty, "source": "stamp"}
        monkeypatch.setattr(gpu_queue.provenance, "read_commit", lambda found=found: found)
        queue = make(gpu_queue, tmp_path, 60)
        queue.save()
        table = (tmp_path / "out" / "table.md").read_text()
        assert table.startswith("code: aaaaaaaaa, by stamp")
        assert ("WARNING" in table) == dirty


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
        own = [word for word in words if word.startswith(str(tmp_path / "work"))]
        assert own or words[:2] == ["-m", "pytest"] or "results" in words, "what it makes would stay in the tree"
        assert set(step.after) <= set(gpu_queue.STEPS)
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
