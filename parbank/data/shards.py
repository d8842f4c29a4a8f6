"""Token shards in the public layout, and several shards as one stream.

A shard is a header of 256 little-endian int32 (magic, version, number of tokens, zeros), then the tokens as
little-endian uint16. The published FineWeb shards have this layout (from llm.c and modded-nanogpt), so that files can
be exchanged in both directions.
"""

import hashlib
import os
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from parbank.errors import DataError, reason
from parbank.files import writing

MAGIC = 20240520  # of the public layout, as is the version and the size of the header
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
SHARD_TOKENS = 100_000_000  # the size of the published shards: 200 MB a file
TOKEN = np.dtype("<u2")
_BLOCK = 1 << 22  # tokens that are checked together


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Writes one shard under a temporary name and renames it: a reader sees all of it or nothing."""
    path = Path(path)
    if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) > np.iinfo(TOKEN).max):
        raise DataError(f"{path}: tokens must be 0 to 65535, got {int(tokens.min())} to {int(tokens.max())}")
    with writing(path) as file:
        file.write(_header(len(tokens)))
        file.write(np.ascontiguousarray(tokens, dtype=TOKEN).data)


class ShardFile:
    """The tokens of one shard, read from the disk piece by piece, and sliced like an array.

    No memory map: if a mapped file is cut short while it is read, the system ends the process (SIGBUS). A read that
    ends early is an error with the name of the file.
    """

    def __init__(self, path: Path, count: int) -> None:
        self._path, self._count = path, count
        self._handle = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._handle)

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardFile, (self._path, self._count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, piece: slice) -> np.ndarray:
        start, stop, step = piece.indices(self._count)
        tokens = np.empty(max(0, stop - start), dtype=TOKEN)
        room, offset = tokens.view(np.uint8).data, HEADER_BYTES + TOKEN.itemsize * start
        done = 0
        while done < len(room):
            try:
                got = os.preadv(self._handle, [room[done:]], offset + done)
            except OSError as error:
                raise DataError(f"cannot read the shard {self._path}: {error.strerror or error}") from error
            if not got:
                raise DataError(
                    f"{self._path} was cut short while it was read: {self._count} tokens were there at first; "
                    "fetch or prepare it again"
                )
            done += got
        return tokens[::step]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:] if dtype is None else self[:].astype(dtype)


def read_shard(path: Path, *, vocab_size: int) -> ShardFile:
    """The tokens of one shard, after checking header, length and every token."""
    path = Path(path)
    count = shard_length(path)
    try:
        tokens = ShardFile(path, count)
    except OSError as error:
        raise DataError(f"cannot read the shard {path}: {error.strerror or error}") from error
    highest = max(int(block.max()) for block in _blocks(tokens))
    if highest >= vocab_size:
        raise DataError(
            f"{path} holds token {highest}, but the tokenizer has {vocab_size} tokens (0 to {vocab_size - 1}); "
            "the shard belongs to another tokenizer: put the right .model beside it, or make the shards again"
        )
    return tokens


def shard_length(path: Path) -> int:
    """The number of tokens in a shard whose header and size agree. Anything else is an error that names the file."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            header = np.frombuffer(file.read(HEADER_BYTES), dtype="<i4")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the shard {path}: {reason(error)}") from error
    again = "fetch or prepare it again"
    if len(header) < HEADER_INTS:
        raise DataError(f"{path} is not a token shard: {size} bytes, less than its header of {HEADER_BYTES}; {again}")
    magic, version, count = (int(value) for value in header[:3])
    if magic != MAGIC:
        raise DataError(f"{path} is not a token shard: its magic is {magic}, expected {MAGIC}; {again}")
    if version != VERSION:
        raise DataError(f"{path} is a token shard of version {version}, only version {VERSION} can be read; {again}")
    if count <= 0:
        raise DataError(f"{path} says it holds {count} tokens; a shard needs at least one: delete or replace it")
    expected = HEADER_BYTES + count * TOKEN.itemsize
    if size != expected:
        fault = "cut short" if size < expected else "too long"
        raise DataError(
            f"{path} is {fault}: {size} bytes, but its header promises {count} tokens = {expected}; {again}"
        )
    return count


