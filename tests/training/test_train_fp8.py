"""train.fp8: it reaches the passes of training and nothing else, and is refused where it cannot run."""

import math
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from parbank.config import override
from parbank.data.dataset import Dataset
from parbank.errors import ConfigError
from parbank.model import GPT
from parbank.ops.fp8 import MIN_CAPABILITY, Parts
from parbank.recipes import RECIPES, get_recipe
from parbank.runtime import Runtime
from parbank.training.passes import Passes
from parbank.training.run import run
from parbank.training.telemetry import Reading
from parbank.training.trainer import Trainer
from parbank.training.warmup import warm_up

CPU = torch.device("cpu")


def make(*changes: str) -> GPT:
    torch.manual_seed(0)
    model = GPT(override(get_recipe("nano"), *changes).model)
    with torch.no_grad():
        for matrix in model.banks.matrices().values():
            if not matrix.any():  # what writes to the residual stream starts at zero, and would hide all of the MLP
                matrix.normal_(std=0.05)
    return model


def gradients(model: GPT, fp8: Parts) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    model.fp8 = fp8
    passes = Passes(model, model, CPU, 1, graph=False, precision="float32")
    passes.start()
    passes.add(torch.randint(0, 320, (2, 33), generator=torch.Generator().manual_seed(1)))
    return passes.loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_every_recipe_leaves_it_off() -> None:
    assert {get_recipe(name).train.fp8 for name in RECIPES} == {"off"}


@pytest.mark.parametrize("activation", ["leaky_relu_squared", "gelu"])
@pytest.mark.parametrize("fp8", ["mlp", "head", "mlp+head"])
def test_it_changes_the_passes_by_rounding(fp8: Parts, activation: str) -> None:
    model = make(f"model.activation={activation}")
    loss, plain = gradients(model, "off")
    rounded_loss, rounded = gradients(model, fp8)
    assert rounded_loss != loss
    assert rounded_loss == pytest.approx(loss, rel=0.01)
    assert rounded.keys() == plain.keys()
    for name in ("banks.96x32", "token_embedding.weight"):
        off = ((rounded[name] - plain[name]).norm() / plain[name].norm()).item()
        assert 0 < off < 0.2, name


def test_the_mlp_alone_leaves_the_head_alone() -> None:
    """A new model's MLP writes nothing yet, rounded or not; its head does."""
    torch.manual_seed(0)
    model = GPT(get_recipe("nano").model)
    loss, _ = gradients(model, "off")
    assert gradients(model, "mlp")[0] == loss
    assert gradients(model, "head")[0] != loss


@pytest.mark.parametrize("activation", ["leaky_relu_squared", "gelu"])
def test_what_is_scored_knows_nothing_of_it(activation: str) -> None:
    model = make(f"model.activation={activation}")
    ids = torch.randint(0, 320, (2, 17), generator=torch.Generator().manual_seed(2))
    before = model.eval()(ids[:, :-1], ids[:, 1:])
    gradients(model.train(), "mlp+head")
    assert torch.equal(model.eval()(ids[:, :-1], ids[:, 1:]), before)


def test_the_compiler_notices_the_switch() -> None:
    """Compiled for each way once, whatever the order."""
    parts: list[Parts] = ["off", "mlp+head"]
    model, counter = make("model.layers=1", "model.value_layers=[0]", "model.xsa_layers=1"), CompileCounter()
    compiled = torch.compile(model, backend=counter, dynamic=False)
    ids = torch.randint(0, 320, (2, 17), generator=torch.Generator().manual_seed(2))
    losses = []
    for each in parts * 2:
        model.fp8 = each
        losses.append(compiled(ids[:, :-1], ids[:, 1:]).item())
    assert counter.frame_count == 2
    assert losses[:2] == losses[2:]
    assert losses[0] != losses[1]


def test_a_bad_number_reaches_the_loss_and_the_gradients() -> None:
    """So that the optimizer sees it and skips the step."""
    model = make()
    with torch.no_grad():
        model.banks.bank("96x32")[1, 3, 4] = float("nan")
    loss, found = gradients(model, "mlp+head")
    assert math.isnan(loss)
    assert not torch.isfinite(found["token_embedding.weight"]).any()


def test_a_cpu_is_refused_before_any_work(tmp_path: Path) -> None:
    config = override(get_recipe("nano"), "train.precision=auto", "train.fp8=mlp", "data=text:/nowhere/at/all")
    with pytest.raises(ConfigError, match=r"capability 8\.9"):
        run(config, Runtime(device=CPU), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"capability 8\.9"):
        warm_up(config, Runtime(device=CPU), print)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["train.fp8=attention"], "must be one of 'off', 'mlp'"),
        (["train.fp8=mlp", "model.mlp_multiple=3.25"], r"mlp_multiple is 104; .* multiple of 16"),
        (["train.fp8=head", "model.vocab_size=321"], r"vocab_size is 321; .* multiple of 16"),
        (["train.fp8=head", "model.width=40", "model.heads=2"], r"model.width is 40; .* multiple of 16"),
    ],
)
def test_what_cannot_be_is_refused(changes: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        override(get_recipe("nano"), "train.precision=auto", *changes)


def test_sides_matter_only_where_they_are_used() -> None:
    override(get_recipe("nano"), "train.precision=auto", "train.fp8=head", "model.mlp_multiple=3.25")
    override(get_recipe("nano"), "train.precision=auto", "train.fp8=mlp", "model.vocab_size=321")


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_training_on_a_gpu(compiled: bool, dataset: Dataset, tmp_path: Path) -> None:
    """Captured once as a graph, nothing waits, and the losses are those without it but for rounding."""
    if torch.cuda.get_device_capability() < MIN_CAPABILITY:
        pytest.skip("this GPU does not multiply in 8 bits")
    losses: dict[str, list[float]] = {}
    for fp8 in ("off", "mlp+head"):
        settings = (
            "budget.steps=40",
            "train.warmup_steps=3",
            "train.log_every=1000",
            f"train.fp8={fp8}",
            "train.precision=auto",
        )
        config = override(get_recipe("nano"), *settings, f"train.compile={str(compiled).lower()}")
        trainer = Trainer(config, Runtime(device=torch.device("cuda", 0)), dataset, tmp_path / fp8)
        trainer.warm_up()
        readings: list[Reading] = []
        trainer.train(readings.append)
        trainer.close()
        assert trainer.passes.captures == 1, "while warming up"
        assert not trainer.skipped
        losses[fp8] = [reading.loss for reading in readings]
    assert losses["mlp+head"][0] != losses["off"][0]
    assert losses["mlp+head"] == pytest.approx(losses["off"], rel=0.05)
    assert losses["mlp+head"][-1] < 0.9 * losses["mlp+head"][0]
