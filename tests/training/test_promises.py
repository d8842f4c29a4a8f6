"""What the loop keeps to besides its weights: clock, generators and counts across a checkpoint, the schedule, the wait for data."""

import io
import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from parbank.config import override
from parbank.data.batches import BatchStream
from parbank.data.dataset import Dataset
from parbank.display import Display
from parbank.errors import CheckpointError
from parbank.recipes import get_recipe
from parbank.training.checkpoint import load_checkpoint
from parbank.training.config import RunConfig
from parbank.training.reports import train_with_reports
from parbank.training.run import run
from parbank.training.telemetry import Reading
from parbank.training.trainer import Trainer
from tests.training.test_trainer import CPU, readings_of

SECONDS = 6000.0  # of a budget that no test waits for: its clock is set by hand


def nano(*settings: str) -> RunConfig:
    return override(get_recipe("nano"), "train.warmup_steps=0", *settings)


def on_the_clock() -> RunConfig:
    return nano("budget.steps=none", f"budget.minutes={SECONDS / 60}", "optim.warmdown=0.5", "optim.warmup_steps=0")


def resumed(trainer: Trainer, *settings: str) -> Trainer:
    """Another trainer that goes on from a file of this one, with changed settings."""
    path = trainer.save()
    trainer.close()
    assert path is not None
    other = Trainer(override(trainer.config, *settings), CPU, trainer.dataset, trainer.out)
    other.resume(load_checkpoint(path), path)
    return other


def spoil(trainer: Trainer) -> None:
    """Every step but the first has a loss that is not a number."""
    forward = trainer.passes._forward
    trainer.passes._forward = lambda *batch: forward(*batch) * (torch.nan if trainer.step else 1.0)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_resumed_run_has_only_the_time_that_was_left(dataset: Dataset, tmp_path: Path) -> None:
    first = Trainer(on_the_clock(), CPU, dataset, tmp_path)
    readings_of(first, 1)
    assert first.clock.seconds() > 0
    first.clock.set(0.75 * SECONDS)
    first.step = 1000  # or a step would seem to take all of that
    second = resumed(first)
    assert second.clock.seconds() == 0.75 * SECONDS
    assert second.budget.spent(second.step) == 0.75
    (reading,) = readings_of(second, 1)
    second.close()
    assert second.clock.seconds() > 0.75 * SECONDS
    assert reading.lr_share == pytest.approx(0.5, abs=0.02)  # a minute's worth: no machine takes that long to start


def test_the_learning_rate_follows_the_clock_and_not_the_steps(dataset: Dataset, tmp_path: Path) -> None:
    """A clock that is set stands still, so each step's share is known exactly, however long it really took."""
    trainer = Trainer(on_the_clock(), CPU, dataset, tmp_path)
    moments = [0.25, 0.5, 0.55, 0.75, 0.9, 0.2, 1.0]  # even back: the schedule knows no other time
    shares: list[float] = []
    rates: list[float] = []

    def move(reading: Reading) -> None:
        shares.append(reading.lr_share)
        group = trainer.optimizer.param_groups[0]
        rates.append(group["lr"] / group["peak_lr"])
        trainer.clock.set(moments[reading.step] * SECONDS)

    trainer.train(move)
    trainer.close()
    assert shares == pytest.approx([1, 1, 1, 0.9, 0.5, 0.2, 1], abs=1e-9)
    assert rates == pytest.approx(shares)
    assert trainer.step == len(moments), "when the clock is out, so is the run"


def test_a_resumed_run_takes_changed_rates_and_refuses_another_algorithm(dataset: Dataset, tmp_path: Path) -> None:
    first = Trainer(nano(), CPU, dataset, tmp_path)
    readings_of(first, 1)
    second = resumed(first, "optim.matrix_lr=0.5", "optim.adam_weight_decay=0.25")
    groups = second.optimizer.param_groups
    assert {g["peak_lr"] for g in groups if g["algorithm"] == "muon"} == {0.5}
    assert {g["weight_decay"] for g in groups if g["algorithm"] == "adamw"} == {0.25}
    with pytest.raises(CheckpointError, match="trained by muon, and the config asks for adamw"):
        resumed(second, "optim.matrix_algorithm=adamw")