def read_shards(paths: Sequence[Path], *, vocab_size: int) -> "TokenSet":
    """All shards as one stream. Tokens are checked in parallel: the published set has 16 GB."""
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        return TokenSet(list(pool.map(lambda path: read_shard(path, vocab_size=vocab_size), paths)))


class TokenSet:
    """Several shards as one stream of tokens."""

    def __init__(self, shards: Sequence[np.ndarray | ShardFile]) -> None:
        self.shards = tuple(shards)
        self._starts = np.cumsum([0] + [len(shard) for shard in self.shards])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, count: int, out: np.ndarray | None = None) -> np.ndarray:
        """Tokens [start, start + count), across shard edges; copied into `out` (any integer type) where it is given."""
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"tokens {start} to {start + count} were asked for, and there are {len(self)}")
        if out is None:
            out = np.empty(count, dtype=np.uint16)
        elif out.shape != (count,):
            raise ValueError(f"out has shape {out.shape}, {count} tokens need ({count},)")
        done = 0
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        while done < count:
            offset = start + done - int(self._starts[index])
            piece = self.shards[index][offset : offset + count - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            index += 1
        return out


@dataclass(frozen=True)
class ShardInfo:
    """One written shard, as the manifest lists it."""

    name: str
    tokens: int
    sha256: str
    """The sha256 of the tokens, without the header."""


class ShardWriter:
    """Appends tokens to `NAME_SPLIT_000000.bin` and so on, starting a new file when one is full.

    The files are complete only after close(); the caller builds them in a temporary folder.
    """

    def __init__(
        self,
        folder: Path,
        prefix: str,
        *,
        shard_tokens: int = SHARD_TOKENS,
        written: Sequence[ShardInfo] = (),
        tokens: int = 0,
    ) -> None:
        """Continues an earlier writer after its full shards, `written`, and so many `tokens` of the next."""
        self._folder, self._prefix, self._limit = folder, prefix, shard_tokens
        self._written = list(written)
        self._open(tokens)

    def append(self, tokens: np.ndarray) -> None:
        tokens = np.ascontiguousarray(tokens, dtype=TOKEN)
        while len(tokens):
            if self._count == self._limit:
                self._finish()
                self._open()
            piece = tokens[: self._limit - self._count]
            self._file.write(piece.view(np.uint8).data)
            self._hash.update(piece.view(np.uint8).data)
            self._count += len(piece)
            tokens = tokens[len(piece) :]

    def sync(self) -> tuple[list[ShardInfo], int]:
        """Writes everything to the disk. Returns the full shards, and how many tokens the next one has."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._written, self._count

    def close(self) -> list[ShardInfo]:
        """Completes the last file and returns what was written."""
        if self._count or not self._written:
            self._finish()
        return self._written

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _open(self, tokens: int = 0) -> None:
        """Starts the next file, or goes on after so many tokens of it."""
        self._name, self._count = f"{self._prefix}_{len(self._written):06d}.bin", tokens
        mode = "r+b" if tokens else "w+b"
        self._file = open(self._folder / self._name, mode)  # noqa: SIM115 (closed by _finish and __exit__)
        self._hash = hashlib.sha256()
        if not tokens:
            self._file.write(_header(0))
            return
        self._file.truncate(HEADER_BYTES + TOKEN.itemsize * tokens)
        self._file.seek(HEADER_BYTES)
        while block := self._file.read(_BLOCK):
            self._hash.update(block)

    def _finish(self) -> None:
        self._file.seek(0)
        self._file.write(_header(self._count))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._written.append(ShardInfo(self._name, self._count, self._hash.hexdigest()))


def _header(count: int) -> bytes:
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, count
    return header.tobytes()


def _blocks(tokens: np.ndarray | ShardFile) -> Iterator[np.ndarray]:
    for start in range(0, len(tokens), _BLOCK):
        yield tokens[start : start + _BLOCK]
