"""Which text is meant by a data spec, and the documents in it.

    stdlib                               the standard library of the running Python
    text:PATH[,PATH...]                  files, folders or globs; about 2% of the documents are held out for validation
    text:train=PATH[,PATH...],val=PATH   the same, saying which is which (`train=` or `val=` holds until the next one)

Documents are handed on as UTF-8 bytes, unchanged: no newline is translated and no byte-order mark removed.
"""

import glob
import gzip
import io
import json
import lzma
import os
import platform
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from parbank.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
PACKED_SUFFIXES = (".gz", ".xz", ".zst")
_KINDS = "files (.txt .md .py .jsonl, plain or .gz .xz .zst), folders or globs"


@dataclass(frozen=True)
class Corpus:
    """A body of text: its files, and which of them are validation."""

    name: str
    """Short: begins the names of its shards."""
    spec: str
    """What was asked for, with absolute paths: two corpora are the same request when their specs are equal."""
    train: tuple[Path, ...]
    val: tuple[Path, ...] = ()
    """Empty: validation is chosen from the training documents by a hash of their content."""

    @property
    def files(self) -> tuple[Path, ...]:
        return self.train + self.val


def parse_corpus(spec: str) -> Corpus:
    """The corpus a `stdlib` or `text:` spec names, its files found and listed."""
    if spec == "stdlib":
        return stdlib_corpus()
    if spec.startswith("text:"):
        return text_corpus(spec.removeprefix("text:").split(","))
    raise DataError(f"unknown data {spec!r}; use stdlib, text:PATH, text:train=PATH,val=PATH, shards:DIR or fineweb")


def absolute_spec(spec: str) -> str:
    """The same spec with whole paths: what a run folder remembers must not depend on where one stands."""
    kind, _, rest = spec.partition(":")
    if kind == "text":
        return _spell(_read_items(rest.split(",")))
    return f"shards:{_whole(rest)}" if kind == "shards" and rest else spec


def text_corpus(items: Iterable[str]) -> Corpus:
    """A corpus of the user's own files. Each item is a path, a folder or a glob, `train=` or `val=` before it or not."""
    chosen = _read_items(items)
    if not chosen["train"]:
        raise DataError("no training text: only val= was given; add train=PATH before it")
    train, val = (_find_all(chosen[name]) for name in ("train", "val"))
    both = sorted(set(train) & set(val))
    if both:
        raise DataError(f"{both[0]} is in both train= and val=; a file can only be one of them")
    return Corpus(name="text", spec=_spell(chosen), train=train, val=val)


def _read_items(items: Iterable[str]) -> dict[str, list[str]]:
    """Whole paths by split."""
    split, chosen = "train", {"train": list[str](), "val": list[str]()}
    for item in items:
        head, sign, tail = item.partition("=")
        if sign and head.strip() in chosen:
            split, item = head.strip(), tail  # noqa: PLW2901
        if not item.strip():
            raise DataError(
                f"an empty path among the text inputs; write text:PATH or text:train=PATH,val=PATH, with {_KINDS}"
            )
        chosen[split].append(_whole(item.strip()))
    return chosen


def _spell(chosen: dict[str, list[str]]) -> str:
    return "text:" + ",".join(f"{name}={','.join(paths)}" for name, paths in chosen.items() if paths)


