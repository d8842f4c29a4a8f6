"""Specs find the files they name, documents come out byte for byte, and every unusable file is named."""

import gzip
import json
import lzma
import random
import re
import sys
from pathlib import Path

import pytest
import zstandard

from parbank.data.corpora import Corpus, absolute_spec, parse_corpus, read_documents, stdlib_corpus, text_corpus
from parbank.errors import DataError

ODD = "\ufeffCRLF\r\nlone\rtab\tnul\0\u2581\u00e9\U0001f600 trailing  \n\n".encode()


def documents(corpus: Corpus) -> list[bytes]:
    return [document for path in corpus.files for document in read_documents(corpus, path)]


def refused(why: str, *items: str) -> None:
    with pytest.raises(DataError, match=why):
        documents(text_corpus(items))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "deep" / "er").mkdir(parents=True)
    (root / ".hidden").mkdir()
    (root / "a.txt").write_text("alpha")
    (root / "deep" / "b.md").write_text("beta")
    (root / "deep" / "er" / "c.py").write_text("gamma = 1")
    (root / ".hidden" / "d.txt").write_text("hidden")
    (root / "picture.png").write_bytes(b"\x89PNG\xff")
    return root


def names(corpus: Corpus) -> list[str]:
    return [path.name for path in corpus.train]


def test_files_folders_and_globs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(parse_corpus(f"text:{folder}")) == ["a.txt", "b.md", "c.py"]
    assert names(parse_corpus(f"text:{folder}/*.txt,{folder}/deep")) == ["a.txt", "b.md", "c.py"]
    assert names(parse_corpus(f"text:{folder}/**/*.py")) == ["c.py"]
    assert names(parse_corpus(f"text:{folder}/d*")) == ["b.md", "c.py"]
    assert names(parse_corpus(f"text:{folder}/a.txt,{folder}/a.txt")) == ["a.txt"]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    assert parse_corpus("text:a.txt") == parse_corpus(f"text:{folder}/a.txt") == parse_corpus("text:~/a.txt")


def test_train_and_val_can_be_named(folder: Path) -> None:
    corpus = parse_corpus(f"text:train={folder}/a.txt,{folder}/deep/er,val={folder}/deep/b.md")
    assert names(corpus) == ["a.txt", "c.py"]
    assert [path.name for path in corpus.val] == ["b.md"]
    assert parse_corpus(f"text:{folder}/a.txt,val={folder}/deep/b.md").val == corpus.val
    assert corpus.spec != parse_corpus(f"text:{folder}/a.txt").spec


def test_specs_that_name_nothing(folder: Path) -> None:
    refused("none.txt does not exist", f"{folder}/none.txt")
    refused(r"\*\.rst matches nothing", f"{folder}/*.rst")
    (folder / "empty").mkdir()
    refused("empty holds no text", f"{folder}/empty")
    refused("only val= was given", f"val={folder}/a.txt")
    refused("empty path", f"{folder}/a.txt", "")
    refused(r"a\.txt is in both", f"{folder}", f"val={folder}/a.txt")
    for spec in ("texts:a", "", "STDLIB", "file.txt"):
        with pytest.raises(DataError, match=r"unknown data .* use stdlib, text:PATH"):
            parse_corpus(spec)


def pack(path: Path, data: bytes) -> None:
    match path.suffix:
        case ".gz":
            path.write_bytes(gzip.compress(data))
        case ".xz":
            path.write_bytes(lzma.compress(data))
        case ".zst":  # two frames, as pzstd and appended files have
            half = len(data) // 3
            path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:])))
        case _:
            path.write_bytes(data)


@pytest.mark.parametrize("packed", ["", ".gz", ".xz", ".zst"])
def test_documents_come_out_unchanged(tmp_path: Path, packed: str) -> None:
    plain, lines = tmp_path / f"a.txt{packed}", tmp_path / f"b.jsonl{packed}"
    pack(plain, ODD * 50_000)
    rows = [json.dumps({"id": 1, "text": ODD.decode()}), "", json.dumps({"text": "x\u2028y"}, ensure_ascii=False)]
    pack(lines, "\n".join([*rows, '{"text": ""}', '{"text": "last"}']).encode())
    assert documents(text_corpus([str(plain)])) == [ODD * 50_000]
    assert documents(text_corpus([str(lines)])) == [ODD, "x\u2028y".encode(), b"last"]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_damaged_packed_files_are_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    pack(path, random.Random(0).randbytes(20_000).hex().encode())  # does not pack to nothing
    whole = path.read_bytes()
    for broken in (whole[:-20], whole[: len(whole) // 2], b"no archive at all", whole + b"rubbish"):
        if broken.endswith(b"rubbish") and suffix == ".xz":
            continue  # the lzma module ignores what follows a whole stream
        path.write_bytes(broken)
        refused(rf"a\.txt\{suffix} cannot be unpacked", str(path))


def test_zstd_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt.zst"
    pack(path, b"text")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    refused(r"a\.txt\.zst needs the package zstandard.*pip install", str(path))


def test_files_that_cannot_be_used_are_named(folder: Path) -> None:
    (folder / "latin.txt").write_bytes("caf\u00e9".encode("latin1"))
    refused(r"latin\.txt, byte 3: not UTF-8 \(byte 0xe9\); convert", str(folder))
    (folder / "latin.txt").write_bytes(b"")
    refused(r"latin\.txt is empty; delete it or leave it out", str(folder))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{not json", "line 3 is no JSON"),
        (b'{"body": "x"}', "line 3 has no text, but the fields 'body'"),
        (b'{"text": 7}', "line 3 has no text"),
        (b'["text"]', "line 3 has no text, but list"),
        (b'{"text": "\xff"}', "line 3: not UTF-8"),
        (b'{"text": "\\ud800"}', "line 3: .*surrogate"),
        (b"[" * 100_000, "line 3 is no JSON"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    refused(rf"rows\.jsonl, {why}", str(path))


def test_jsonl_without_any_text_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for content in (b"", b"\n\n", b'{"text": ""}\n'):
        path.write_bytes(content)
        refused(r"rows\.jsonl holds no text", str(path))


def test_stdlib_is_sources_and_help_topics() -> None:
    corpus = parse_corpus("stdlib")
    assert corpus == stdlib_corpus()
    assert not any(re.search("site-packages|dist-packages|__pycache__", str(path)) for path in corpus.train)
    found = documents(corpus)
    assert sum(map(len, found)) > 10_000_000
    assert all(found)
    from pydoc_data.topics import topics

    assert topics["assert"].encode() in found
    assert Path(json.__file__).read_bytes() in found
    for document in found:
        document.decode("utf-8")


def test_a_spec_with_whole_paths_means_the_same_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    assert absolute_spec("text:a.txt,sub/*.md") == f"text:train={here}/a.txt,{here}/sub/*.md"
    assert absolute_spec("text:train=a,b,val=../c") == f"text:train={here}/a,{here}/b,val={tmp_path.parent}/c"
    assert absolute_spec("text:val=a") == f"text:val={here}/a"
    assert absolute_spec("shards:x") == f"shards:{here}/x"
    assert [absolute_spec(spec) for spec in ("stdlib", "fineweb:3", "shards:")] == ["stdlib", "fineweb:3", "shards:"]
    (tmp_path / "a.txt").write_text("text")
    assert parse_corpus(absolute_spec("text:a.txt")) == parse_corpus("text:a.txt")
