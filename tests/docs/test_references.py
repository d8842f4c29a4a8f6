"""REFERENCES.md names what the code names: pull requests, authors, and the files that use each work."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT, name

REFERENCES = (ROOT / "REFERENCES.md").read_text(encoding="utf-8")
AUTHORS = re.compile(
    r"([A-Z][\w-]+(?:(?:, | and )[A-Z][\w-]+)*)"  # Martens and Grosse
    r"(?: et al\.)?,? \(?(?:19|20)\d\d\b"
)
PULL_REQUEST = re.compile(r"(?<!\w)#\d{2,4}\b(?!-)")  # not a section of a page, such as #2026-11-19-a-screen
FILE = re.compile(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?|[a-z_]+\.py)`")


def find_texts() -> Iterator[Path]:
    """All that may credit somebody: the package and the manual."""
    yield from sorted((ROOT / "parbank").rglob("*.py"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def find_missing(text: str) -> list[str]:
    """Credits in a text that REFERENCES.md lacks."""
    found = [match[0] for match in PULL_REQUEST.finditer(text) if not re.search(rf"{match[0]}\b", REFERENCES)]
    for match in AUTHORS.finditer(text):
        names = re.split(", | and ", match[1])
        if not any(re.search(rf"\b{re.escape(author)}\b", REFERENCES) for author in names):
            found.append(match[0])
    return found


def test_every_credit_in_code_and_docs_is_listed() -> None:
    missing = {name(path): found for path in find_texts() if (found := find_missing(path.read_text(encoding="utf-8")))}
    assert not missing


def test_every_file_that_is_named_exists() -> None:
    named = FILE.findall(REFERENCES)
    assert len(named) > 40
    assert not [file for file in named if not (ROOT / "parbank" / file).exists() and not (ROOT / file).exists()]


def test_a_missing_credit_is_found() -> None:
    assert find_missing("After modded-nanogpt #109 and Martens and Grosse 2015.") == []
    assert find_missing("After parameter-golf #9999, see page.md#9998-anchor.") == ["#9999"]
    assert find_missing("(Nobody et al. 2031; Somebody and Another, 1999)") == [
        "Nobody et al. 2031",
        "Somebody and Another, 1999",
    ]
