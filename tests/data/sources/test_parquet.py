"""Parquet files as real ones are: several row groups, columns of many types, nulls, damage."""

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parbank.data.dataset import open_dataset
from parbank.data.sources import absolute_spec, parse_spec
from parbank.data.sources.source import Corpus, Skipped
from parbank.errors import DataError

TEXTS = ["first", "zweite Zeile\r\n", "日本\u2028語", "", "last \0"]


def write(path: Path, group: int = 2, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


def open_corpus(spec: str) -> Corpus:
    corpus = parse_spec(spec).open(Path("no cache"), lambda line: None)
    assert isinstance(corpus, Corpus)
    return corpus


def documents(spec: str) -> list[bytes]:
    corpus = open_corpus(spec)
    return list(corpus.documents(corpus.files, Skipped()))


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()), pa.binary()],
    ids=str,
)
def test_rows_are_documents_byte_for_byte(tmp_path: Path, kind: pa.DataType) -> None:
    values = [text.encode() for text in TEXTS] if kind == pa.binary() else TEXTS
    path = write(tmp_path / "a b,é.parquet", id=list(range(5)), text=pa.array(values, kind))
    assert pq.ParquetFile(path).num_row_groups == 3
    assert documents(f"parquet:{tmp_path}") == [text.encode() for text in TEXTS if text]


def test_a_field_picks_the_column_and_a_wrong_one_shows_the_others(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", text=["no"], body=["yes"], score=[0.5])
    assert documents(f"parquet:{path},field=body") == [b"yes"]
    for field in ("title", "score"):
        with pytest.raises(
            DataError, match=rf"no column '{field}' with text.*--field, of: text \(string\), body .*double"
        ):
            documents(f"parquet:{path},field={field}")


def test_folders_globs_and_splits_are_those_of_text(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "notes.txt").write_text("not rows")
    write(tmp_path / "deep" / "train-0.parquet", text=["one"])
    write(tmp_path / "val-0.PARQUET", text=["two"])
    assert sorted(documents(f"parquet:{tmp_path}")) == [b"one", b"two"]
    assert documents(f"parquet:{tmp_path},glob=val*") == [b"two"]
    corpus = open_corpus(f"parquet:train={tmp_path}/deep,val={tmp_path}/val*")
    assert ([p.name for p in corpus.train], [p.name for p in corpus.val]) == (["train-0.parquet"], ["val-0.PARQUET"])
    assert corpus.spec == f"parquet:train={tmp_path}/deep,val={tmp_path}/val*"
    assert absolute_spec(f"parquet:{tmp_path}") == f"parquet:train={tmp_path},glob=*.parquet"


def test_nulls_and_broken_text_are_named_or_skipped(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(pa.string(), 1, pa.array([b"caf\xe9"]).buffers())  # Arrow does not look
    column = pa.chunked_array([pa.array(["one", None, "two"]), broken])
    path = write(tmp_path / "x.parquet", text=column)
    with pytest.raises(DataError, match=r"x\.parquet, row 2 has no text \(null\).*--skip-bad"):
        documents(f"parquet:{path}")
    corpus, skipped = open_corpus(f"parquet:{path},skip-bad=yes"), Skipped()
    assert list(corpus.documents(corpus.files, skipped)) == [b"one", b"two"]
    assert skipped.count == 2
    write(path, text=column.slice(2))
    with pytest.raises(DataError, match=r"row 2: not UTF-8 \(.* at byte 3\)"):
        documents(f"parquet:{path}")
    write(path, text=["", ""])
    with pytest.raises(DataError, match=r"column 'text' is empty in all 2 rows"):
        documents(f"parquet:{path}")


def test_one_row_group_is_read_at_a_time(tmp_path: Path) -> None:
    """The first documents come out of a file whose last row group is damaged: nobody has looked at it yet."""
    texts = [f"{i} " * 500 for i in range(40)]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": texts}), path, row_group_size=10, compression="NONE", use_dictionary=False)
    start = pq.ParquetFile(path).metadata.row_group(3).column(0).data_page_offset
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(b"\xff" * 64)  # over the header of the page
    corpus = open_corpus(f"parquet:{path}")
    stream = corpus.documents(corpus.files, Skipped())
    assert [next(stream) for _ in range(30)] == [text.encode() for text in texts[:30]]
    with pytest.raises(DataError, match=r"x\.parquet is not a parquet file, or it is damaged"):
        next(stream)


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    for content in (b"", b"PAR1", b"no parquet file at all, but long enough to be one"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"x\.parquet is not a parquet file, or it is damaged"):
            documents(f"parquet:{path}")
    with pytest.raises(DataError, match=r"missing\.parquet does not exist; give \.parquet files"):
        documents(f"parquet:{tmp_path}/missing.parquet")


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet", text=["one"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"needs the package pyarrow.*pip install 'parbank\[parquet\]'"):
        documents(f"parquet:{path}")


def test_parquet_and_text_give_the_same_tokens(tmp_path: Path) -> None:
    texts = [f"Document {i} is about {i * i} things, of which {i} are blue.\n" * 20 for i in range(60)]
    write(tmp_path / "x.parquet", group=7, text=texts)
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "texts" / f"{i}.txt").write_text(text)
    specs = (f"parquet:{tmp_path}/x.parquet", f"text:{tmp_path}/texts")
    cache = tmp_path / "cache"
    rows, files = (open_dataset(spec, vocab_size=300, cache=cache, say=lambda line: None) for spec in specs)
    assert rows.fingerprint == files.fingerprint
    assert (rows.folder.name[:8], files.folder.name[:5]) == ("parquet-", "text-")
