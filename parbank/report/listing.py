"""The runs below a folder: one line each."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from parbank.errors import ConfigError
from parbank.report.record import Record, is_run, read_record
from parbank.report.text import is_number


@dataclass(frozen=True, kw_only=True)
class Line:
    """A run in a list. A number is None where the run has not ended."""

    folder: str
    recipe: str
    minutes: float | None
    """Minutes of the training clock."""
    bytes: int | None
    """Bytes of the artifact, and of the code where it counts."""
    score: float | None
    """Bits per byte of the packed model."""
    state: Literal["ended", "running", "stopped"]
    date: str
    """The end of the run in UTC; of a run that has not ended, when its last row was written."""


SORTS: dict[str, Callable[[Line], Any]] = {
    "date": lambda line: line.date,
    "score": lambda line: line.score,
    "bytes": lambda line: line.bytes,
    "minutes": lambda line: line.minutes,
    "recipe": lambda line: (line.recipe, line.date),
    "folder": lambda line: line.folder,
}


def list_runs(
    folder: Path, *, sort: str = "date", reverse: bool = False, recipe: str | None = None, ended: bool = False
) -> list[Line]:
    """The runs below a folder, `ended` ones only or all, of one recipe or all. Runs without the number they are sorted by
    come last."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; `parbank train` makes runs/, or give another folder")
    if sort not in SORTS:
        raise ConfigError(f"--sort must be one of {', '.join(SORTS)}, got {sort!r}")
    lines = [_describe(record) for record in find_runs(folder)]
    lines = [
        line for line in lines if (recipe is None or line.recipe == recipe) and (not ended or line.score is not None)
    ]
    key = SORTS[sort]
    known = sorted((line for line in lines if key(line) is not None), key=key, reverse=reverse)
    return known + [line for line in lines if key(line) is None]


def find_runs(folder: Path) -> Iterator[Record]:
    """Runs in the order of their folders' names. Links are not followed, and nothing inside a run is another run."""
    for here, inside, _ in os.walk(folder):
        inside.sort()
        path = Path(here)
        if is_run(path):
            inside.clear()
            with suppress(ConfigError):  # another program's config.json
                yield read_record(path, brief=True)


def _describe(record: Record) -> Line:
    summary = record.summary or {}
    seconds = summary.get("train_seconds", record.rows[-1].get("seconds") if record.rows else None)
    size = summary.get("artifact_bytes")
    return Line(
        folder=str(record.folder),
        recipe=record.recipe,
        minutes=seconds / 60 if is_number(seconds) else None,
        bytes=None if size is None else int(size + summary.get("code_bytes", 0)),
        score=summary.get("val_bpb"),
        state="ended" if record.summary else "running" if record.is_going else "stopped",
        date=_date(record),
    )


def _date(record: Record) -> str:
    if isinstance(said := record.details.get("ended_at"), str):
        return said
    for name in ("summary.json", "metrics.jsonl", "config.json"):
        if (path := record.folder / name).exists():
            return datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    return ""
