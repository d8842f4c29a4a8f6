"""Makes pages from folders, and writes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parbank.files import write_file
from parbank.report.comparison import comparison_page
from parbank.report.record import read_record
from parbank.report.run import run_page
from parbank.report.study import study_page

PAGE = "report.html"


def write_run_page(folder: Path) -> Path:
    """The page of a run, in its own folder."""
    return write_pages([folder], folder / PAGE)


def write_study_page(result: dict[str, Any], folder: Path, out: Path) -> Path:
    """The page of a study, from its result as plain data."""
    write_file(out, study_page(result, folder).encode("utf-8", "replace"))
    return out


def write_pages(folders: Sequence[Path], out: Path) -> Path:
    records = [read_record(folder) for folder in folders]
    text = run_page(records[0]) if len(records) == 1 else comparison_page(records)
    write_file(out, text.encode("utf-8", "replace"))
    return out
