"""Send the metrics of a run to a place of your own: python examples/custom_logger.py FOLDER [STEPS]

A logger is a class with `write` and `close`. Its name in LOGGERS is what `train.loggers` takes.
"""

import csv
import sys
from pathlib import Path
from typing import Any

import parbank
from parbank.training.loggers import LOGGERS


class CsvLogger:
    """Writes metrics.csv in the folder of the run."""

    def __init__(self, out: Path, *, resume_step: int) -> None:
        self._file = open(out / "metrics.csv", "a" if resume_step else "w", newline="")  # noqa: SIM115 (open for the run)
        self._writer: csv.DictWriter[str] | None = None

    def write(self, row: dict[str, Any]) -> None:
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, list(row))
            self._writer.writeheader()
        self._writer.writerow(row)

    def close(self) -> None:
        self._file.close()


LOGGERS["csv"] = CsvLogger
if len(sys.argv) < 2:
    raise SystemExit(__doc__)
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 100
settings = {"train.loggers": ["jsonl", "csv"]}
run = parbank.train(
    recipe="nano", data=f"text:{sys.argv[1]}", steps=steps, settings=settings, out="runs/csv", quiet=True
)
print((run.folder / "metrics.csv").read_text())
