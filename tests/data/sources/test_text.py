"""Specs find the files they name, documents come out byte for byte, and every unusable file is named."""

import gzip
import json
import lzma
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from parbank.data.progress import Say
from parbank.data.sources import absolute_spec, parse_spec, remembered_spec
from parbank.data.sources.source import Corpus, Skipped
from parbank.data.sources.text import parse_paths
from parbank.errors import ConfigError, DataError, ParbankError

ODD = "\ufeffCRLF\r\nlone\rtab\tnul\0\u2581\u00e9\U0001f600 trailing  \n\n".encode()


def silent(line: str) -> None: ...


def open_corpus(spec: str, say: Say = silent) -> Corpus:
    corpus = parse_spec(spec).open(Path("no cache"), say)
    assert isinstance(corpus, Corpus)
    return corpus


def documents(corpus: Corpus, skipped: Skipped | None = None) -> list[bytes]:
    return list(corpus.documents(corpus.files, skipped or Skipped()))


def open_paths(*items: str) -> Corpus:
    return parse_paths(items).open(Path("no cache"), silent)


def refused(why: str, *items: str, error: type[ParbankError] = DataError) -> None:
    with pytest.raises(error, match=why):
        documents(open_paths(*items))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "deep" / "er").mkdir(parents=True)
    (root / ".hidden").mkdir()
    (root / "a.txt").write_text("alpha")
    (root / "deep" / "b.md").write_text("beta")
    (root / "deep" / "er" / "c.py").write_text("gamma = 1")
    (root / ".hidden" / "d.txt").write_text("hidden")
    (root / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    return root


def names(corpus: Corpus) -> list[str]:
    return [path.name for path in corpus.train]


def test_files_folders_and_globs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(open_corpus(f"text:{folder}")) == ["a.txt", "b.md", "c.py"]
    assert names(open_corpus(f"text:{folder}/*.txt,{folder}/deep")) == ["a.txt", "b.md", "c.py"]
    assert names(open_corpus(f"text:{folder}/**/*.py")) == ["c.py"]
    assert names(open_corpus(f"text:{folder}/d*")) == ["b.md", "c.py"]
    assert names(open_corpus(f"text:{folder}/a.txt,{folder}/a.txt")) == ["a.txt"]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    assert open_corpus("text:a.txt") == open_corpus(f"text:{folder}/a.txt") == open_corpus("text:~/a.txt")


def test_train_and_val_can_be_named(folder: Path) -> None:
    corpus = open_corpus(f"text:train={folder}/a.txt,{folder}/deep/er,val={folder}/deep/b.md")
    assert names(corpus) == ["a.txt", "c.py"]
    assert [path.name for path in corpus.val] == ["b.md"]
    assert open_corpus(f"text:{folder}/a.txt,val={folder}/deep/b.md").val == corpus.val
    assert corpus.spec != open_corpus(f"text:{folder}/a.txt").spec


def test_specs_that_name_nothing(folder: Path) -> None:
    refused("none.txt does not exist", f"{folder}/none.txt")
    refused(r"\*\.rst matches nothing", f"{folder}/*.rst")
    (folder / "empty").mkdir()
    refused("empty holds no text", f"{folder}/empty")
    refused("empty path", f"{folder}/a.txt", "", error=ConfigError)
    refused("val= without a value", f"{folder}/a.txt", "val=", error=ConfigError)
    refused("names no path", "glob=*.md", error=ConfigError)
    refused(r"a\.txt is in both", f"{folder}", f"val={folder}/a.txt")
    for spec in ("texts:a", "", "STDLIB", "file.txt"):
        with pytest.raises(ConfigError, match=r"unknown data .* use stdlib; text:PATH"):
            open_corpus(spec)


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
    assert documents(open_paths(str(plain))) == [ODD * 50_000]
    assert documents(open_paths(str(lines))) == [ODD, "x\u2028y".encode(), b"last"]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_damaged_packed_files_are_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    pack(path, random.Random(0).randbytes(20_000).hex().encode())  # does not pack to nothing
    whole = path.read_bytes()
    for broken in (whole[:-20], whole[: len(whole) // 2], b"no archive at all", whole + b"rubbish"):
        if broken.endswith(b"rubbish") and suffix == ".xz":
            continue  # the lzma module ignores what follows a whole stream
        path.write_bytes(broken)
        refused(rf"a\.txt\{suffix} cannot be unpacked.*skip it by --skip-bad", str(path))


def test_zstd_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt.zst"
    pack(path, b"text")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    refused(r"a\.txt\.zst needs the package zstandard.*pip install", str(path))


def test_files_that_cannot_be_used_are_named(folder: Path) -> None:
    (folder / "latin.txt").write_bytes("caf\u00e9".encode("latin1"))
    refused(r"latin\.txt, byte 3: not UTF-8 \(byte 0xe9\); convert", str(folder))
    binary = folder.with_name("rows.parquet")
    binary.write_bytes(b"PAR1\x15\x00\xd0\x00")
    refused(r"rows\.parquet is not UTF-8 and has zero bytes.*--data parquet:PATH reads parquet", str(binary))
    (folder / "latin.txt").write_bytes(b"")
    refused(r"latin\.txt is empty; delete it, leave it out, or skip it by --skip-bad", str(folder / "latin.txt"))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{not json", "line 3 is not JSON"),
        (b'{"body": "x"}', "line 3 has no text in 'text', but the fields 'body'"),
        (b'{"text": 7}', "line 3 has no text in 'text', but a value of type int there; each line must"),
        (b'{"text": null}', "line 3 has no text in 'text', but null there; each line must"),
        (b'["text"]', "line 3 has no text in 'text', but list"),
        (b'{"text": "\xff"}', "line 3: not UTF-8"),
        (b'{"text": "\\ud800"}', "line 3: .*surrogate"),
        (b"[" * 100_000, "line 3 is not JSON"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    refused(rf"rows\.jsonl, {why}.*skip .*by --skip-bad", str(path))


def test_jsonl_without_any_text_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for content in (b"", b"\n\n", b'{"text": ""}\n'):
        path.write_bytes(content)
        refused(r"rows\.jsonl holds no text", str(path))


def test_a_folder_gives_every_text_file_and_says_what_it_passed_over(folder: Path) -> None:
    (folder / "Grüße").mkdir()
    (folder / "Grüße" / "日本 語.rst").write_text("日本語のテキスト")
    (folder / "LICENSE").write_text("no suffix")
    (folder / "packed.log.gz").write_bytes(gzip.compress(b"unpacked"))
    (folder / "tar.gz").write_bytes(gzip.compress(b"name" + bytes(600)))
    (folder / "empty.txt").touch()
    (folder / "__init__.py").touch()
    (folder / "broken.txt").symlink_to(folder / "missing")
    (folder / "elsewhere").symlink_to(folder.parent)
    said: list[str] = []
    corpus = open_corpus(f"text:{folder}", said.append)
    assert names(corpus) == ["日本 語.rst", "LICENSE", "a.txt", "b.md", "c.py", "packed.log.gz"]
    assert set(documents(corpus)) == {
        "日本語のテキスト".encode(),
        b"no suffix",
        b"unpacked",
        b"alpha",
        b"beta",
        b"gamma = 1",
    }
    (line,) = said
    assert set(line.removeprefix("passed over: ").split("; ")) == {
        f"1 broken links or special files, such as {folder}/broken.txt",
        f"2 binary, such as {folder}/picture.png",
        f"2 empty, such as {folder}/__init__.py",
        f"1 links to folders, such as {folder}/elsewhere",
    }
    with pytest.raises(DataError, match=r"empty\.txt is empty"):
        documents(open_corpus(f"text:{folder}/empty.txt"))  # named by itself, it is a mistake


def test_what_parbank_wrote_is_not_read_as_text(folder: Path) -> None:
    """`--data text:.` with the default place of runs: the second run must see the same text as the first."""
    before = open_corpus(f"text:{folder}").files
    for name in ("runs/demo-1/config.json", "runs/demo-1/metrics.jsonl", "runs/demo-1/notes/a.txt", "shards/manifest.json",
                 "shards/tokenizer.model", "runs/study/study.json", "runs/study/results/base.0.json",
                 "runs/study/runs/base.0/metrics.jsonl"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    said: list[str] = []
    assert open_corpus(f"text:{folder}", said.append).files == before
    assert "3 folders of runs, studies or shards, such as " in said[0]
    (folder / "runs" / "demo-1" / "metrics.jsonl").unlink()
    assert len(open_corpus(f"text:{folder}").files) == len(before) + 2
    (folder / "runs" / "demo-1" / "metrics.jsonl").touch()
    assert "config.json" in names(open_corpus(f"text:{folder}/runs/demo-1")), "asked for by its own name"


def test_a_glob_narrows_folders_and_nothing_else(folder: Path) -> None:
    (folder / "deep" / "LOUD.MD").write_text("loud")
    (folder / "old.md.gz").write_bytes(gzip.compress(b"old"))
    for parts, expected in (
        ("glob=*.md", ["b.md", "LOUD.MD", "old.md.gz"]),
        ("glob=*.md,glob=*.txt", ["a.txt", "b.md", "LOUD.MD", "old.md.gz"]),
        ("glob=deep/*", ["b.md", "c.py", "LOUD.MD"]),
        ("glob=[ab].*", ["a.txt", "b.md"]),
    ):
        corpus = open_corpus(f"text:{folder},{parts}")
        assert sorted(names(corpus), key=str.lower) == sorted(expected, key=str.lower), parts
    assert "a.txt" in names(open_corpus(f"text:{folder}/a.txt,{folder},glob=*.md")), "a file beside a folder is taken"
    assert names(open_corpus(f"text:{folder}/a.txt,glob=*")) == ["a.txt"]
    for paths in ("a.txt", "*.txt"):
        refused(r"is a folder, so glob=\*\.md picks nothing; leave it out", f"{folder}/{paths}", "glob=*.md")
    refused(r"texts holds no text: of 6 files there, 0 match \*\.rst", str(folder), "glob=*.rst")
    refused(r"texts holds no text: of 6 files there, 1 match \*\.png", str(folder), "glob=*.png")


def test_a_field_other_than_text(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "wrong", "body, or so": "x", "body": "right"}) + "\n")
    (tmp_path / "plain.txt").write_text("plain")
    assert documents(open_corpus(f"text:{tmp_path},field=body")) == [b"plain", b"right"]
    assert documents(open_paths(str(rows), "field=body, or so")) == [b"x"]
    refused(r"rows\.jsonl, line 1 has no text in 'title', but the fields 'text'.*--field", str(rows), "field=title")
    refused(r"field=body picks nothing", f"{tmp_path}/plain.txt", "field=body")
    refused(r"field= is given 2 times: a, b", str(rows), "field=a", "field=b", error=ConfigError)


def test_bad_files_and_lines_are_skipped_when_asked_for_and_counted(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(
        b'{"text": "one"}\n{not json\n{"body": "x"}\n{"text": "two"}\n{"text": "\xff"}\n'
    )
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin1"))
    whole = gzip.compress(random.Random(0).randbytes(5000).hex().encode())
    (tmp_path / "cut.txt.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "odd.txt").symlink_to("/proc/self/mem")  # a file that opens and cannot be read, even by root
    (tmp_path / "good.txt").write_text("good")
    said: list[str] = []
    corpus = open_corpus(f"text:{tmp_path},skip-bad=yes", said.append)
    assert said == [f"passed over: 1 unreadable, such as {tmp_path}/odd.txt (Input/output error)"]
    skipped = Skipped()
    assert documents(corpus, skipped) == [b"good", b"one", b"two"]
    skipped.report(said.append)
    assert skipped.count == 5
    assert said[1].startswith(f"skipped bad files and lines: 5; the first: {tmp_path}/cut.txt.gz cannot be unpacked")
    (tmp_path / "cut.txt.gz").unlink()
    refused(r"cannot read .*odd\.txt", str(tmp_path))
    refused(r"cannot read .*odd\.txt", str(tmp_path / "odd.txt"), "skip-bad=no")
    refused("skip-bad is yes or no, got 'true'", str(tmp_path), "skip-bad=true", error=ConfigError)
    assert names(open_corpus(f"text:{tmp_path}/odd.txt,{tmp_path}/good.txt,skip-bad=yes")) == ["good.txt"]


def test_pipes_broken_links_and_names_too_long(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    (tmp_path / "broken").symlink_to(tmp_path / "gone")
    refused("pipe is a pipe, a device or a broken link", str(tmp_path / "pipe"), "skip-bad=yes")
    refused("broken is a pipe, a device or a broken link", str(tmp_path / "bro*"))
    refused("broken is a pipe, a device or a broken link", str(tmp_path / "broken"))
    refused("does not exist", "x" * 5000)
    refused("does not exist", "nul\0")
    (tmp_path / "odd.txt").symlink_to("/proc/self/mem")
    refused(r"no file of .*odd\.txt can be read", str(tmp_path / "odd.txt"), "skip-bad=yes")
    with pytest.raises(ConfigError, match="unknown data '~nobody"):
        parse_spec("~nobody/" + "x" * 5000)


def test_a_folder_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root every folder can be read, so the system's refusal is made here."""
    scan = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("er"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    refused(r"cannot read the folder .*deep/er: Permission denied", str(folder))
    said: list[str] = []
    assert names(open_corpus(f"text:{folder},skip-bad=yes", said.append)) == ["a.txt", "b.md"]
    assert f"1 unreadable, such as {folder}/deep/er (Permission denied)" in said[0]


def test_a_name_that_is_no_unicode(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt"))
    path.write_text("text")
    assert documents(open_corpus(f"text:{tmp_path}")) == [b"text"]
    assert documents(open_corpus(absolute_spec(f"text:{path}"))) == [b"text"]


def test_a_spec_with_whole_paths_means_the_same_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    assert absolute_spec("text:a.txt,sub/*.md") == f"text:train={here}/a.txt,{here}/sub/*.md,glob=*"
    assert absolute_spec("text:train=a,b,val=../c") == f"text:train={here}/a,{here}/b,val={tmp_path.parent}/c,glob=*"
    assert absolute_spec("text:val=a") == f"text:val={here}/a,glob=*"
    long = f"text:train={here}/a,glob=*.md,glob=x/*,field=body,skip-bad=yes"
    assert absolute_spec("text:field=body,a,skip-bad=yes,glob=*.md,glob=x/*") == long == absolute_spec(long)
    (tmp_path / "a.txt").write_text("text")
    assert open_corpus(absolute_spec("text:a.txt")) == open_corpus("text:a.txt")


def test_every_option_is_a_corpus_of_its_own_and_old_specs_keep_theirs(tmp_path: Path) -> None:
    """Prepared data is found again by Corpus.spec, which must stay what it was before there were options."""
    (tmp_path / "a.jsonl").write_text('{"text": "x", "body": "y"}\n')
    spec = f"text:{tmp_path}"
    assert open_corpus(spec).spec == f"text:train={tmp_path}"
    options = ("", ",glob=*.jsonl", ",glob=a*", ",field=body", ",skip-bad=yes")
    assert len({open_corpus(spec + option).spec for option in options}) == len(options)
    assert open_corpus(f"{spec},glob=*,field=text,skip-bad=no").spec == open_corpus(spec).spec


def test_a_run_from_before_globs_keeps_its_files(tmp_path: Path) -> None:
    """A folder gave .txt, .md, .py and .jsonl, and none of them was looked into."""
    for name in ("a.txt", "b.rst", "c.JSONL.gz", "nul.md"):
        (tmp_path / name).write_bytes(b"nul \0" if name == "nul.md" else b"text")
    old = f"text:train={tmp_path},val={tmp_path}/b.rst"
    corpus = open_corpus(remembered_spec(old))
    assert names(corpus) == ["a.txt", "c.JSONL.gz", "nul.md"]
    assert corpus.spec == old, "data that was prepared then is found"
    new = absolute_spec(f"text:train={tmp_path}/a.txt,val={tmp_path}/b.rst")
    assert remembered_spec(new) == new
    assert [remembered_spec(spec) for spec in ("stdlib", "fineweb:2", "shards:/x")] == [
        "stdlib",
        "fineweb:2",
        "shards:/x",
    ]
