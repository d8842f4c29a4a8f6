"""The Markdown files of the repository, and what is in them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```", flags=re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r'^python title="not run: (.+)"$')


class Block(NamedTuple):
    """A fenced block of Python. `reason` says why it is not run."""

    page: Path
    number: int
    code: str
    reason: str | None


def find_pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def find_blocks(page: Path) -> list[Block]:
    found = [match for match in FENCE.finditer(page.read_text()) if match["info"].startswith("python")]
    return [Block(page, number, match["code"], _reason(page, match["info"])) for number, match in enumerate(found, 1)]


def _reason(page: Path, info: str) -> str | None:
    if info == "python":
        return None
    match = NOT_RUN.match(info)
    assert match, f'{page}: a block that is not run begins with ```python title="not run: REASON", got {info!r}'
    return match[1]


def prose_lines(page: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without tables, pictures and targets of links, which cannot be broken."""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not re.match(r"\||!\[|\[[^\]]+\]: ", line):
            yield number, line


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()
