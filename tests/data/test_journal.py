"""A preparation that is cut off is continued by the next one, with the same result to the last byte."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parbank.data import encode, journal
from parbank.data.dataset import open_shards
from parbank.data.journal import DOCUMENTS, JOURNAL
from parbank.data.prepare import prepare_text
from parbank.data.shards import ShardWriter
from parbank.data.spool import Spool
from parbank.errors import DataError

# Prepares with small batches and shards, and notes its position after every batch. At a line with the given start it kills
# itself, or sends itself the signal of Ctrl-C.
SCRIPT = """
import os, signal, sys
from parbank.data import encode, journal, prepare
journal.LEAST_BYTES, journal._SECONDS, encode._BATCH_BYTES, encode._LONG = 0, 0.0, 20_000, 10_000
prepare.ShardWriter.__init__.__kwdefaults__["shard_tokens"] = 15_000
source, out, place, batches, kind, workers = sys.argv[1:]
prepare.count_workers = lambda size: int(workers)
note, left = journal.Journal.note, int(batches)

def stop():
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGINT)

def count(self, *position):
    global left
    note(self, *position)
    left -= 1
    if not left:
        stop()

journal.Journal.note = count

def say(line):
    print(line, flush=True)
    if place != "-" and line.startswith(place):
        stop()

prepare.prepare_text([source], out, vocab_size=320, say=say)
"""


def run(
    source: Path, out: Path, place: str = "-", *, batches: int = -1, kind: str = "kill", workers: int = 0
) -> list[str]:
    command = [sys.executable, "-c", SCRIPT, str(source), str(out), place, str(batches), kind, str(workers)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """About 200 KB in 60 documents."""
    lines = [{"text": " ".join(f"w{(k * number) % 89}" for k in range(900 + number))} for number in range(2, 62)]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def whole(source: Path, tmp_path: Path) -> dict[str, bytes]:
    """The files of a preparation that was not cut off."""
    run(source, tmp_path / "whole")
    found = contents(tmp_path / "whole")
    assert sum(name.startswith("text_train") for name in found) > 2, "positions lie in several shards"
    assert not {JOURNAL, DOCUMENTS, "spool"} & found.keys()
    return found


@pytest.mark.parametrize("kind", ["kill", "interrupt"])
@pytest.mark.parametrize(("place", "batches"), [("trained", -1), ("-", 1), ("-", 4)])
def test_the_next_one_continues(
    source: Path, whole: dict[str, bytes], tmp_path: Path, place: str, batches: int, kind: str
) -> None:
    first = run(source, tmp_path / "out", place, batches=batches, kind=kind)
    assert any(line.startswith("reading") for line in first)
    assert not (tmp_path / "out").exists()
    assert any("the same command continues" in line for line in first) == (kind == "interrupt")
    said = run(source, tmp_path / "out")
    assert "continuing a preparation of this text that was interrupted" in said
    assert not any(line.startswith("reading") for line in said)
    assert any(line.startswith("trained") for line in said) == (place == "trained")
    assert contents(tmp_path / "out") == whole
    assert not list(tmp_path.glob(".out*")), "nothing is left beside it"
    open_shards(tmp_path / "out")


def test_it_may_be_cut_off_again_and_again(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    for _ in range(4):
        run(source, tmp_path / "out", batches=2)
        assert not (tmp_path / "out").exists()
    run(source, tmp_path / "out")
    assert contents(tmp_path / "out") == whole


@pytest.mark.parametrize("workers", [(2, 0), (0, 2), (2, 1)])
def test_it_may_be_continued_by_another_number_of_processes(
    source: Path, whole: dict[str, bytes], tmp_path: Path, workers: tuple[int, int]
) -> None:
    first = run(source, tmp_path / "out", batches=4, kind="interrupt", workers=workers[0])
    assert any("the same command continues" in line for line in first)
    run(source, tmp_path / "out", workers=workers[1])
    assert contents(tmp_path / "out") == whole
    assert not list(tmp_path.glob(".out*"))


def test_a_text_that_changed_is_read_again(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", batches=2)
    with open(source, "a", encoding="utf-8") as file:
        file.write('{"text": "one more document"}\n')
    said = run(source, tmp_path / "out")
    assert any(line.startswith("reading") for line in said)
    assert not list(tmp_path.glob(".out*"))
    assert b"one more document" in source.read_bytes()
    assert json.loads((tmp_path / "out" / "manifest.json").read_bytes())["train"]["documents"] >= 58


def test_before_all_is_read_nothing_stays(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", "preparing", kind="interrupt")
    assert not list(tmp_path.glob(".out*"))


def test_a_short_text_keeps_no_journal(source: Path, tmp_path: Path) -> None:
    seen: list[bool] = []

    def look(line: str) -> None:
        seen.extend((place / JOURNAL).exists() for place in tmp_path.glob(".out.preparing-*"))

    prepare_text([str(source)], tmp_path / "out", vocab_size=320, say=look)
    assert seen
    assert not any(seen)


def test_an_error_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, for instance: the next attempt needs the room."""

    def fail(*_: object) -> None:
        raise DataError("no room")

    monkeypatch.setattr(journal, "LEAST_BYTES", 0)
    monkeypatch.setattr(encode, "check_tokens", fail)
    with pytest.raises(DataError, match="no room"):
        prepare_text([str(source)], tmp_path / "out", vocab_size=320, say=lambda line: None)
    assert not list(tmp_path.glob(".out*"))


def test_a_process_continues_its_own_work(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook the process that was interrupted is still there."""
    monkeypatch.setattr(journal, "LEAST_BYTES", 0)
    said: list[str] = []

    def interrupt(line: str) -> None:
        if line.startswith("trained"):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        prepare_text([str(source)], tmp_path / "out", vocab_size=320, say=interrupt)
    prepare_text([str(source)], tmp_path / "out", vocab_size=320, say=said.append)
    assert "continuing a preparation of this text that was interrupted" in said


def test_a_writer_goes_on_where_another_ended(tmp_path: Path) -> None:
    import numpy as np

    tokens = np.arange(250, dtype=np.uint16)
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    with ShardWriter(tmp_path / "whole", "x", shard_tokens=100) as writer:
        writer.append(tokens)
        expected = writer.close()
    with ShardWriter(tmp_path / "parts", "x", shard_tokens=100) as writer:
        writer.append(tokens[:130])
        written, count = writer.sync()
        writer.append(tokens[:77])  # written after the last note, and lost
        written = list(written)
    with ShardWriter(tmp_path / "parts", "x", shard_tokens=100, written=written[:1], tokens=count) as writer:
        writer.append(tokens[130:])
        assert writer.close() == expected
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_the_list_of_documents_is_on_the_disk_before_the_journal_that_relies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    fsync, write_json = os.fsync, journal.write_json

    def watch(handle: int) -> None:
        fsync(handle)
        synced.add(os.fstat(handle).st_ino)

    def check(path: Path, state: dict) -> int:
        needed = {(tmp_path / name).stat().st_ino for name in (DOCUMENTS, "spool")} | {tmp_path.stat().st_ino}
        assert needed <= synced
        return write_json(path, state)

    monkeypatch.setattr(os, "fsync", watch)
    monkeypatch.setattr(journal, "write_json", check)
    monkeypatch.setattr(journal, "LEAST_BYTES", 0)
    with Spool(tmp_path / "spool") as spool:
        entries = [spool.add(b"one document"), spool.add(b"another")]
        spool.seal()
        written = journal.Journal(tmp_path, {"a": 1})
        written.save_documents(spool, entries[:1], entries[1:], {})
    assert written.load_documents()[:2] == (entries[:1], entries[1:])
