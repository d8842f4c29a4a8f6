"""Processes that encode text: the same result for any number of them, and nothing left of one that fails or is stopped."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path

import pytest

import parbank
from parbank.data import encode
from parbank.data.prepare import prepare_text
from parbank.data.progress import say_nothing
from parbank.data.tokenizer import Tokenizer, TokenizerConfig
from parbank.data.workers import Workers
from parbank.errors import DataError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Some 300 KB in documents of 3 KB, and one of 60 KB."""
    words = ["The", "PIPE", "ends\n", "after", "\u2581", "\ue000", "three", "caf\u00e9s"]
    texts = [" ".join(words[(k * number) % 7 + k % 2] for k in range(500)) + f" {number}" for number in range(80)]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, "".join(texts[:20])]))
    return path


def use(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """Prepares with so many processes, in small batches."""
    monkeypatch.setattr("parbank.data.prepare.count_workers", lambda size: workers)
    monkeypatch.setattr(encode, "_BATCH_BYTES", 10_000)
    monkeypatch.setattr(encode, "_LONG", 30_000)


def children() -> set[int]:
    """The processes that this one started."""
    while True:
        tasks = Path("/proc/self/task").iterdir()
        with suppress(FileNotFoundError):  # a thread ended meanwhile, and its processes now belong to another one
            return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


@pytest.fixture(autouse=True)
def earlier() -> Iterator[None]:
    """No test leaves a process. Other tests may have left some, such as Python's own tracker of resources."""
    before = children()
    yield
    assert children() <= before


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("operators", [False, True])
def test_any_number_of_processes_gives_the_same_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operators: bool
) -> None:
    found = []
    for workers in (0, 1, 3):
        use(monkeypatch, workers)
        config = TokenizerConfig(case_operators=operators)
        prepare_text([str(source)], tmp_path / str(workers), vocab_size=320, tokenizer=config, say=say_nothing)
        found.append({path.name: path.read_bytes() for path in (tmp_path / str(workers)).iterdir()})
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 4


def test_processes_are_for_large_texts_and_several_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "count_cores", lambda: 16)
    assert encode.count_workers(1_000_000) == 0
    assert encode.count_workers(100_000_000) == 16
    monkeypatch.setattr(encode, "count_cores", lambda: 1)
    assert encode.count_workers(100_000_000) == 0
    monkeypatch.setattr(encode, "count_cores", lambda: 224)
    assert encode.count_workers(100_000_000) == encode.MOST_WORKERS


def test_a_batch_waits_until_there_is_room(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, 0)
    started: list[int] = []

    def note(entries: list[encode.Document], *rest: object) -> tuple[int, int]:
        started.append(sum(entry.size for entry in entries))
        return sum(started), 0

    monkeypatch.setattr(encode, "_encode", note)
    monkeypatch.setattr(encode, "_LONG", 20_000)
    with encode.Spool(tmp_path / "spool") as spool, Workers(0, say_nothing) as workers:
        entries = [spool.add(bytes(9000)) for _ in range(30)]
        used = 0
        for count, _ in encode.encode_ahead(entries, spool, None, tmp_path, "x", workers):  # type: ignore[arg-type]
            used += 9000 * count
            assert sum(started) - used <= 40_000
    assert used == sum(started) == 30 * 9000


def test_an_error_in_a_process_is_the_error_here() -> None:
    with Workers(2, say_nothing) as workers:
        with pytest.raises(DataError, match="cannot read the tokenizer /missing"):
            workers.submit(Tokenizer.load, Path("/missing")).result()
        with pytest.raises(ValueError, match="invalid literal") as caught:
            workers.submit(int, "x").result()
        assert "In a process that prepares text" in caught.value.__notes__[0]
        assert workers.submit(os.write, 1, b"a library's own words").result() == 21
        assert [workers.submit(pow, 2, number).result() for number in range(4)] == [1, 2, 4, 8]


def test_a_result_or_a_call_that_cannot_be_sent_is_an_error_and_no_end() -> None:
    with Workers(1, say_nothing) as workers:
        with pytest.raises(TypeError, match="cannot pickle"):
            workers.submit(memoryview, b"").result()
        with pytest.raises(TypeError, match="cannot pickle"):
            workers.submit(len, memoryview(b"")).result()
        assert workers.submit(pow, 2, 5).result() == 32


@pytest.mark.parametrize(("status", "said"), [(-signal.SIGKILL, "was killed by signal 9"), (3, "ended with status 3")])
def test_a_process_that_dies_is_an_error_and_no_call_waits_for_it(status: int, said: str) -> None:
    began = time.monotonic()
    with Workers(1, say_nothing) as workers:
        lost = workers.submit(signal.raise_signal, -status) if status < 0 else workers.submit(os._exit, status)
        others = [workers.submit(time.sleep, 600) for _ in range(3)]
        for future in (lost, *others):
            with pytest.raises(DataError, match=said):
                future.result()
    assert time.monotonic() - began < 30


def test_calls_are_done_in_their_order() -> None:
    """Results are used in that order, and those that wait take memory."""
    order: list[int] = []
    with Workers(2, say_nothing) as workers:
        calls = [workers.submit(time.sleep, 0.01) for _ in range(30)]
        for number, call in enumerate(calls):
            call.add_done_callback(lambda call, number=number: order.append(number))  # type: ignore[misc]
        wait(calls)
    assert sorted(order) == list(range(30))
    # On a busy machine a few change places. A call that is left behind comes last.
    assert max(abs(place - number) for place, number in enumerate(order)) <= 8


