"""The running Python's library as a corpus."""

import json
import os
import re
from pathlib import Path

import pytest

from parbank.data.sources import parse_spec
from parbank.data.sources.source import Corpus, Skipped
from parbank.errors import ConfigError


def test_stdlib_is_sources_and_help_topics() -> None:
    corpus = parse_spec("stdlib").open(Path("no cache"), lambda line: None)
    assert isinstance(corpus, Corpus)
    assert not any(re.search("site-packages|dist-packages|__pycache__", str(path)) for path in corpus.train)
    found = list(corpus.documents(corpus.files, Skipped()))
    assert sum(map(len, found)) > 10_000_000
    assert all(found)
    from pydoc_data.topics import topics

    assert topics["assert"].encode() in found
    assert Path(json.__file__).read_bytes() in found
    for document in found:
        document.decode("utf-8")


def test_nothing_follows_its_name() -> None:
    with pytest.raises(ConfigError, match=r"stdlib takes nothing after it, got '3\.12'"):
        parse_spec("stdlib:3.12")


def test_installed_packages_are_not_even_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be ten times as many files as the library."""
    for name in ("b.py", "a/deep/c.py", "a/__pycache__/d.py", "site-packages/torch/e.py", "a/note.txt", "test/f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n", encoding="utf-8")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    listed: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (listed.append(str(path)), scandir(path))[1])
    corpus = parse_spec("stdlib").open(Path("no cache"), lambda line: None)
    assert isinstance(corpus, Corpus)
    assert [path.relative_to(tmp_path).as_posix() for path in corpus.train] == ["a/deep/c.py", "b.py", "test/f.py"]
    assert listed
    assert not any("site-packages" in path for path in listed)
