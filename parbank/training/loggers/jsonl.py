"""metrics.jsonl: one JSON object for each row."""

import json
from pathlib import Path
from typing import Any

from parbank.config import parse_json
from parbank.files import write_file


class JsonlLogger:
    """Appends rows to metrics.jsonl. Each row is on disk as soon as it is written."""

    def __init__(self, out: Path, *, resume_step: int) -> None:
        path = out / "metrics.jsonl"
        kept = read_rows(path, last_step=resume_step)
        write_file(path, "".join(json.dumps(row) + "\n" for row in kept).encode())  # whole: a kill here loses no row
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (open for the whole run)

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")

    def write_details(self, step: int, details: dict[str, Any]) -> None:
        """Nothing: details.json lies beside the rows."""

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path, *, last_step: int) -> list[dict[str, Any]]:
    """The rows up to a step. A line that is not a row, such as the last line of a killed run, is left out."""
    rows = []
    if path.exists() and last_step:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = parse_json(line)
                if row["step"] <= last_step:
                    rows.append(row)
            except (ValueError, KeyError, TypeError):
                continue
    return rows
