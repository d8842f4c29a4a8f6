"""The running Python's library as a corpus."""

import json
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
