"""Preparing keeps every byte, happens once, survives being killed, and depends on content alone."""

import hashlib
import json
import os
import pty
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbank.data.dataset import Dataset, open_shards
from parbank.data.manifest import read_manifest
from parbank.data.prepare import prepare_text
from parbank.data.spool import Document, Spool, is_held_out, sample, split
from parbank.data.tokenizer import Tokenizer
from parbank.errors import DataError

SENTENCE = "the quick brown fox jumps over a lazy dog and runs home to tell its friends about this very strange day"
WORDS = SENTENCE.split()


def write_texts(folder: Path, count: int = 40, seed: int = 0) -> list[bytes]:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    texts = [(" ".join(rng.choice(WORDS, 60)) + f"\r\n\u2581{i}\t\u00e9\n").encode() for i in range(count)]
    for index, text in enumerate(texts):
        (folder / f"{index:03d}.txt").write_bytes(text)
    return texts


def documents(data: Dataset, split_name: str) -> list[bytes]:
    stream = getattr(data, split_name)
    tokens = stream.read(0, len(stream))
    starts = np.flatnonzero(tokens == data.tokenizer.bos_id)
    assert starts[0] == 0
    return [data.tokenizer.decode_bytes(part[1:]) for part in np.split(tokens, starts[1:])]


def quiet(line: str) -> None:
    pass


def prepare(*inputs: Path | str, out: Path, vocab: int = 320) -> dict[str, Any]:
    return prepare_text([str(item) for item in inputs], out, vocab_size=vocab, say=quiet)


def test_every_byte_arrives(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "in")
    manifest = prepare(tmp_path / "in", out=tmp_path / "out")
    data = open_shards(tmp_path / "out", vocab_size=320)
    train, val = documents(data, "train"), documents(data, "val")
    assert sorted(train + val) == sorted(texts)
    assert val
    assert data.train_bytes + data.val_bytes == sum(path.stat().st_size for path in (tmp_path / "in").iterdir())
    assert data.val_text() == b"".join(val)
    assert manifest == read_manifest(tmp_path / "out")
    assert manifest["train"]["bytes"] == data.train_bytes
    assert manifest["val"]["documents"] == len(val)
    assert manifest["tokenizer"] == data.tokenizer.fingerprint
    tokens = data.train.read(0, len(data.train)).astype("<u2")
    assert [shard["sha256"] for shard in manifest["train"]["shards"]] == [hashlib.sha256(tokens.tobytes()).hexdigest()]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "manifest.json",
        "tokenizer.model",
        "text_train_000000.bin",
        "text_val_000000.bin",
    }


def test_result_depends_on_content_not_on_names_order_or_packing(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "in")
    with open(tmp_path / "all.jsonl", "w") as file:
        for text in reversed(texts):
            file.write(json.dumps({"text": text.decode()}) + "\n")
    prepare(tmp_path / "in", out=tmp_path / "one")
    prepare(tmp_path / "all.jsonl", tmp_path / "in" / "000.txt", out=tmp_path / "two")
    one, two = open_shards(tmp_path / "one"), open_shards(tmp_path / "two")
    assert one.fingerprint == two.fingerprint
    assert one.tokenizer.model_bytes == two.tokenizer.model_bytes


