"""A folder of prepared data: only files of its manifest are replaced, and what is read is what was written."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from parbank.data.dataset import describe, open_dataset, open_shards
from parbank.data.manifest import MANIFEST, read_manifest
from parbank.data.prepare import prepare_text
from parbank.data.shards import HEADER_BYTES
from parbank.errors import DataError, ParbankError
from parbank.files import exchange


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i:02}.txt").write_text(f"Document {i} has the square {i * i} and the cube {i**3}.\n" * 9)
    return folder


def prepare(text: Path, out: Path, vocab: int = 300) -> None:
    prepare_text([str(text)], out, vocab_size=vocab, say=lambda line: None)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def replace_a_token(folder: Path) -> None:
    """Another token in the place of one, with the same size and the same modification time."""
    path = folder / "text_val_000000.bin"
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 20] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_users_file_stops_a_replacement_and_stays(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(text, out)
    (out / "thesis.txt").write_text("years of work")
    before = contents(out)
    with pytest.raises(DataError, match=r"out holds other files \(thesis\.txt\) and would be replaced"):
        prepare(text, out, vocab=310)
    assert contents(out) == before
    prepare(text, out)  # nothing to replace: fine
    (out / "thesis.txt").unlink()
    prepare(text, out, vocab=310)
    assert describe(out)["vocab_size"] == 310


@pytest.mark.parametrize("kind", ["a folder", "a link"])
@pytest.mark.parametrize("name", ["tokenizer.model", "text_val_000000.bin"])
def test_what_has_the_name_of_a_listed_file_and_is_none_stays(name: str, kind: str, text: Path, tmp_path: Path) -> None:
    out, mine = tmp_path / "out", tmp_path / "mine"
    prepare(text, out)
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    (out / name).unlink()
    if kind == "a link":
        (out / name).symlink_to(mine / "thesis.txt")
    else:
        mine.rename(out / name)
    with pytest.raises(DataError, match=rf"out holds other files \({name}\) and would be replaced"):
        prepare(text, out, vocab=310)
    assert (out / name if kind == "a link" else out / name / "thesis.txt").read_text() == "years of work"


def test_a_link_is_refused_before_the_work(text: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    said: list[str] = []
    with pytest.raises(DataError, match="is a symbolic link, and a new folder would take its place; name the folder"):
        prepare_text([str(text)], tmp_path / "out", vocab_size=300, say=said.append)
    assert said == []
    prepare(text, tmp_path / "real")
    prepare(text, tmp_path / "out")  # there is nothing to do


def test_the_current_folder_is_not_replaced(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "shards"
    out.mkdir()
    monkeypatch.chdir(out)
    with pytest.raises(DataError, match="is or holds the current folder"):
        prepare(text, Path())
    monkeypatch.chdir(tmp_path)
    prepare(text, out)
    monkeypatch.chdir(out)
    prepare(text, Path())  # there is nothing to do


def test_a_folder_that_cannot_be_replaced_stays(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, rename, calls = tmp_path / "out", os.rename, []
    prepare(text, out)
    before = contents(out)

    def fail_to_take_the_place(source: Path, target: Path) -> None:
        calls.append(target)
        if calls.count(out) == 2:  # the first finds the old folder there, and the old one is moved away
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_to_take_the_place)
    monkeypatch.setattr("parbank.data.folder.exchange", lambda one, other: False)
    with pytest.raises(DataError, match=r"cannot write to .*Read-only file system"):
        prepare(text, out, vocab=310)
    assert contents(out) == before
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("in", "out")] == []


def test_a_folder_is_never_missing_while_it_is_replaced(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename = tmp_path / "out", os.rename
    prepare(text, out)
    if not exchange(out, text):
        pytest.skip("this file system cannot swap names")
    exchange(out, text)

    def fail_without_it(source: Path, target: Path) -> None:
        if not out.exists():  # a file system that became read-only just then
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_without_it)
    prepare(text, out, vocab=310)
    manifest = read_manifest(out)
    assert manifest is not None
    assert manifest["vocab_size"] == 310
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_folder_comes_back_after_a_kill_while_it_was_replaced(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(text, out)
    before = contents(out)
    code = (
        "import os, sys; from pathlib import Path; import parbank.data.folder; from parbank.data.prepare import prepare_text\n"
        "parbank.data.folder.exchange = lambda one, other: False\n"
        "rename, out = os.rename, Path(sys.argv[2])\n"
        "os.rename = lambda a, b: rename(a, b) if out.exists() else os._exit(9)\n"
        "prepare_text([sys.argv[1]], out, vocab_size=310, say=print)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(text), str(out)], capture_output=True, check=False)
    assert killed.returncode == 9
    assert not out.exists()
    with pytest.raises(DataError, match="vocab"):
        prepare(text, out, vocab=60_000)  # fails after it has looked for what was left
    assert contents(out) == before


def test_replaced_tokens_are_refused_and_made_again(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(text, out)
    before = open_shards(out).fingerprint
    replace_a_token(out)
    for look in (open_shards, describe):
        with pytest.raises(DataError, match=r"text_val_000000\.bin differs from its manifest .*prepare it again"):
            look(out)
    prepare(text, out)
    assert open_shards(out).fingerprint == before


def test_the_cache_repairs_itself(text: Path, tmp_path: Path) -> None:
    first = open_dataset(f"text:{text}", vocab_size=300, cache=tmp_path / "cache", say=lambda line: None)
    before = first.fingerprint
    replace_a_token(first.folder)
    again = open_dataset(f"text:{text}", vocab_size=300, cache=tmp_path / "cache", say=lambda line: None)
    assert again.fingerprint == before


def test_a_second_open_hashes_nothing(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    prepare(text, out)
    open_shards(out)
    hashed: list[Path] = []
    monkeypatch.setattr("parbank.data.manifest._hash", lambda path, whole: hashed.append(path) or "")
    open_shards(out)
    assert hashed == []
    (out / "text_val_000000.bin").touch()
    with pytest.raises(DataError, match="differs from its manifest"):
        open_shards(out)
    assert [path.name for path in hashed] == ["text_val_000000.bin"]


@pytest.mark.parametrize(
    "change",
    [
        b"",
        b"[" * 100_000,
        b"\xff",
        b"[]",
        b'{"made_by": "parbank"}',
        {"train": None},
        {"train": {"shards": [{"name": "../x.bin", "tokens": 1, "sha256": ""}]}},
        {"val": {"shards": []}},
        {"val": {"shards": [{"name": "x.bin"}]}},
        {"inputs": 7},
        {"inputs": [{"path": 7}]},
        {"inputs": [{"path": "a.txt", "size": 1, "mtime_ns": 1}]},
        {"spec": None},
        {"tokenizer": 3},
    ],
)
def test_a_damaged_manifest_is_named_and_the_folder_prepared_again(
    change: bytes | dict, text: Path, tmp_path: Path
) -> None:
    """Without its manifest no shard can be checked: replaced tokens would be scored without a word."""
    out = tmp_path / "out"
    prepare(text, out)
    whole = json.loads((out / MANIFEST).read_bytes())
    before = contents(out)
    (out / MANIFEST).write_bytes(change if isinstance(change, bytes) else json.dumps(whole | change).encode())
    replace_a_token(out)
    for look in (open_shards, describe):
        with pytest.raises(DataError, match=r"out/manifest\.json is damaged .*prepare them again"):
            look(out)
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(ParbankError, match=r"holds other files \(thesis\.txt\)"):
        prepare(text, out)
    (out / "thesis.txt").unlink()
    prepare(text, out)
    assert contents(out) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_folder_with_the_name_of_the_manifest_is_the_users(text: Path, tmp_path: Path) -> None:
    own = tmp_path / "out" / MANIFEST / "thesis.txt"
    own.parent.mkdir(parents=True)
    own.write_text("years of work")
    with pytest.raises(ParbankError, match=r"holds other files \(manifest\.json\)"):
        prepare(text, tmp_path / "out")
    assert own.exists()


def test_a_damaged_manifest_in_the_cache_costs_one_preparation(text: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = open_dataset(f"text:{text}", vocab_size=300, cache=cache, say=lambda line: None)
    (first.folder / MANIFEST).write_bytes(b"{")
    again = open_dataset(f"text:{text}", vocab_size=300, cache=cache, say=lambda line: None)
    assert again.fingerprint == first.fingerprint
    assert [path.name for path in cache.iterdir()] == [first.folder.name]


def test_a_manifest_of_another_program_says_nothing_of_shards(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(text, out)
    (out / MANIFEST).write_text('{"train": ["text_train_000000.bin"], "tokenizer": "ours"}')
    assert read_manifest(out) is None
    assert describe(out)["spec"] is None
    with pytest.raises(ParbankError, match="holds other files"):
        prepare(text, out)


SLOW = """
import sys, time
from parbank.data.prepare import prepare_text
def say(line):
    print(line, flush=True)
    if line.startswith("trained"):
        time.sleep(600)
prepare_text([sys.argv[1]], sys.argv[2], vocab_size=300, say=say)
"""


def test_a_second_preparation_is_told_of_the_first(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", SLOW, str(text), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        while not first.stdout.readline().startswith("trained"):
            assert first.poll() is None
        with pytest.raises(ParbankError, match=f"out is in use by process {first.pid} on .*, since 20"):
            prepare(text, out)
        first.kill()
    began = time.monotonic()
    prepare(text, out)
    assert time.monotonic() - began < 60
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    assert len(np.unique(open_shards(out).val.read(0, 50))) > 5


KILLED_LATE = """
import os, signal, sys
from pathlib import Path
from parbank.data import folder, prepare
folder._remove_prepared = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
prepare.prepare_text([sys.argv[1]], Path(sys.argv[2]), vocab_size=310, say=lambda line: None)
"""


def test_a_kill_after_the_work_was_done_leaves_nothing_for_long(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(text, out)
    subprocess.run([sys.executable, "-c", KILLED_LATE, str(text), str(out)], check=False, timeout=300)
    left = {path.name for path in tmp_path.iterdir()} - {"in", "out"}
    assert ".out.lock" in left
    assert any(name.endswith("-old") for name in left)
    prepare(text, out, vocab=310)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
