"""Files that may be compressed (.gz, .xz, .zst), read as their uncompressed bytes.

A compressed file is one stream, which one core unpacks. So a thread unpacks a large file some blocks ahead, beside the
work on its text.
"""

import gzip
import io
import lzma
import queue
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from parbank.errors import DataError

PACKED_SUFFIXES = (".gz", ".xz", ".zst")
_LARGE = 1 << 20  # bytes of a packed file that is unpacked by a thread: a smaller one takes milliseconds
_BLOCK, _AHEAD = 1 << 20, 16  # unpacked bytes of a block, and how many blocks may wait


def plain_name(name: str) -> str:
    """The name without the suffix of a compressed file: a.jsonl for a.jsonl.gz."""
    stem, dot, suffix = name.rpartition(".")
    return stem if dot + suffix.lower() in PACKED_SUFFIXES else name


@contextmanager
def open_unpacked(path: Path) -> Iterator[BinaryIO]:
    """The uncompressed bytes of a file. Errors name the file, also while reading."""
    opener = {".gz": _open_gzip, ".xz": _open_xz, ".zst": _open_zstd}.get(path.suffix.lower())
    try:
        with _open_as_is(path) if opener is None else _read_ahead(opener(path), path) as file:
            yield file
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} cannot be unpacked ({error}); it is damaged or cut short: copy or pack it again, or skip it by --skip-bad"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _open_as_is(path: Path) -> BinaryIO:
    return open(path, "rb")


def _open_gzip(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb"))


def _open_xz(path: Path) -> BinaryIO:
    return cast(BinaryIO, lzma.open(path, "rb"))


def _open_zstd(path: Path) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(_ZstdReader(path), 1 << 20))


def _read_ahead(file: BinaryIO, path: Path) -> BinaryIO:
    """The file, unpacked by a thread if it is large."""
    return cast(BinaryIO, io.BufferedReader(_Ahead(file), _BLOCK)) if path.stat().st_size >= _LARGE else file


class _Ahead(io.RawIOBase):
    """Reads a file in a thread, at most _AHEAD blocks before they are used. An error in the thread is raised by the read
    that would have met it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._blocks: queue.Queue[bytes | Exception] = queue.Queue(_AHEAD)
        self._stopped = threading.Event()
        self._block: bytes | Exception = b""
        self._used = 0
        self._ended = False
        self._thread = threading.Thread(target=self._read_blocks, name="unpack", daemon=True)
        self._thread.start()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if isinstance(self._block, bytes) and self._used == len(self._block) and not self._ended:
            self._block, self._used = self._blocks.get(), 0
            self._ended = self._block == b""
        if isinstance(self._block, Exception):
            raise self._block
        piece = self._block[self._used : self._used + len(buffer)]
        buffer[: len(piece)] = piece
        self._used += len(piece)
        return len(piece)

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._file.close()
        super().close()

    def _read_blocks(self) -> None:
        block: bytes | Exception = b"more"
        while block and isinstance(block, bytes):
            try:
                block = self._file.read(_BLOCK)
            except Exception as error:
                block = error
            if not self._hand_over(block):
                return

    def _hand_over(self, block: bytes | Exception) -> bool:
        """Waits for room in the queue. False if the file was closed instead."""
        while not self._stopped.is_set():
            try:
                self._blocks.put(block, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False


class _ZstdReader(io.RawIOBase):
    """zstandard's own reader treats a truncated file as complete; this one raises an error."""

    def __init__(self, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            remedy = "install it (pip install zstandard), or unpack the file"
            raise DataError(f"{path} needs the package zstandard, which is missing; {remedy}") from None
        self._zstd = zstandard
        self._file = open(path, "rb")  # noqa: SIM115 (closed by close)
        self._frame = self._next_frame()
        self._waiting = b""
        self._inside = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._waiting:
            block = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._inside = self._next_frame(), False
            block = block or self._file.read(1 << 18)
            if not block:
                if self._inside:
                    raise EOFError("the last zstd frame does not end")
                return 0
            self._inside = True
            try:
                self._waiting = self._frame.decompress(block)
            except self._zstd.ZstdError as error:
                raise EOFError(str(error)) from error
        count = min(len(buffer), len(self._waiting))
        buffer[:count], self._waiting = self._waiting[:count], self._waiting[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()

    def _next_frame(self) -> Any:
        return self._zstd.ZstdDecompressor().decompressobj()
