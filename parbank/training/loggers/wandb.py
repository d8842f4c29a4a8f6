"""Weights & Biases, by its own package (pip install wandb). Its environment variables, such as WANDB_MODE and
WANDB_PROJECT, say where rows go; offline they lie in the folder `wandb` of the run.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np


class WandbLogger:
    """One run of W&B for one run folder: a resumed run goes on under the same id, which the folder's path gives."""

    package = "wandb"

    def __init__(self, out: Path, *, resume_step: int) -> None:
        import wandb

        path = out.resolve()
        self._run = wandb.init(
            dir=str(out),
            name=path.name,
            id=hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:16],
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._histogram = wandb.Histogram

    def write(self, row: dict[str, Any]) -> None:
        """Writes a row. W&B ignores steps that it already has, such as those of an abandoned attempt."""
        values = {name: value for name, value in row.items() if name != "step" and value is not None}
        self._run.log(values, step=row["step"])

    def write_details(self, step: int, details: dict[str, Any]) -> None:
        for number, sample in enumerate(details.get("samples", ())):
            self._run.summary[f"sample_{number}"] = sample["prompt"] + sample["text"]
        if found := details.get("bits_histogram"):
            counts = np.array(found["counts"])
            edges = found["width"] * np.arange(len(counts) + 1)
            self._run.log({"bits_of_a_token": self._histogram(np_histogram=(counts, edges))}, step=step)

    def close(self) -> None:
        self._run.finish()
