"""benchmarks/step.py measures the trainer's own step, on weights that are not zero."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from parbank.config import override
from parbank.recipes import get_recipe
from parbank.training.config import TrainConfig


@pytest.fixture
def step(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("step")


def test_ours_is_what_ships(step: ModuleType) -> None:
    assert step.VARIANTS["ours"] == step.Variant(), "no setting differs from the recipe's"
    assert TrainConfig().cuda_graph
    assert not TrainConfig().compile, "the text of step.py says that ours is not compiled"
    for variant in step.VARIANTS.values():
        override(get_recipe("golf"), *variant.settings)


def test_a_step_trains(step: ModuleType) -> None:
    made = step.Step(get_recipe("nano"), torch.device("cpu"))
    try:
        trainer = made.trainer
        assert all(matrix.any() for matrix in trainer.model.banks.matrices().values())
        before = [p.detach().clone() for p in trainer.model.parameters()]
        made.accumulate()
        gradients = [p.grad.clone() for p in trainer.model.parameters()]
        put_back = made.keep_gradients()
        made.update()
        assert not all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
        assert not any(p.grad.any() for p in trainer.model.parameters() if p.grad is not None), (
            "the section clears them"
        )
        put_back()
        assert all(torch.equal(a, p.grad) for a, p in zip(gradients, trainer.model.parameters(), strict=True))
        made.train()
        assert trainer.step == 1
    finally:
        made.close()
