"""Makes pages from folders, and writes them."""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from parbank.errors import FileError
from parbank.files import refuse_link, write_file
from parbank.report.comparison import comparison_page
from parbank.report.page import GENERATOR
from parbank.report.record import CHANGES, DETAILS, clean, read_record
from parbank.report.run import run_page
from parbank.report.study import study_page

PAGE = "report.html"
_HEAD_BYTES = 4096


def write_run_page(folder: Path, summary: dict[str, Any] | None = None) -> Path:
    """The page of a run, in its own folder. A run that is about to end gives the summary that it will write. The page then
    also shows the seconds of its own making. details.json then gets the changes against the recipe, which a later page reads
    more quickly than it makes them."""
    began = time.perf_counter()
    record = read_record(folder)
    if summary is None:
        return _write(folder / PAGE, run_page(record))
    record = replace(record, summary=clean(summary), is_going=False)
    if record.details:
        write_file(folder / DETAILS, json.dumps(record.details | {CHANGES: record.changes}).encode())
    return _write(folder / PAGE, run_page(record, began=began))


def leave_run_page(folder: Path) -> None:
    """The page of a run that has begun and did not end, whatever ended it. Without it the run is as well saved."""
    with suppress(Exception):
        record = read_record(folder)
        if "started_at" in record.details and not record.is_going and not (folder / PAGE).exists():
            write_run_page(folder)


def write_study_page(result: dict[str, Any], folder: Path, out: Path) -> Path:
    """The page of a study, from its result as plain data."""
    return _write(out, study_page(result, folder))


def write_pages(folders: Sequence[Path], out: Path) -> Path:
    records = [read_record(folder) for folder in folders]
    text = run_page(records[0]) if len(records) == 1 else comparison_page(records)
    return _write(out, text)


def _write(out: Path, text: str) -> Path:
    """Writes a page, over an earlier page at most."""
    if os.path.lexists(out) and not _is_page(out):
        raise FileError(f"{out} exists and is no page of parbank; choose another --out, or delete it yourself")
    refuse_link(out)
    write_file(out, text.encode("utf-8", "replace"))
    return out


def _is_page(path: Path) -> bool:
    try:
        return path.is_file() and GENERATOR.encode() in path.read_bytes()[:_HEAD_BYTES]
    except OSError:
        return False
