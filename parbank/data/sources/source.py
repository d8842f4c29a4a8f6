"""The interface of a source of text: a parsed request, and documents or shards when the request is opened."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from parbank.data.progress import Say
from parbank.errors import DataError


class Identified(bytes):
    """A document whose source names it, as a line of .jsonl does by its field `id`."""

    id: str

    def __new__(cls, document: bytes, id: str) -> "Identified":
        made = super().__new__(cls, document)
        made.id = id
        return made


class Skipped:
    """Counts the documents that `skip-bad=yes` leaves out, and keeps the first reason."""

    def __init__(self) -> None:
        self.count = 0
        self.first: DataError | None = None

    def add(self, error: DataError) -> None:
        self.count += 1
        self.first = self.first or error

    def report(self, say: Say) -> None:
        if self.count:
            say(f"skipped bad files and lines: {self.count:,}; the first: {self.first}")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A body of text: its files, and the files that are validation text."""

    name: str
    """Short: begins the names of its shards."""
    spec: str
    """The spec with absolute paths: two corpora are the same request when their specs are equal."""
    train: tuple[Path, ...]
    """Empty: there is text to score and none to train on."""
    val: tuple[Path, ...] = ()
    """Empty: validation is chosen from the training documents by a hash of their content."""
    read: Callable[[Path], Iterator[bytes | DataError]] = field(compare=False)
    """The documents of one file: UTF-8, never empty. A bad line is yielded as its error, so that later lines follow."""
    skip_bad: bool = False
    """Whether bad files and lines are left out, and counted, instead of ending the work."""
    holdout: str = ""
    """dev: the validation part is taken from the training documents, and the validation text is not used at all."""

    @property
    def files(self) -> tuple[Path, ...]:
        return self.train + self.val

    def documents(self, paths: Iterable[Path], skipped: Skipped) -> Iterator[bytes]:
        """The documents of these files, in order."""
        for path in paths:
            try:
                for piece in self.read(path):
                    if isinstance(piece, bytes):
                        yield piece
                    elif self.skip_bad:
                        skipped.add(piece)
                    else:
                        raise piece
            except DataError as error:
                if not self.skip_bad:
                    raise
                skipped.add(error)


class ParsedSpec(Protocol):
    """A parsed spec. No file has been opened yet."""

    @property
    def spec(self) -> str:
        """The request with absolute paths and all its options, as a run folder stores it."""

    def open(self, cache: Path, say: Say) -> Corpus | Path:
        """Documents to prepare, or a folder of shards that are ready."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One kind of text: how its spec is written, and how the spec is read."""

    name: str
    """The word before the colon."""
    form: str
    """The form of the whole spec."""
    help: str
    """Its meaning, for `--help`."""
    parse: Callable[[str], ParsedSpec]
    """Parses the text after the colon into a request."""
    options: tuple[str, ...] = ()
    """The parts `NAME=VALUE` that it takes, among glob, field, skip-bad and holdout."""
    tokens: bool = False
    """Whether it is shards already, which need no preparing."""
    public: bool = False
    """Whether the spec names the same text on any machine, so that an artifact may say it."""
    package: str = ""
    """The optional package that it needs."""
