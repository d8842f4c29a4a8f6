"""Validation during training: when it happens, what it changes (nothing), and where it is shown."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from parbank.config import override
from parbank.data.dataset import Dataset
from parbank.data.shards import TokenSet
from parbank.display import Display
from parbank.errors import ConfigError
from parbank.eval.windows import score_chunked
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from parbank.training.config import RunConfig, TrainConfig
from parbank.training.reports import describe_validation, sparkline, train_with_reports
from parbank.training.trainer import Trainer
from parbank.training.validation import spread

PLACE = Runtime(device=torch.device("cpu"))


def nano(*settings: str) -> RunConfig:
    return override(get_recipe("nano"), "budget.steps=6", "train.warmup_steps=0", "train.log_every=4", *settings)


def train(dataset: Dataset, out: Path, *settings: str) -> tuple[Trainer, list[dict[str, float]], str]:
    trainer = Trainer(nano(*settings), PLACE, dataset, out)
    said = io.StringIO()
    try:
        train_with_reports(trainer, Display(file=said))
    finally:
        trainer.close()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return trainer, rows, said.getvalue()


def test_a_validation_changes_no_weight_and_has_a_row(dataset: Dataset, tmp_path: Path) -> None:
    without, plain, _ = train(dataset, tmp_path / "off")
    trainer, rows, said = train(dataset, tmp_path / "on", "train.validate_every=2steps", "train.validate_tokens=200")
    assert [row["step"] for row in plain] == [1, 4, 6]
    assert [row["step"] for row in rows if "val_bpb" in row] == [2, 4, 6]
    assert [row["step"] for row in rows] == [1, 2, 4, 6]
    for ours, theirs in zip(trainer.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert f"val {rows[-1]['val_bpb']:.4f}" in said
    there = len(dataset.val) // 64
    assert there > 12, "else the windows are not far from each other"
    bits = size = 0.0
    with trainer.averages.applied():
        for sixth in (1, 3, 5):  # 200 tokens are three windows, each in the middle of a third
            window = TokenSet([dataset.val.read(sixth * there // 6 * 64, 64)])
            score = score_chunked(trainer.model, window, dataset.tokenizer, context=64, runtime=PLACE)
            bits, size = bits + score.bits, size + score.bytes
    assert rows[-1]["val_bpb"] == pytest.approx(bits / size, rel=1e-5), "of the averaged weights, as at the end"


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        (40, 8, [8, 9, 10, 11, 28, 29, 30, 31]),
        (43, 4, [20, 21, 22, 23]),  # the middle
        (9, 1000, [0, 1, 2, 3, 4, 5, 6, 7]),  # every whole window
        (3, 8, [0, 1, 2]),
        (8, 1, [4, 5, 6, 7]),
    ],
)
def test_a_sample_is_spread_over_the_text(text: int, tokens: int, expected: list[int]) -> None:
    assert spread(TokenSet([np.arange(text, dtype=np.uint16)]), tokens, 4).tolist() == expected


def test_an_interval_in_seconds_follows_the_clock(dataset: Dataset, tmp_path: Path) -> None:
    trainer = Trainer(nano("train.validate_every=10s", "train.validate_tokens=64"), PLACE, dataset, tmp_path)
    try:
        validator = trainer.validator
        validator.start(0, 0.0)
        assert [validator.is_due(n, seconds, math.inf) for n, seconds in ((1, 9.9), (2, 10.0), (3, 25.0))] == [
            False, True, True,
        ]  # fmt: skip
        validator.start(3, 25.0)
        assert not validator.is_due(4, 29.0, math.inf)
        assert validator.is_due(4, 30.0, math.inf)
        validator.measure()
        assert not validator.is_due(4, 30.0, 0.0), "the promise of the clock comes first"
    finally:
        trainer.close()


def test_weights_that_are_not_finite_end_nothing(dataset: Dataset, tmp_path: Path) -> None:
    trainer = Trainer(nano("train.validate_every=1steps", 'average.use="none"'), PLACE, dataset, tmp_path)
    try:
        with torch.no_grad():
            next(trainer.model.parameters()).fill_(math.nan)
        assert math.isnan(trainer.validator.measure())
    finally:
        trainer.close()


@pytest.mark.parametrize("text", ["", "0s", "ten", "5", "-3s", "1.5steps"])
def test_an_interval_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.validate_every must be off, or an interval such as 30s or 200steps"):
        TrainConfig(validate_every=text)


def test_a_curve_of_blocks() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert sparkline([1.0, math.nan, 1.0]) == "▁ ▁"
    assert sparkline([math.nan]) == ""
    assert len(sparkline([float(n) for n in range(40)])) == 12
    assert describe_validation([], curve=True) == ""
    assert describe_validation([2.0, 1.5], curve=True) == "val 1.5000  █▁  "
    assert describe_validation([2.0, 1.5], curve=False) == "val 1.5000  "
