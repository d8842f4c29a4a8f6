"""TensorBoard events, in the folder `tensorboard` of the run."""

import warnings
from pathlib import Path
from typing import Any


class TensorBoardLogger:
    """Writes each number of a row as a scalar of its name."""

    def __init__(self, out: Path, *, resume_step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside tensorboard's own imports
            from torch.utils.tensorboard import SummaryWriter
        # purge_step hides the events of an abandoned attempt; its files stay.
        self._board = SummaryWriter(str(out / "tensorboard"), purge_step=resume_step + 1)

    def write(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if name != "step" and value is not None:
                self._board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._board.close()
