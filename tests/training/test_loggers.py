"""Loggers: rows that survive a kill, and are dropped where the checkpoint never saw them."""

import json
import math
import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import parbank
from parbank.config import override
from parbank.data.dataset import Dataset
from parbank.display import Display
from parbank.errors import ConfigError
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from parbank.training.loggers import LOGGERS, check_loggers
from parbank.training.metrics import Metrics, finite, memory_bytes
from parbank.training.reports import train_with_reports
from parbank.training.telemetry import Reading
from parbank.training.trainer import Trainer


def row(step: int, loss: float = 1.0) -> dict[str, Any]:
    return {"step": step, "loss": loss, "tokens": 512 * step}


def rows(out: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (out / "metrics.jsonl").read_text().splitlines()]


def events(out: Path, name: str) -> list[tuple[int, float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside tensorboard
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(out / "tensorboard")).Reload()
        return [(event.step, event.value) for event in found.Scalars(name)]


class Loggers:
    """The loggers that need no other package, fed with the same rows. tests/integrations has the others."""

    def __init__(self, out: Path, resume_step: int = 0) -> None:
        self.all = [LOGGERS[name](out, resume_step=resume_step) for name in ("jsonl", "tensorboard")]

    def write(self, row: dict[str, Any]) -> None:
        for logger in self.all:
            logger.write(finite(row))

    def close(self) -> None:
        for logger in self.all:
            logger.close()


def test_rows_are_on_disk_as_soon_as_they_are_written(tmp_path: Path) -> None:
    loggers = Loggers(tmp_path)
    for step in (1, 5, 10):
        loggers.write(row(step, loss=step / 2))
        assert rows(tmp_path)[-1] == row(step, loss=step / 2)
    loggers.close()
    assert events(tmp_path, "loss") == [(1, 0.5), (5, 2.5), (10, 5.0)]
    assert events(tmp_path, "tokens") == [(1, 512.0), (5, 2560.0), (10, 5120.0)]


def test_a_loss_that_is_no_number_is_null(tmp_path: Path) -> None:
    loggers = Loggers(tmp_path)
    loggers.write(row(1))
    loggers.write(row(2, loss=math.nan))
    loggers.write(row(3, loss=math.inf))
    loggers.close()
    assert [r["loss"] for r in rows(tmp_path)] == [1.0, None, None]
    assert events(tmp_path, "loss") == [(1, 1.0)]
    assert len(events(tmp_path, "tokens")) == 3


def test_a_resumed_run_drops_what_its_checkpoint_never_saw(tmp_path: Path) -> None:
    loggers = Loggers(tmp_path)
    for step in (1, 5, 10, 15):
        loggers.write(row(step))
    loggers.close()
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('7\n"text"\n{"loss": 1}\n{"step": "x"}\n{"step": 20, "lo')  # what a kill or an editor may leave
    time.sleep(1.1)  # TensorBoard reads its files in the order of their names, which hold the second they were made in
    loggers = Loggers(tmp_path, 10)
    assert [r["step"] for r in rows(tmp_path)] == [1, 5, 10]
    for step in (11, 15):
        loggers.write(row(step, loss=9.0))
    loggers.close()
    assert [r["step"] for r in rows(tmp_path)] == [1, 5, 10, 11, 15]
    assert events(tmp_path, "loss") == [(1, 1.0), (5, 1.0), (10, 1.0), (11, 9.0), (15, 9.0)]


def test_a_folder_used_again_from_the_start_forgets_the_first_attempt(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        loggers = Loggers(tmp_path)
        loggers.write(row(1, loss))
        loggers.close()
    assert rows(tmp_path) == [row(1, 2.0)]
    assert events(tmp_path, "loss") == [(1, 2.0)]


def test_memory_is_of_this_process() -> None:
    assert 2**26 < memory_bytes(torch.device("cpu")) < 2**40


class Collector:
    """A logger that somebody adds: it keeps rows in memory."""

    rows: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, out: Path, *, resume_step: int) -> None:
        assert out.is_dir()
        self.rows.clear()

    def write(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.rows.append({"closed": True})


def test_a_registered_logger_gets_the_rows(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOGGERS, "collector", Collector)
    config = override(get_recipe("nano"), "budget.steps=3", "train.log_every=2", 'train.loggers=["collector"]')
    trainer = Trainer(config, Runtime(device=torch.device("cpu")), dataset, tmp_path)
    try:
        train_with_reports(trainer, Display(enabled=False))
    finally:
        trainer.close()
    assert [row.get("step") for row in Collector.rows] == [1, 2, 3, None]
    assert Collector.rows[-1] == {"closed": True}
    assert list(tmp_path.iterdir()) == [], "no other logger was asked for"


def test_other_ranks_log_nothing(dataset: Dataset, tmp_path: Path) -> None:
    trainer = Trainer(
        override(get_recipe("nano"), "budget.steps=2"), Runtime(device=torch.device("cpu")), dataset, tmp_path
    )
    reading = Reading(step=0, lr_share=1.0, loss=1.0, grad_norm=1.0, skipped=0, skipped_in_a_row=0, seconds=0.1)
    try:
        for rank, files in ((1, []), (0, ["metrics.jsonl", "tensorboard"])):
            trainer.runtime = Runtime(device=torch.device("cpu"), rank=rank, world=2)
            with closing(Metrics(trainer)) as metrics:
                metrics.add(reading)
                metrics.write_details({})
            assert sorted(path.name for path in tmp_path.iterdir()) == files
    finally:
        trainer.close()


def test_an_unknown_logger_is_refused_with_the_choices() -> None:
    with pytest.raises(
        ConfigError, match=r"train\.loggers must be one of jsonl, tensorboard, wandb, got 'tensorbord'; did you"
    ):
        override(get_recipe("nano"), 'train.loggers=["tensorbord"]')


def test_a_logger_without_its_package_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOGGERS["wandb"], "package", "no_such_package")
    settings = ['train.loggers=["jsonl","wandb"]']
    message = (
        r"train\.loggers names wandb, whose package is not installed; pip install no_such_package, or leave wandb out"
    )
    with pytest.raises(ConfigError, match=message):
        parbank.train(recipe="nano", data="text:nowhere", out=tmp_path / "run", settings=settings)
    (tmp_path / "mere_folder").mkdir()
    monkeypatch.setattr(LOGGERS["wandb"], "package", "mere_folder")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="not installed"):
        check_loggers(["wandb"])
    check_loggers(["jsonl", "tensorboard"])


def test_tensorboard_has_the_samples_and_the_histogram_of_bits(tmp_path: Path) -> None:
    logger = LOGGERS["tensorboard"](tmp_path, resume_step=0)
    logger.write(row(3))
    samples = [{"prompt": "", "text": "<b>one</b>\ntwo"}, {"prompt": "The", "text": " sea"}]
    logger.write_details(3, {"samples": samples, "bits_histogram": {"width": 0.5, "counts": [4, 0, 2]}})
    logger.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside tensorboard
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        texts = [found.Tensors(f"sample/{n}/text_summary")[0].tensor_proto.string_val[0] for n in (0, 1)]
        assert texts == [b"    <b>one</b>\n    two", b"    The sea"]
        histogram = found.Histograms("bits_of_a_token")[0]
    assert histogram.step == 3
    assert (histogram.histogram_value.num, histogram.histogram_value.max) == (6, 1.5)