def test_validation_is_chosen_by_content_and_stays_when_documents_are_added(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", count=400)
    prepare(tmp_path / "in", out=tmp_path / "out")
    held_out = set(documents(open_shards(tmp_path / "out"), "val"))
    assert 1 <= len(held_out) <= 24  # about 8 of 400
    write_texts(tmp_path / "more", count=100, seed=1)
    prepare(tmp_path / "in", tmp_path / "more", out=tmp_path / "out")
    assert held_out <= set(documents(open_shards(tmp_path / "out"), "val"))


def test_named_validation_never_trains_and_duplicates_are_kept_once(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "train")
    (tmp_path / "train" / "copy.txt").write_bytes(texts[0])
    (tmp_path / "val.txt").write_bytes(texts[1])
    manifest = prepare(f"train={tmp_path}/train", f"val={tmp_path}/val.txt", out=tmp_path / "out")
    data = open_shards(tmp_path / "out")
    assert documents(data, "val") == [texts[1]]
    assert sorted(documents(data, "train")) == sorted([texts[0], *texts[2:]])
    assert manifest["dropped_duplicates"] == 2


def test_a_single_document_gives_its_end(tmp_path: Path) -> None:
    lines = [f"{' '.join(WORDS)} {i}\n" for i in range(200)]
    (tmp_path / "book.txt").write_text("".join(lines))
    prepare(tmp_path / "book.txt", out=tmp_path / "out")
    data = open_shards(tmp_path / "out")
    (train,), (val,) = documents(data, "train"), documents(data, "val")
    assert train + val == "".join(lines).encode()
    assert train.endswith(b"\n")
    assert 0.015 < len(val) / len(train + val) < 0.03


@settings(max_examples=200, deadline=None)
@given(text=st.text(min_size=1, alphabet=st.sampled_from("a\u00e9\u4e2d\U0001f600\n ")))
def test_a_single_document_is_cut_between_characters(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    with Spool(tmp_path_factory.mktemp("spool") / "s") as spool:
        entry = spool.add(text.encode())
        spool.seal()
        train, val = split([entry], spool)
        parts = [spool.read(part) for part in train + val]
    assert b"".join(parts) == text.encode()
    for part in parts:
        assert part
        part.decode()


def test_a_fiftieth_of_many_documents_validates(tmp_path: Path) -> None:
    with Spool(tmp_path / "s") as spool:
        texts = [f"document {n}".encode() for n in range(10_000)]
        entries = {spool.add(text): text for text in texts}
        spool.seal()
        train, val = split(list(entries), spool)
    assert 160 <= len(val) <= 240  # 200, give or take three standard deviations; the hashes stay what they are
    assert len(train) + len(val) == len(texts)
    lowest = {text for text in texts if 50 * int(hashlib.sha256(text).hexdigest(), 16) < 2**256}
    assert {entries[entry] for entry in val} == lowest


def test_two_documents_are_never_both_held_out() -> None:
    low = [Document(bytes([0] * 15 + [i]), i, 1) for i in range(2)]
    high = [Document(bytes([255] * 15 + [i]), i, 1) for i in range(2)]
    for entries in (low, high):
        train, val = split(entries, None)  # type: ignore[arg-type]
        assert len(train) == len(val) == 1
    assert is_held_out(low[0].digest)
    assert not is_held_out(high[0].digest)


def test_sample_is_bounded_and_spread(tmp_path: Path) -> None:
    with Spool(tmp_path / "s") as spool:
        long = spool.add(b"".join(f"{i:07d}\n".encode() for i in range(250_000)))  # 2 MB
        short = [spool.add(b"short %d" % i) for i in range(100)]
        spool.seal()
        everything = list(sample([long, *short], spool, 10_000_000))
        assert sum(map(len, everything)) == long.size + sum(entry.size for entry in short)
        some = list(sample([long, *short], spool, 1_000_000))
    assert 200_000 < sum(map(len, some)) < 1_100_000
    numbers = [int(line) for text in some if "short" not in text for line in text.split("\n")[1:-1]]
    assert min(numbers) < 50_000
    assert max(numbers) > 180_000
    assert sum("short" in text for text in some) == 100


def test_prepared_once(tmp_path: Path) -> None:
    write_texts(tmp_path / "in")
    said: list[str] = []

    def again(vocab: int = 320) -> bool:
        said.clear()
        prepare_text([str(tmp_path / "in")], tmp_path / "out", vocab_size=vocab, say=said.append)
        return bool(said)

    assert again()
    assert not again()
    os.utime(tmp_path / "in" / "000.txt", (1, 1))  # another time, the same content
    assert not again()
    (tmp_path / "in" / "000.txt").write_text("changed " * 30)
    assert again()
    content = (tmp_path / "in" / "000.txt").read_text()
    (tmp_path / "in" / "000.txt").write_text(content.replace("changed", "CHANGED"))  # the same size
    assert again()
    (tmp_path / "in" / "new.txt").write_text("new " * 30)
    assert again()
    (tmp_path / "in" / "new.txt").unlink()
    assert again()
    assert again(vocab=330)
    assert not again(vocab=330)


@pytest.mark.parametrize("name", ["text_train_000000.bin", "tokenizer.model", "manifest.json"])
def test_a_damaged_result_is_made_again(tmp_path: Path, name: str) -> None:
    write_texts(tmp_path / "in")
    prepare(tmp_path / "in", out=tmp_path / "out")
    before = open_shards(tmp_path / "out").fingerprint
    path = tmp_path / "out" / name
    if name == "manifest.json":
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": 0}))
    else:
        path.write_bytes(path.read_bytes()[:-5])
    prepare(tmp_path / "in", out=tmp_path / "out")
    assert open_shards(tmp_path / "out").fingerprint == before


def test_other_peoples_files_are_not_replaced(tmp_path: Path) -> None:
    write_texts(tmp_path / "in")
    (tmp_path / "out").mkdir()
    prepare(tmp_path / "in", out=tmp_path / "out")  # empty: fine
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="mine holds other files"):
        prepare(tmp_path / "in", out=tmp_path / "mine")
    with pytest.raises(DataError, match="is a file"):
        prepare(tmp_path / "in", out=tmp_path / "mine" / "thesis.txt")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_place_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    write_texts(tmp_path / "in")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write to .*PARBANK_CACHE"):
        prepare(tmp_path / "in", out=tmp_path / "file" / "out")
    with pytest.raises(DataError, match=r"^cannot write to /proc/x: No such file or directory; choose another folder"):
        prepare(tmp_path / "in", out=Path("/proc/x"))


def test_bad_input_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    write_texts(tmp_path / "in")
    (tmp_path / "in" / "bad.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"bad\.txt"):
        prepare(tmp_path / "in", out=tmp_path / "out")
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(DataError, match=r"x\.txt: nothing is left for training; the text is too short"):
        prepare(tmp_path / "x.txt", out=tmp_path / "out")
    (tmp_path / "x.txt").write_text("a few words\nand a line\n")
    with pytest.raises(DataError, match=r"x\.txt: the text is too short for a vocabulary of 320"):
        prepare(tmp_path / "x.txt", out=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "x.txt"]


def test_interrupting_leaves_nothing(tmp_path: Path) -> None:
    write_texts(tmp_path / "in")

    def interrupt(line: str) -> None:
        if line.startswith("trained"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_text([str(tmp_path / "in")], tmp_path / "out", vocab_size=320, say=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


SCRIPT = """
import sys, time
from parbank.data.prepare import prepare_text
def say(line):
    print(line, flush=True)
    if line.startswith("trained"):
        time.sleep(float(sys.argv[3]))
prepare_text([sys.argv[1]], sys.argv[2], vocab_size=320, say=say)
"""


def start(source: Path, out: Path, pause: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(source), str(out), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_killed_half_way_nothing_looks_valid_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    write_texts(tmp_path / "in")
    with start(tmp_path / "in", tmp_path / "out", pause=600) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("trained"):
            assert process.poll() is None
        process.kill()
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.glob(".out.preparing-*"))
    prepare(tmp_path / "in", out=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    open_shards(tmp_path / "out")


def test_leftovers_of_a_folder_with_brackets_in_its_name_are_deleted(tmp_path: Path) -> None:
    """Brackets are signs of a glob pattern."""
    write_texts(tmp_path / "in")
    with subprocess.Popen(["true"]) as ended:
        pass
    left = tmp_path / f".out [1].preparing-{socket.gethostname()}-{ended.pid}-0"
    left.mkdir()
    (left / "spool").write_bytes(b"text")
    prepare(tmp_path / "in", out=tmp_path / "out [1]")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out [1]"]


def test_two_at_once_leave_one_whole_result(tmp_path: Path) -> None:
    write_texts(tmp_path / "in")
    processes = [start(tmp_path / "in", tmp_path / "out", pause=0.3) for _ in range(3)]
    for process in processes:
        process.communicate()
    assert min(process.returncode for process in processes) == 0, "the others are refused while the first works"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    data = open_shards(tmp_path / "out")
    assert data.train_bytes + data.val_bytes == sum(path.stat().st_size for path in (tmp_path / "in").iterdir())


def test_plain_lines_when_piped_a_bar_on_a_terminal(tmp_path: Path) -> None:
    write_texts(tmp_path / "in")
    code = "import sys; from parbank.data.prepare import prepare_text; prepare_text(sys.argv[1:2], sys.argv[2], vocab_size=320)"
    command = [sys.executable, "-c", code, str(tmp_path / "in")]
    piped = subprocess.run([*command, str(tmp_path / "one")], stderr=subprocess.PIPE, text=True, check=True).stderr
    assert "\x1b" not in piped
    assert [line.split(":")[0].split(" in ")[0] for line in piped.splitlines()] == [
        "preparing text with 320 tokens",
        "reading",
        "comparing",
        "0.0% of the validation bytes are",
        "trained a tokenizer of 320 tokens",
        "tokenising",
        "train",
        "val",
    ]
    master, slave = pty.openpty()
    with subprocess.Popen(
        [*command, str(tmp_path / "two")], stderr=slave, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(slave)
        shown = b""
        while True:
            try:
                block = os.read(master, 4096)
            except OSError:  # the terminal closes when the other side does
                break
            if not block:
                break
            shown += block
    os.close(master)
    assert process.returncode == 0
    assert b"tokenising" in shown
    assert b"\x1b[" in shown


def test_input_can_be_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python3"  # a small one: the real one takes seconds
    write_texts(fake)
    for path in fake.glob("*.txt"):
        path.rename(path.with_suffix(".py"))
    (fake / "site-packages").mkdir()
    (fake / "site-packages" / "other.py").write_text("installed")
    (fake / "empty.py").write_text("")
    (fake / "latin.py").write_bytes(b"\xe9")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(fake)})
    manifest = prepare("stdlib", out=tmp_path / "out")
    assert manifest["train"]["documents"] + manifest["val"]["documents"] == 40
    assert (tmp_path / "out" / "stdlib_train_000000.bin").exists()


def test_large_documents_and_many_batches_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = write_texts(tmp_path / "in", count=60)
    (tmp_path / "in" / "long.txt").write_bytes(b"".join(texts) * 60)
    prepare(tmp_path / "in", out=tmp_path / "one")
    monkeypatch.setattr("parbank.data.prepare._BATCH_BYTES", 1000)
    monkeypatch.setattr("parbank.data.encode._BATCH_BYTES", 1000)
    monkeypatch.setattr("parbank.data.encode._LONG", 1000)
    prepare(tmp_path / "in", out=tmp_path / "two")
    assert open_shards(tmp_path / "one").fingerprint == open_shards(tmp_path / "two").fingerprint


def test_ctrl_c_does_not_wait_until_all_the_text_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer trains meanwhile, in the main thread, which alone gets the signal."""
    write_texts(tmp_path / "in")
    began, compared = Event(), []

    def compare(train: Iterator[list[bytes]], *rest: object, **more: object) -> None:
        for batch in train:
            compared.append(batch)
            began.set()
            time.sleep(0.1)

    def interrupt(*arguments: object) -> None:
        assert began.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr("parbank.data.prepare._BATCH_BYTES", 1)
    monkeypatch.setattr("parbank.data.prepare.measure_overlap", compare)
    monkeypatch.setattr(Tokenizer, "train", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "in", out=tmp_path / "out")
    assert len(compared) < 20
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_preparing_again_writes_nothing(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", count=300)
    prepare(tmp_path / "in", out=tmp_path / "out")
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.bin")}
    assert len(written) == 2
    prepare(tmp_path / "in", out=tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.bin")} == written
    assert isinstance(open_shards(tmp_path / "out").tokenizer, Tokenizer)