def test_leaving_ends_calls_at_once() -> None:
    began = time.monotonic()
    with Workers(2, say_nothing) as workers:
        calls = [workers.submit(time.sleep, 600) for _ in range(5)]
        while not calls[1].running():
            time.sleep(0.01)
    assert time.monotonic() - began < 30
    assert all(call.done() for call in calls)


def test_a_system_that_starts_no_more_processes_costs_time_only(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, 0)
    prepare_text([str(source)], tmp_path / "one", vocab_size=320, say=say_nothing)
    use(monkeypatch, 3)
    start, started, said = subprocess.Popen, [], []

    def refuse(*args: object, **kwargs: object) -> object:
        if started:
            raise OSError(11, "Resource temporarily unavailable")
        started.append(start(*args, **kwargs))  # type: ignore[call-overload]
        return started[0]

    monkeypatch.setattr("parbank.data.workers.subprocess.Popen", refuse)
    prepare_text([str(source)], tmp_path / "two", vocab_size=320, say=said.append)
    assert "note: processes cannot be started (Resource temporarily unavailable); one process prepares the text" in said
    assert started[0].returncode == -signal.SIGKILL
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_a_process_that_is_killed_leaves_nothing_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, 2)
    before = children()

    def kill(line: str) -> None:
        if line.startswith("trained"):
            for pid in children() - before:
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(DataError, match=r"was killed by signal 9; if the memory was used up"):
        prepare_text([str(source)], tmp_path / "out", vocab_size=320, say=kill)
    assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]


def test_a_fault_that_a_process_meets_leaves_nothing_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, 2)

    def cut(line: str) -> None:
        if line.startswith("trained"):
            (spool,) = tmp_path.glob(".out.preparing-*/spool")
            os.truncate(spool, 1000)

    with pytest.raises(DataError, match="was cut short while it was in use"):
        prepare_text([str(source)], tmp_path / "out", vocab_size=320, say=cut)
    assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]


SCRIPT = """
import os, signal, sys
from pathlib import Path
from parbank.data import encode, prepare
from parbank.data.workers import Workers
prepare.count_workers = lambda size: 2
def say(line):
    if line.startswith("trained"):
        pids = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
        print(*pids, flush=True)
        os.killpg(0, signal.SIGINT) if sys.argv[3] == "interrupt" else os.kill(os.getpid(), signal.SIGKILL)
try:
    prepare.prepare_text([sys.argv[1]], sys.argv[2], vocab_size=320, say=say)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("kind", ["interrupt", "kill"])
def test_processes_end_with_the_one_that_started_them(source: Path, tmp_path: Path, kind: str) -> None:
    """Ctrl-C at a terminal goes to a whole group of processes, and only one of them speaks."""
    command = [sys.executable, "-c", SCRIPT, str(source), str(tmp_path / "out"), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, start_new_session=True)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    pids = [int(word) for word in lines[0].split()]
    assert len(pids) == 2
    assert lines[1:] == (["interrupted"] if kind == "interrupt" else [])
    until = time.monotonic() + 30
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))
    if kind == "interrupt":
        assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]


def test_a_process_is_not_misled_by_files_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong numpy')")
    monkeypatch.chdir(tmp_path)
    with Workers(1, say_nothing) as workers:
        assert workers.submit(encode.count_workers, 0).result() == 0


def test_words_of_a_startup_file_are_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello', end='', flush=True)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Workers(1, say_nothing) as workers:
        assert workers.submit(pow, 2, 5).result() == 32


CLOSED = """
import os
from parbank.data.workers import Workers
with Workers(1, print) as workers:
    os._exit(workers.submit(os.write, 2, b"words of a library").result())
"""


def test_words_of_a_library_are_no_answer_where_nothing_takes_them() -> None:
    """A service may have closed its standard error. The next file that is opened then has its number."""
    command = ["sh", "-c", 'exec "$0" -c "$1" 0<&- 1>&- 2>&-', sys.executable, CLOSED]
    assert subprocess.run(command, check=False, timeout=120).returncode == len("words of a library")


def test_processes_that_cannot_be_used_cost_time_only(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the packages of this process lie in a folder that it added to sys.path, or memory is short."""
    use(monkeypatch, 0)
    prepare_text([str(source)], tmp_path / "one", vocab_size=320, say=say_nothing)
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "try:\n"
        f"    Path({str(tmp_path)!r}, 'started').touch(exist_ok=False)\n"
        "except OSError:\n"
        "    os._exit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, lost in (("two", 2), ("three", 3)):  # the first time one of three can be used
        said: list[str] = []
        use(monkeypatch, 3)
        prepare_text([str(source)], tmp_path / name, vocab_size=320, say=said.append)
        assert (
            f"note: {lost} of 3 processes that prepare text cannot be used (the first ended with status 3); the text is "
            "prepared without them" in said
        )
        for path in (tmp_path / "one").iterdir():
            assert path.read_bytes() == (tmp_path / name / path.name).read_bytes()


def test_a_process_with_another_parbank_takes_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(Path(parbank.__file__).parent, tmp_path / "parbank", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    monkeypatch.setattr("parbank.data.workers.child_environment", lambda: environment)
    said: list[str] = []
    with Workers(1, said.append) as workers:
        assert workers.submit(os.getpid).result() == os.getpid()
    assert len(said) == 1
    assert f"the first imported '{tmp_path / 'parbank'}" in said[0]
