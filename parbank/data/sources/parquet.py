"""`parquet:PATH`: parquet files, the usual form of public data sets. A row is a document."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parbank.data.sources.files import OPTIONS, FileKind, FileRequest, parse_items
from parbank.data.sources.source import Source
from parbank.errors import DataError

_ROWS = 1024  # decoded together: enough for speed, few enough to hold
_TEXTS = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


def parse(rest: str) -> FileRequest:
    return parse_items(KIND, rest.split(","))


def _read(path: Path, field: str) -> Iterator[bytes | DataError]:
    """The rows of the column, in order. Only one row group is in memory at a time."""
    pyarrow, parquet = _import_pyarrow(path)
    found, row = False, 0
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(path, field, file.schema_arrow)
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[field]):
                    for value in _as_bytes(batch.column(0), pyarrow).to_pylist():
                        row += 1
                        document = _check_value(value, f"{path}, row {row}")
                        found = found or (isinstance(document, bytes) and bool(document))
                        if document:
                            yield document
    except (pyarrow.ArrowException, OSError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{path} is not a parquet file, or it is damaged ({reason}); copy it again or leave it out"
        ) from error
    if not found:
        raise DataError(f"{path} holds no text: column {field!r} is empty in all {row} rows; leave it out")


def _check_column(path: Path, field: str, schema: Any) -> None:
    kinds = {column.name: column.type for column in schema}
    if str(getattr(kinds.get(field), "value_type", kinds.get(field))) not in _TEXTS:
        found = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise DataError(f"{path} has no column {field!r} with text; choose another by --field, of: {found}")


def _as_bytes(column: Any, pyarrow: Any) -> Any:
    """Arrow does not check that a column of strings is UTF-8, and fails on the whole column where one of them is not."""
    plain = column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column
    return plain.cast(pyarrow.large_binary())


def _check_value(value: bytes | None, place: str) -> bytes | DataError:
    if value is None:
        return DataError(f"{place} has no text (null); fill it in, or skip such rows by --skip-bad")
    try:
        value.decode("utf-8")
        return value
    except UnicodeDecodeError as error:
        return DataError(f"{place}: not UTF-8 ({error.reason} at byte {error.start}); skip such rows by --skip-bad")


def _import_pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        remedy = "install it with pip install 'parbank[parquet]'"
        raise DataError(f"reading {path} needs the package pyarrow, which is missing; {remedy}") from None
    return pyarrow, pyarrow.parquet


KIND = FileKind(
    name="parquet",
    files=".parquet files",
    globs=("*.parquet",),
    read=_read,
    fielded=lambda path: True,
)
SOURCE = Source(
    name="parquet",
    form="parquet:PATH,...",
    help="parquet files, folders and globs; each row is a document, its text in the column --field",
    parse=parse,
    options=OPTIONS,
    package="pyarrow",
)
