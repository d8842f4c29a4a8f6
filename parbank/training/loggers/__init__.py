"""Where the rows of metrics go: one file for each logger, chosen by `train.loggers`.

A new logger is a file in this folder with a class like `Logger`, and a line in LOGGERS.
"""

from pathlib import Path
from typing import Any, Protocol

from parbank.training.loggers.jsonl import JsonlLogger
from parbank.training.loggers.tensorboard import TensorBoardLogger

Row = dict[str, Any]


class Logger(Protocol):
    """Keeps the rows of one run, which only the first rank writes."""

    def __init__(self, out: Path, *, resume_step: int) -> None:
        """`out` is the folder of the run. Rows after `resume_step` belong to an attempt that was given up: drop them."""

    def write(self, row: Row) -> None:
        """One row: "step", and numbers by name. A number that was not finite is None."""

    def close(self) -> None:
        """Training has ended."""


LOGGERS: dict[str, type[Logger]] = {
    "jsonl": JsonlLogger,
    "tensorboard": TensorBoardLogger,
}