def test_a_resumed_run_draws_what_the_saved_one_would_have(dataset: Dataset, tmp_path: Path) -> None:
    first = Trainer(nano(), CPU, dataset, tmp_path)
    fresh = draw()  # and away from where a new trainer's seed puts the generators
    state = first.state_dict()
    expected = draw()
    assert all(a != b for a, b in zip(fresh, expected))
    first.load_state_dict(state)
    assert draw() == expected
    first.load_state_dict(state)
    second = resumed(first)
    assert draw() == expected
    second.close()


def test_a_warm_up_that_draws_leaves_the_generators_as_they_were(dataset: Dataset, tmp_path: Path) -> None:
    trainer = Trainer(nano("train.warmup_steps=1"), CPU, dataset, tmp_path)
    expected = draw()
    trainer.close()
    trainer = Trainer(nano("train.warmup_steps=1"), CPU, dataset, tmp_path)
    drawn = []
    trainer.model.register_forward_hook(lambda *_: drawn.append(draw()))  # as dropout or random rounding would
    trainer.warm_up()
    trainer.close()
    assert drawn[0] == expected, "the test must be able to see a change"
    assert draw() == expected


def test_skipped_steps_are_counted_across_a_resume(dataset: Dataset, tmp_path: Path) -> None:
    first = Trainer(nano(), CPU, dataset, tmp_path)
    spoil(first)
    readings_of(first, 4)
    assert first.skipped == 3
    second = resumed(first)
    spoil(second)
    assert second.skipped == 3
    readings_of(second, 2)
    second.close()
    assert second.skipped == 5


def test_rows_hold_the_rate_of_the_matrices_at_the_width_of_the_model(dataset: Dataset, tmp_path: Path) -> None:
    """AdamW's rate for matrices falls with the width: that of a model half as wide is twice as high."""
    settings = ("optim.tuned_width=64", "optim.matrix_algorithm=adamw", "optim.matrix_lr=0.001", "optim.warmdown=0")
    trainer = Trainer(nano("budget.steps=1", *settings), CPU, dataset, tmp_path)
    train_with_reports(trainer, Display(enabled=False))
    trainer.close()
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert row["lr"] == trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.002)


def test_waits_and_stalls_are_counted_across_a_resume(dataset: Dataset, tmp_path: Path) -> None:
    first = Trainer(nano("train.warmup_steps=1"), CPU, dataset, tmp_path)
    first.warm_up()
    assert first.wait_seconds == 0, "waiting in the warm-up is not part of training"
    readings_of(first, 4)
    first.stalled_seconds = 3.0
    assert (waited := first.wait_seconds) > 0
    second = resumed(first)
    second.warm_up()
    assert second.wait_seconds == pytest.approx(waited)
    assert second.stalled_seconds == 3
    readings_of(second, 2)
    second.close()
    assert second.wait_seconds > waited


def test_a_slow_stream_shows_in_the_metrics_and_in_the_summary(
    text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without prefetching, each of a step's two passes waits for its batch, in the warm-up as well, which is not counted."""
    slowness, fill = 0.02, BatchStream.fill

    def fill_slowly(stream: BatchStream, out: np.ndarray) -> None:
        time.sleep(slowness)
        fill(stream, out)

    monkeypatch.setattr(BatchStream, "fill", fill_slowly)
    settings = (f"data={json.dumps(text_spec)}", "budget.steps=5", "train.log_every=2", "batch.prefetch=0")
    config = nano(*settings, "train.warmup_steps=1", "quant.method=rows")
    summary = run(config, CPU, tmp_path / "run", display=Display(file=io.StringIO())).summary
    assert summary is not None
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = np.diff([0] + [row["step"] for row in rows])
    waits = np.array([row["data_wait"] for row in rows])
    assert steps.tolist() == [1, 1, 2, 1]
    assert (waits >= 2 * slowness).all()
    assert (waits * steps).sum() == pytest.approx(summary["data_wait_seconds"])
    assert summary["data_wait_seconds"] < summary["train_seconds"]