def _whole(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def stdlib_corpus() -> Corpus:
    """The running Python's own library, tests included, without what was installed into it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    outside = {"site-packages", "dist-packages", "__pycache__"}
    files = [path for path in root.rglob("*.py") if not outside.intersection(path.relative_to(root).parts)]
    if not files:
        raise DataError(f"no standard library sources under {root}; use text:PATH with text of your own")
    spec = f"stdlib:{platform.python_version()}:{root}"
    return Corpus(name="stdlib", spec=spec, train=tuple(sorted(files)))


def read_documents(corpus: Corpus, path: Path) -> Iterator[bytes]:
    """The documents in one of the corpus's files: UTF-8, never empty."""
    if corpus.name == "stdlib":
        return _read_stdlib(path)
    return _read_jsonl(path) if _plain_suffix(path) == ".jsonl" else _read_plain(path)


def _find_all(patterns: list[str]) -> tuple[Path, ...]:
    """Every file the patterns reach, each once, in an order that does not depend on the file system."""
    return tuple(sorted({path for pattern in patterns for path in _find(pattern)}))


def _find(pattern: str) -> list[Path]:
    path = Path(pattern)
    if path.is_dir():
        return _search(path)
    if path.exists():
        return [path]
    matches = [Path(match) for match in glob.glob(pattern, recursive=True)]
    if not matches:
        what = "matches nothing" if glob.has_magic(pattern) else "does not exist"
        raise DataError(f"{pattern} {what}; give {_KINDS}")
    return [file for match in matches for file in (_search(match) if match.is_dir() else [match])]


def _search(folder: Path) -> list[Path]:
    """The text files under a folder, by their suffix; hidden files and folders are left alone."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(place, name)
            for name in names
            if not name.startswith(".") and _plain_suffix(Path(name)) in TEXT_SUFFIXES and Path(place, name).is_file()
        ]
    if not found:
        raise DataError(f"the folder {folder} holds no text; looked for {' '.join(TEXT_SUFFIXES)}, plain or packed")
    return found


def _plain_suffix(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED_SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _read_plain(path: Path) -> Iterator[bytes]:
    with _open(path) as file:
        document = file.read()
    if not document:
        raise DataError(f"{path} is empty; delete it or leave it out")
    try:
        document.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{path}, byte {error.start}", error) from None
    yield document


def _read_jsonl(path: Path) -> Iterator[bytes]:
    found = False
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            document = _parse_line(line, f"{path}, line {number}")
            if document:
                found = True
                yield document
    if not found:
        raise DataError(f"{path} holds no text: every line is empty; delete it or leave it out")


def _parse_line(line: bytes, place: str) -> bytes:
    remedy = 'each line must be a JSON object with a "text" field, such as {"text": "..."}'
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8(place, error) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is no JSON ({error}); {remedy}") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        given = f"the fields {', '.join(map(repr, row)) or 'none'}" if isinstance(row, dict) else type(row).__name__
        raise DataError(f"{place} has no text, but {given}; {remedy}")
    try:
        return cast(str, row["text"]).encode("utf-8")
    except UnicodeEncodeError as error:
        sign = ascii(error.object[error.start])
        raise DataError(f"{place}: the text holds {sign}, half of a surrogate pair; mend or remove that line") from None


def _read_stdlib(path: Path) -> Iterator[bytes]:
    """Help topics are documents of their own. Empty files, and the few tests that are deliberately no UTF-8, are passed over."""
    if path.parts[-2:] == ("pydoc_data", "topics.py"):
        from pydoc_data.topics import topics

        yield from (text.encode("utf-8") for text in topics.values())
        return
    with _open(path) as file:
        document = file.read()
    try:
        document.decode("utf-8")
    except UnicodeDecodeError:
        return
    if document:
        yield document


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """The unpacked bytes of a file; whatever is wrong with it is reported under its name, also while reading."""
    opener = {".gz": _open_gzip, ".xz": _open_xz, ".zst": _open_zstd}.get(path.suffix.lower(), _open_as_is)
    try:
        with opener(path) as file:
            yield file
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} cannot be unpacked ({error}); it is damaged or cut short: copy or pack it again"
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


class _ZstdReader(io.RawIOBase):
    """zstandard's own reader takes the end of a file that was cut short for the end of the text; this one says so."""

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


def _not_utf8(place: str, error: UnicodeDecodeError) -> DataError:
    byte = error.object[error.start]
    return DataError(
        f"{place}: not UTF-8 (byte 0x{byte:02x}); convert the file, e.g. iconv -f latin1 -t utf-8 OLD > NEW, or leave it out"
    )
