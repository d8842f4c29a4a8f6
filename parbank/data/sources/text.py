"""`text:PATH`: the user's own files. A file is one document; in a .jsonl file each line is one.

Documents are UTF-8 bytes, unchanged: no newline is translated and no byte-order mark removed.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from parbank.data.sources.files import OPTIONS, FileKind, FileRequest, parse_items
from parbank.data.sources.source import Identified, Source
from parbank.data.sources.unpack import open_unpacked, plain_name
from parbank.errors import DataError

_HEAD_BYTES = 8192  # git checks as many bytes for a NUL, which marks a binary file


def parse(rest: str) -> FileRequest:
    return parse_paths(rest.split(","))


def parse_paths(items: Iterable[str]) -> FileRequest:
    """The same from separate items; an item may contain commas."""
    return parse_items(KIND, items)


def _is_jsonl(path: Path) -> bool:
    return plain_name(path.name).lower().endswith(".jsonl")


def _read(path: Path, field: str) -> Iterator[bytes | DataError]:
    return _read_jsonl(path, field) if _is_jsonl(path) else _read_plain(path)


def _pass_over(path: Path) -> str:
    with open_unpacked(path) as file:
        head = file.read(_HEAD_BYTES)
    return "binary" if b"\0" in head else "" if head else "empty"


def _read_plain(path: Path) -> Iterator[bytes]:
    with open_unpacked(path) as file:
        document = file.read()
    if not document:
        raise DataError(f"{path} is empty; delete it, leave it out, or skip it by --skip-bad")
    try:
        document.decode("utf-8")
    except UnicodeDecodeError as error:
        if b"\0" in document[:_HEAD_BYTES]:
            raise DataError(
                f"{path} is not UTF-8 and has zero bytes, as binary files have; leave it out, or skip it by --skip-bad. UTF-16 is "
                "converted by iconv -f utf-16 -t utf-8 OLD > NEW; --data parquet:PATH reads parquet"
            ) from None
        raise _not_utf8(f"{path}, byte {error.start}", error) from None
    yield document


def _read_jsonl(path: Path, field: str) -> Iterator[bytes | DataError]:
    found = False
    with open_unpacked(path) as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                document = _parse_line(line, field, f"{path}, line {number}")
            except DataError as error:
                yield error
                continue
            if document:
                found = True
                yield document
    if not found:
        raise DataError(f"{path} holds no text: every line is empty; delete it, leave it out, or skip it by --skip-bad")


def _parse_line(line: bytes, field: str, place: str) -> bytes:
    remedy = (
        f'each line must be a JSON object with the text in a field: choose it by --field, write {{"{field}": "..."}}, or skip '
        "such lines by --skip-bad"
    )
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8(place, error) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON ({error}); {remedy}") from None
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        if not isinstance(row, dict):
            given = type(row).__name__
        elif field in row:
            given = "null there" if text is None else f"a value of type {type(text).__name__} there"
        else:
            given = f"the fields {', '.join(map(repr, row)) or 'none'}"
        raise DataError(f"{place} has no text in {field!r}, but {given}; {remedy}")
    try:
        document, name = text.encode("utf-8"), row.get("id")
        return Identified(document, str(name)) if isinstance(name, str | int) else document
    except UnicodeEncodeError as error:
        sign = ascii(error.object[error.start])
        raise DataError(
            f"{place}: the text holds {sign}, half of a surrogate pair; mend it, or skip it by --skip-bad"
        ) from None


def _not_utf8(place: str, error: UnicodeDecodeError) -> DataError:
    byte = error.object[error.start]
    return DataError(
        f"{place}: not UTF-8 (byte 0x{byte:02x}); convert the file, e.g. iconv -f latin1 -t utf-8 OLD > NEW, leave it out, or "
        "skip it by --skip-bad"
    )


KIND = FileKind(
    name="text",
    files="files (plain or .gz .xz .zst)",
    globs=("*",),
    read=_read,
    fielded=_is_jsonl,
    pass_over=_pass_over,
    earlier_globs=("*.txt", "*.md", "*.py", "*.jsonl"),
)
SOURCE = Source(
    name="text",
    form="text:PATH,...",
    help="UTF-8 files, folders and globs, plain or .gz .xz .zst; each line of a .jsonl file is a document. "
    "text:train=PATH,...,val=PATH,... says which is which",
    parse=parse,
    options=OPTIONS,
)
