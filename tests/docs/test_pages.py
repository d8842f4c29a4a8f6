"""What every page promises: links that lead somewhere, lines and pages of readable length, a true file tree."""

import re
from pathlib import Path

import pytest

from parbank import ops
from tests.docs.pages import FENCE, ROOT, find_pages, name, prose_lines

LINK = re.compile(r"(?:\]\(|^\[[^\]]+\]: )([^)\s]+)", flags=re.MULTILINE)
GENERATED = {"docs/reference/cli.md", "docs/reference/settings.md"}  # docs/hooks.py makes them when the site is built
COLUMNS = 120
WORDS = 800
MANUAL_WORDS = 18_500  # without the log, which keeps every experiment and grows
TABLES = {"compatibility.md", "levers.md", "measurements.md"}  # written by benchmarks and tests, and not counted
README_LINES = 150
START_LINES = 6
OWN = {"changes", "faults", "files", "promises", "ranks"}  # pages about this repository alone


@pytest.mark.parametrize("page", find_pages(), ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [target for target in LINK.findall(FENCE.sub("", page.read_text())) if not _leads_somewhere(page, target)]
    assert not broken


def _leads_somewhere(page: Path, target: str) -> bool:
    if re.match(r"https?://", target):
        return True
    path, _, anchor = target.partition("#")
    linked = (page.parent / path).resolve() if path else page
    if linked.is_relative_to(ROOT) and name(linked) in GENERATED:
        return True
    if not linked.is_relative_to(ROOT) or not linked.exists():
        return False
    return not anchor or anchor in _anchors(linked)


def _anchors(page: Path) -> set[str]:
    """The names that mkdocs and GitHub give to headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = ROOT / "docs" / "log" / "index.md"
    assert _leads_somewhere(page, "step.md#what-did-not-pay")
    assert not _leads_somewhere(page, "step.md#what-paid")
    assert not _leads_somewhere(page, "no-such-page.md")
    assert not _leads_somewhere(page, str(tmp_path)), "a path of this machine"


@pytest.mark.parametrize("page", find_pages(), ids=name)
def test_lines_are_short(page: Path) -> None:
    long = [number for number, line in prose_lines(page) if len(line) > COLUMNS]
    assert not long, f"lines over {COLUMNS} columns: {long}"


def count_words(page: Path) -> int:
    return len([word for word in page.read_text().split() if re.search(r"\w", word)])


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "design").glob("*.md")), ids=name)
def test_a_design_page_is_short(page: Path) -> None:
    assert count_words(page) <= WORDS


def test_the_manual_is_short() -> None:
    log = ROOT / "docs" / "log"
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name not in TABLES and page.parent != log]
    assert sum(map(count_words, pages)) <= MANUAL_WORDS, "say it shorter, or leave out what a docstring says"


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "design").glob("*.md")), ids=name)
def test_a_design_page_says_what_it_builds_on(page: Path) -> None:
    assert ("REFERENCES.md)" in page.read_text()) != (page.stem in OWN)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "guide").glob("*.md")), ids=name)
def test_a_guide_page_begins_with_a_command(page: Path) -> None:
    """Or with six lines of Python: right after its title, before any prose."""
    found = re.match(r"# [^\n]+\n\n```(python)?\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert found
    assert len([line for line in found[2].splitlines() if line.strip()]) <= START_LINES


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < README_LINES


def test_the_file_tree_is_true() -> None:
    """Every file and folder that README's tree names exists, and every room of the package is named."""
    tree = re.search(r"^```\nparbank/\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert tree
    inside = [line[2:].split("   ")[0].split("  ") for line in tree[1].splitlines() if re.match(r"  \S", line)]
    rooms = {entry.strip() for line in inside for entry in line}
    outside = {line.split()[0] for line in tree[1].splitlines() if re.match(r"\S", line)}
    assert not [room for room in rooms if not (ROOT / "parbank" / room).exists()]
    assert not [folder for folder in outside if not (ROOT / folder).exists()]
    package = {f"{path.name}/" for path in (ROOT / "parbank").iterdir() if (path / "__init__.py").exists()}
    files = {path.name for path in (ROOT / "parbank").glob("*.py") if not path.name.startswith("__")}
    assert package | files <= rooms, f"README's tree lacks {sorted((package | files) - rooms)}"


def test_the_nav_of_the_site_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    folders = [ROOT / "docs" / folder for folder in ("guide", "reference", "design")]
    pages = [page.relative_to(ROOT / "docs").as_posix() for folder in folders for page in folder.glob("*.md")]
    assert not [page for page in pages if page not in nav]


def test_the_page_on_ops_names_every_op() -> None:
    page = (ROOT / "docs" / "design" / "ops.md").read_text()
    assert not [op for op in ops.__all__ if f"`{op}`" not in page]
