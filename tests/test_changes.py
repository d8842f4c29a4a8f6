"""docs/design/changes.md says where a change goes: the files it names exist, and the tables are where it says."""

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "design" / "changes.md").read_text(encoding="utf-8")
TABLE = [line for line in PAGE.split("| change |")[1].split("\n\n")[0].splitlines()[2:] if line.startswith("|")]


def test_there_are_twelve_changes() -> None:
    assert len(TABLE) == 12


def test_every_file_and_folder_that_is_named_exists() -> None:
    named = re.findall(r"`((?:[\w.]+/)+(?:[\w.]+)?)`", PAGE)
    assert len(named) > 25
    for name in named:
        path = name if name.startswith(("parbank/", "tests/")) else f"parbank/{name}"
        path = path.removesuffix("NAME.py")
        assert (ROOT / path).exists(), name


def test_every_table_is_where_the_page_says() -> None:
    found = re.findall(r"`([A-Z]+)` in `([\w/]+)\.py`", PAGE)
    assert len(found) == 8
    for name, file in found:
        module = importlib.import_module("parbank." + file.removesuffix("/__init__").replace("/", "."))
        assert isinstance(getattr(module, name), dict), name
