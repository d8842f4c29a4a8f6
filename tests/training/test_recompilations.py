"""Code that is compiled while the clock runs takes time from training: a run counts it."""

from pathlib import Path

import pytest

from parbank.config import override
from parbank.data.dataset import Dataset
from parbank.recipes import get_recipe
from parbank.training import compiled
from parbank.training.telemetry import Reading
from parbank.training.trainer import Trainer
from tests.training.test_trainer import CPU


def test_kernels_built_while_the_clock_runs_are_counted(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_kernels", {True: 0, False: 7})  # seven were built before
    trainer = Trainer(override(get_recipe("nano"), "budget.steps=4", "train.warmup_steps=0"), CPU, dataset, tmp_path)

    def build(reading: Reading) -> None:
        compiled._kernels[reading.step % 2 == 0] += 1

    trainer.train(build)
    trainer.close()
    assert trainer.recompilations == 2
