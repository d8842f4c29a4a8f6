"""Documents stored in a temporary file during preparation: written once, then read in any order.

The split, the shuffle and the tokenizer's sample need all documents before the first token is written. One temporary
file instead of memory lets a corpus be larger than memory, and be unpacked only once.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from parbank.data.sources.source import Identified
from parbank.errors import DataError

VAL_SHARE = 0.02
_SLICE = 1 << 16


class Document(NamedTuple):
    """One document: the hash of its content, which also orders it, and its position in the file."""

    digest: bytes
    start: int
    size: int


class Spool:
    """A temporary file of documents. add() until seal(), then read()."""

    def __init__(self, path: Path, *, reopen: bool = False) -> None:
        """`reopen`: reads the sealed file of an earlier preparation."""
        self.path = path
        self._file = open(path, "r+b" if reopen else "w+b")  # noqa: SIM115 (closed by __exit__)
        self._size = 0

    def add(self, document: bytes) -> Document:
        self._file.write(document)
        # 16 bytes: 2^64 documents before two of them are expected to collide
        entry = Document(hashlib.sha256(document).digest()[:16], self._size, len(document))
        self._size += len(document)
        return entry

    def seal(self) -> None:
        self._file.flush()

    def sync(self) -> None:
        """Writes everything to the disk."""
        os.fsync(self._file.fileno())

    def read(self, entry: Document) -> bytes:
        """Reads by position, so threads may read at once. A map of the file would count as this process's memory."""
        pieces, done = [], 0
        while done < entry.size:  # the system reads at most 2 GiB at a time
            pieces.append(os.pread(self._file.fileno(), entry.size - done, entry.start + done))
            if not pieces[-1]:
                raise DataError(f"{self._file.name} was cut short while it was in use; prepare the text again")
            done += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def __enter__(self) -> "Spool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def is_held_out(digest: bytes) -> bool:
    """Whether a document validates. It depends on its content alone, so it stays the same when other documents change."""
    return int.from_bytes(digest[:8], "big") < VAL_SHARE * 2**64


def is_dev(document: bytes) -> bool:
    """Whether a training document belongs to `holdout=dev`, which settings are compared on: one in 64, by the sha256 of its
    id, or of its text if it has no id."""
    name = document.id.encode("utf-8", "surrogatepass") if isinstance(document, Identified) else document
    return hashlib.sha256(name).digest()[-1] % 64 == 0


def hold_out(entries: list[Document], dev: set[bytes]) -> tuple[list[Document], list[Document]]:
    """Splits training documents into those outside and inside `dev`, by hash. If none is inside, the document with the
    lowest hash is held out."""
    chosen = dev & {entry.digest for entry in entries} or {min(entries).digest}
    return [e for e in entries if e.digest not in chosen], [e for e in entries if e.digest in chosen]


def split(entries: list[Document], spool: Spool) -> tuple[list[Document], list[Document]]:
    """Training and validation documents: about 2% validate, at least one; of a single document, its end."""
    if len(entries) == 1:
        return _split_document(entries[0], spool.read(entries[0]))
    val = [entry for entry in entries if is_held_out(entry.digest)]
    if not val or len(val) == len(entries):
        val = [min(entries)]
    chosen = set(val)
    return [entry for entry in entries if entry not in chosen], val


def _split_document(entry: Document, document: bytes) -> tuple[list[Document], list[Document]]:
    cut = _cut_point(document)
    head = Document(entry.digest, entry.start, cut)
    tail = Document(entry.digest, entry.start + cut, entry.size - cut)
    return [head] if head.size else [], [tail] if tail.size else []


def batches(entries: Iterable[Document], size: int) -> Iterator[list[Document]]:
    """Documents in groups of about so many bytes, or of one document that has more."""
    batch: list[Document] = []
    bytes_there = 0
    for entry in entries:
        batch.append(entry)
        bytes_there += entry.size
        if bytes_there >= size:
            yield batch
            batch, bytes_there = [], 0
    if batch:
        yield batch


def _cut_point(document: bytes) -> int:
    """The start of the last 2%: after the nearest line end before it, else the next line end, else between characters."""
    target = int(len(document) * (1 - VAL_SHARE))
    before = document.rfind(b"\n", len(document) // 2, target) + 1
    if before:
        return before
    after = document.find(b"\n", target, len(document) - 1) + 1
    if after:
        return after
    while target > 0 and (document[target] & 0xC0) == 0x80:  # inside a character
        target -= 1
    return target


def sample(entries: list[Document], spool: Spool, budget: int) -> Iterator[str]:
    """At most about `budget` bytes of text, spread over the documents, the same for the same documents.

    Small corpora are used whole. Otherwise documents are taken in the order of their hashes, which is random. Long
    documents give evenly spaced slices, so that a book counts for more than its title page and less than the whole.
    """
    if sum(entry.size for entry in entries) <= budget:
        share = budget
    else:
        share = max(4 * _SLICE, budget // len(entries))
    left = budget
    for entry in sorted(entries):
        if left <= 0:
            return
        wanted = min(entry.size, share, max(left, _SLICE))
        left -= wanted
        document = spool.read(entry)
        pieces = max(1, wanted // _SLICE) if wanted < entry.size else 1
        for index in range(pieces):
            begin = index * entry.size // pieces
            yield document[begin : begin + wanted // pieces].decode("utf-8", errors="ignore")  # cut ends of characters
