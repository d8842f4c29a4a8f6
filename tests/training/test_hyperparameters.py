"""What the optimizer and the averages are really given, step by step: schedules are right, and they arrive."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parbank.data.dataset import Dataset
from parbank.errors import ConfigError
from parbank.optim.config import OptimConfig
from parbank.training.trainer import Trainer
from tests.training.test_trainer import CPU, nano, readings_of

STEPS = 8
SETTINGS = (
    f"budget.steps={STEPS}", "optim.warmup_steps=3", "optim.warmdown=0.5", "optim.final_lr=0.2",
    "optim.momentum_start=0.5", "optim.momentum=0.9", "optim.momentum_steps=4",
    "average.swa_every=1", "average.swa_tail=0.7", "average.use=swa",
)  # fmt: skip
# Warm up over three steps, the third at the peak; from half of the budget on a line from 1 to 0.2, whose end is the budget's.
SHARES = [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4]
MOMENTA = [0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.9, 0.9]


@pytest.fixture
def trainer(dataset: Dataset, tmp_path: Path) -> Any:
    trainer = Trainer(nano(*SETTINGS), CPU, dataset, tmp_path)
    yield trainer
    trainer.close()


def test_every_step_gets_its_learning_rate_and_momentum(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    step, given = trainer.optimizer.step, list[list[dict[str, Any]]]()

    def watch() -> None:
        given.append([dict(group) for group in trainer.optimizer.param_groups])
        step()

    monkeypatch.setattr(trainer.optimizer, "step", watch)
    readings = readings_of(trainer)
    assert [reading.lr_share for reading in readings] == pytest.approx(SHARES)
    seen = {"matrix": 0, "other": 0}
    for groups, share, momentum in zip(given, SHARES, MOMENTA, strict=True):
        for group in groups:
            matrix = group["algorithm"] == "muon"
            seen["matrix" if matrix else "other"] += 1
            assert group["lr"] == pytest.approx(group["peak_lr"] * share)
            assert not matrix or group["momentum"] == pytest.approx(momentum)
    assert all(seen.values())


def test_decay_is_constant_or_falls_with_the_learning_rate() -> None:
    config = OptimConfig(warmdown=0.5, final_lr=0.2, warmup_steps=10)
    assert [config.rates(spent, 0).decay_share for spent in (0.0, 0.75, 1.0)] == [1, 1, 1]
    tapered = replace(config, decay_taper=True)
    assert [tapered.rates(spent, 0).decay_share for spent in (0.0, 0.75, 1.0)] == pytest.approx([1, 0.6, 0.2])


def test_decay_arrives(dataset: Dataset, tmp_path: Path) -> None:
    trainer = Trainer(nano(*SETTINGS, "optim.decay_taper=true", "optim.cautious_decay=true"), CPU, dataset, tmp_path)
    readings_of(trainer)
    for group in trainer.optimizer.param_groups:
        assert group["weight_decay"] == pytest.approx(0.04 * SHARES[-1])
        assert group["cautious"] == (group["algorithm"] == "muon")
    trainer.close()


def test_the_tail_that_is_averaged_begins_by_the_learning_rate(trainer: Trainer) -> None:
    """The rise at the beginning is no tail, however low the rate is there."""
    readings_of(trainer)
    assert trainer.averages.state_dict()["snapshots"] == sum(share <= 0.7 for share in SHARES[3:])


def test_the_optimizer_knows_which_matrices_lie_transposed(trainer: Trainer) -> None:
    """Their learning rate goes by the logical shape: up and down are stored in one orientation and are not alike."""
    banks = {id(trainer.model.banks.bank(key)): key for key in trainer.model.banks.entries}
    groups = [group for group in trainer.optimizer.param_groups if group["algorithm"] == "muon"]
    found = {banks[id(parameter)]: group["transposed"] for group in groups for parameter in group["params"]}
    expected = {key: tuple(slot.transposed for slot in slots) for key, slots in trainer.model.banks.entries.items()}
    assert found == expected
    assert any(any(flags) for flags in found.values())


def test_the_polynomial_arrives(dataset: Dataset, tmp_path: Path) -> None:
    trainer = Trainer(nano(*SETTINGS, "optim.coefficients=polar_express"), CPU, dataset, tmp_path)
    matrices = [group for group in trainer.optimizer.param_groups if group["algorithm"] == "muon"]
    trainer.close()
    assert matrices
    assert {group["coefficients"] for group in matrices} == {"polar_express"}
    with pytest.raises(ConfigError, match=r"optim\.coefficients must be one of quintic, polar_express"):
        OptimConfig(coefficients="cubic")
