"""What a run's folder holds, read without trust: a file may be missing, older than this parbank, or half written."""

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from parbank.errors import ConfigError
from parbank.files import HOLDER, is_running
from parbank.report.text import is_number

Values = dict[str, Any]

NUMBERS = (
    "val_bpb", "val_bpb_before_packing", "val_bytes", "val_tokens", "val_overlap", "max_bytes", "steps", "skipped_steps", "tokens",
    "tokens_per_second", "train_seconds", "stalled_seconds", "setup_seconds", "finish_seconds", "data_wait_seconds", "memory_bytes",
    "params", "world_size", "artifact_bytes", "code_bytes",
)  # fmt: skip
TABLES_OF_NUMBERS = ("setup_parts", "finish_parts", "compressors_bpb", "threads", "sections")
TABLES = (
    "versions",
    "machine",
    "surprise",
    "documents",
    "model",
    "budget",
    "batch",
    "optim",
    "train",
    "quant",
    "tokenizer",
)
DETAILS = "details.json"
CHANGES = "changes"
"""The entry of details.json with `Record.changes`, from the end of a run on: the recipes import PyTorch, which takes longer than
all the rest of a page."""
LISTS = ("tensors", "by_context", "by_place", "samples")


@dataclass(frozen=True)
class Record:
    """One run, finished or not."""

    folder: Path
    config: Values
    rows: Sequence[Values]
    """The rows of metrics.jsonl."""
    summary: Values | None
    """None while the run has not ended."""
    details: Values = field(default_factory=dict)
    """The contents of details.json; empty for a run of an older parbank. Until the run ends, the facts known at its start."""
    name: str = ""
    is_going: bool = False
    """Whether a process trains in the folder now."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.folder.resolve().name)

    @property
    def recipe(self) -> str:
        return str((self.summary or {}).get("recipe") or self.config.get("recipe") or "unknown recipe")

    def fact(self, name: str) -> Any:
        """An entry that the summary has at the end, and details.json from the start on. None if neither has it."""
        return (self.summary or {}).get(name, self.details.get(name))

    def column(self, name: str, x: str) -> list[tuple[float, float]]:
        """(x, value) of the rows that have the number, in the order of x."""
        return sorted((row[x], row[name]) for row in self.rows if row.get(name) is not None and row.get(x) is not None)

    def has(self, name: str) -> bool:
        return any(row.get(name) is not None for row in self.rows)

    @cached_property
    def changes(self) -> dict[str, tuple[Any, Any]] | None:
        """Settings that differ from the recipe's: (the recipe's, the run's). None for a recipe that is unknown: a planned run
        has none, and a later parbank may have others."""
        if CHANGES not in self.details:
            return _compare_with_recipe(self.recipe, self.config)
        kept = self.details[CHANGES]
        if not isinstance(kept, dict):
            return None
        return {key: (pair[0], pair[1]) for key, pair in kept.items() if isinstance(pair, list) and len(pair) == 2}


def read_record(folder: Path, *, brief: bool = False) -> Record:
    """The record of a run's folder. A folder without a config is no run. `brief` leaves out the rows of a run that has
    ended."""
    config = _read_json(folder / "config.json")
    if not config:
        raise ConfigError(
            f"{folder} holds no run: it has no config.json that can be read; give the folder that `parbank train` wrote"
        )
    summary = _read_json(folder / "summary.json") or None
    return Record(
        folder,
        config,
        [] if brief and summary else read_rows(folder / "metrics.jsonl"),
        summary,
        _read_json(folder / DETAILS),
        is_going=is_going(folder),
    )


def is_going(folder: Path) -> bool:
    """Whether a process holds the folder of a run. One of another machine is not ours to judge."""
    try:
        holder = json.loads((folder / HOLDER).read_bytes())
        return is_running(int(holder["pid"])) if holder["host"] == socket.gethostname() else True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_run(folder: Path) -> bool:
    return (folder / "config.json").is_file() and not is_study(folder)


def is_study(folder: Path) -> bool:
    return (folder / "study.json").exists()


def read_rows(path: Path) -> list[Values]:
    """The rows of a metrics file; a line that is no row, such as one that is being written, is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and is_number(row["step"]):
            rows.append({key: value for key, value in row.items() if is_number(value)})
    return rows


def _read_json(path: Path) -> Values:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return clean(found) if isinstance(found, dict) else {}


def clean(values: Values) -> Values:
    """Without the known entries that are of another kind than parbank writes."""
    kept = {key: value for key, value in values.items() if _fits(key, value)}
    for key in kept.keys() & set(TABLES_OF_NUMBERS):
        kept[key] = {name: value for name, value in kept[key].items() if is_number(value)}
    for key in kept.keys() & set(LISTS):
        kept[key] = [one for one in kept[key] if isinstance(one, dict)]
    return kept


def _fits(key: str, value: Any) -> bool:
    if key in NUMBERS:
        return is_number(value)
    if key in LISTS:
        return isinstance(value, list)
    return isinstance(value, dict) or key not in (*TABLES, *TABLES_OF_NUMBERS)


def flatten(values: Values, path: str = "") -> Values:
    """Nested settings by dotted names."""
    found: Values = {}
    for key, value in values.items():
        name = f"{path}.{key}" if path else str(key)
        found.update(flatten(value, name) if isinstance(value, dict) else {name: value})
    return found


def _compare_with_recipe(name: str, config: Values) -> dict[str, tuple[Any, Any]] | None:
    from parbank.config import to_dict
    from parbank.recipes import RECIPES
    from parbank.training.configure import configure_run

    if name not in RECIPES:
        return None
    recipe, mine = flatten(to_dict(configure_run(RECIPES[name]))), flatten(config)
    return {k: (was, mine[k]) for k in mine if k in recipe and (was := _plain(recipe[k])) != mine[k]}


def _plain(value: Any) -> Any:
    """The value as JSON would return it."""
    return json.loads(json.dumps(value))
