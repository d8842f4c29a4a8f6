"""Loggers of metrics, one file each, selected by `train.loggers`.

A new logger is a file in this folder with a class like `Logger`, and a line in LOGGERS.
"""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from parbank.config import require
from parbank.training.loggers.jsonl import JsonlLogger
from parbank.training.loggers.tensorboard import TensorBoardLogger
from parbank.training.loggers.wandb import WandbLogger

Row = dict[str, Any]


class Logger(Protocol):
    """Stores the rows of one run. Only the first rank writes.

    `package`, if a class has it, is a package that it imports and that parbank does not install by itself.
    """

    def __init__(self, out: Path, *, resume_step: int) -> None:
        """`out` is the folder of the run. Rows after `resume_step` belong to an abandoned attempt: drop them."""

    def write(self, row: Row) -> None:
        """Writes one row: "step", and numbers by name. A non-finite number is None."""

    def write_details(self, step: int, details: dict[str, Any]) -> None:
        """Writes parts of details.json that the logger can show, such as samples, when the run is scored. `step` is the last."""

    def close(self) -> None:
        """The run has ended, or stopped."""


LOGGERS: dict[str, type[Logger]] = {
    "jsonl": JsonlLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
}


def check_loggers(names: Iterable[str]) -> None:
    """Refuses a logger whose package is missing, before any work: nobody would see its rows."""
    for name in names:
        package = getattr(LOGGERS[name], "package", "")
        found = find_spec(package) if package else None
        require(
            not package or (found is not None and found.origin is not None),  # a mere folder of that name has no origin
            f"train.loggers names {name}, whose package is not installed; pip install {package}, or leave {name} out",
        )
