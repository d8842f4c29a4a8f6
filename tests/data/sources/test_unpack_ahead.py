"""A large packed file is unpacked by a thread: the same bytes, the same errors, and no thread is left behind."""

import gzip
import lzma
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from parbank.data.sources import unpack
from parbank.data.sources.unpack import open_unpacked
from parbank.errors import DataError

TEXT = b"".join(b"line %d of a text\n" % random.Random(0).randrange(10**9) for _ in range(20_000))


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


PACKERS = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.fixture(params=PACKERS, autouse=True)
def suffix(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every file counts as large, and blocks are so small that the queue fills."""
    monkeypatch.setattr(unpack, "_LARGE", 0)
    monkeypatch.setattr(unpack, "_BLOCK", 1000)
    monkeypatch.setattr(unpack, "_AHEAD", 3)
    return request.param


def unpackers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "unpack"]


def write(folder: Path, suffix: str, change: Callable[[bytes], bytes] = lambda data: data) -> Path:
    path = folder / f"text{suffix}"
    path.write_bytes(change(PACKERS[suffix](TEXT)))
    return path


def test_every_byte_arrives(tmp_path: Path, suffix: str) -> None:
    with open_unpacked(write(tmp_path, suffix)) as file:
        assert len(unpackers()) == 1
        assert file.read() == TEXT
        assert file.read() == b"", "the end stays the end"
    with open_unpacked(write(tmp_path, suffix)) as file:
        assert list(file) == TEXT.splitlines(keepends=True)
    assert not unpackers()


def test_an_empty_text_ends_at_once(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"empty{suffix}"
    path.write_bytes(PACKERS[suffix](b""))
    with open_unpacked(path) as file:
        assert file.read() == b""


def test_a_reader_may_leave_early(tmp_path: Path, suffix: str) -> None:
    with open_unpacked(write(tmp_path, suffix)) as file:
        assert file.read(10) == TEXT[:10]
    assert not unpackers()


def test_a_file_cut_short_is_an_error_where_it_ends(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, suffix, lambda data: data[: len(data) // 2])
    read: list[bytes] = []

    def read_all() -> None:
        with open_unpacked(path) as file:
            while len(read) < len(TEXT):
                read.append(file.read(500))

    with pytest.raises(DataError, match="damaged or cut short"):
        read_all()
    assert TEXT.startswith(b"".join(read))
    assert not unpackers()
