"""The benchmark of distillation: every paid arm keeps to the budget, and the student learns from its teacher."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.testing import assert_close

from parbank.config import override
from parbank.data.dataset import open_dataset
from parbank.model import GPT
from parbank.recipes import nano
from parbank.runtime import Runtime
from parbank.training.trainer import Trainer


@pytest.fixture
def distillation(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("distillation")


def test_paid_arms_spend_the_budget_and_no_more(distillation: ModuleType) -> None:
    student, larger = nano(), override(nano(), "model.width=64")
    asked = {distillation.LARGER: 0.3, distillation.OWN: 0.5}
    mixtures = {arm: distillation.Mixture(weight=0.5, start=0.2, stop=0.2 + share) for arm, share in asked.items()}
    steps = distillation.plan_steps(student, larger, 1000, 0.3, mixtures)
    own, its = distillation.step_flops(student), distillation.step_flops(larger)
    spent = {
        distillation.LARGER: steps[distillation.SHORT] * its
        + steps[distillation.LARGER] * (own + 0.3 * distillation.forward_flops(larger)),
        distillation.OWN: steps[distillation.OWN] * (own + 0.5 * distillation.forward_flops(student)),
    }
    for arm, flops in spent.items():
        assert 0.99 * 1000 * own < flops <= 1000 * own, arm


def test_the_loss_is_that_of_the_mixture_while_the_teacher_is_asked(
    distillation: ModuleType, text_spec: str, tmp_path: Path
) -> None:
    config = override(nano(), "budget.steps=4")
    dataset = open_dataset(text_spec, vocab_size=config.model.vocab_size, cache=tmp_path)
    trainer = Trainer(config, Runtime(device=torch.device("cpu")), dataset, tmp_path / "run")
    torch.manual_seed(1)
    teacher = GPT(config.model).requires_grad_(False)
    ids, targets = torch.randint(config.model.vocab_size, (2, 2, 16))
    mixture = distillation.Mixture(weight=0.25, start=0.5, stop=1.0)
    text = trainer.model(ids, targets)
    assert_close(distillation.mixed_loss(trainer, lambda _: teacher, mixture, ids, targets), text)
    trainer.step = 2
    logs = trainer.model(ids).log_softmax(-1)
    soft = -(teacher(ids).softmax(-1) * logs).sum(-1).mean()
    found = distillation.mixed_loss(trainer, lambda _: teacher, mixture, ids, targets)
    assert_close(found, 0.75 * text + 0.25 * soft)
    trainer.close()


def test_every_arm_is_trained_scored_and_compared(distillation: ModuleType, text_spec: str, tmp_path: Path) -> None:
    student = nano()
    dataset = open_dataset(text_spec, vocab_size=student.model.vocab_size, cache=tmp_path)
    arms = distillation.LARGER, distillation.OWN, distillation.FREE
    mixtures = dict.fromkeys(arms, distillation.Mixture(weight=0.5, start=0.0, stop=1.0))
    steps = distillation.plan_steps(student, student, 4, 0.5, mixtures)
    runs = {seed: distillation.run_seed(student, student, dataset, steps, mixtures, seed) for seed in (0, 1)}
    assert all(run.keys() == steps.keys() for run in runs.values())
    assert runs[0]["text"] != runs[0]["free teacher"] != runs[0]["own average"]
    rows, compared = distillation.make_rows("text", runs)
    assert set(compared) == {"larger teacher", "own average", "free teacher"}
    pair = [run["own average"] - run["text"] for run in runs.values()]
    assert compared["own average"]["mean"] == pytest.approx(sum(pair) / 2)
    assert len(rows) == 2 * len(steps) + 3
