"""Weights seen as integers: on and off by a tensor, row by row as the model reads them, and without compiling again."""

from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from parbank.config import override
from parbank.model import GPT
from parbank.model.qat import _soften
from parbank.recipes import get_recipe


def make(rounding: Any = "straight", bits: int = 4) -> GPT:
    torch.manual_seed(0)
    model = GPT(override(get_recipe("nano"), "model.layers=3", "model.value_layers=[2]").model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.05)
    model.banks.quantise_in_training(bits=bits, rounding=rounding)
    return model


def loss_of(model: GPT) -> torch.Tensor:
    ids = torch.randint(0, 320, (2, 17), generator=torch.Generator().manual_seed(1))
    return model(ids[:, :-1], ids[:, 1:])


@pytest.mark.parametrize("rounding", ["straight", "soft"])
def test_off_is_off_to_the_bit(rounding: str) -> None:
    model = make(rounding)
    loss = loss_of(model)
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    plain = make(rounding)
    plain.banks.fake = None
    expected = loss_of(plain)
    expected.backward()
    assert torch.equal(loss, expected)
    assert all(
        torch.equal(a, p.grad) for a, p in zip(gradients, plain.parameters()) if a is not None and p.grad is not None
    )


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_on_every_matrix_is_integers_per_row_of_the_model_s_own(bits: int) -> None:
    model = make(bits=bits)
    assert model.banks.fake is not None
    model.banks.fake.turn(True)
    before = {name: matrix.detach() for name, matrix in make(bits=bits).banks.matrices().items()}
    q = 2 ** (bits - 1) - 1
    for name, matrix in model.banks.matrices().items():  # up, and down which is stored transposed, alike
        scale = before[name].abs().amax(1, keepdim=True) / q
        units = matrix.detach() / scale
        assert (units - units.round()).abs().max() < 1e-4, name
        assert torch.equal(units.round().abs().amax(1), torch.full((len(units),), float(q))), name
        assert (matrix.detach() - before[name]).abs().max() <= 0.5001 * scale.max(), name


def test_straight_through_gives_the_gradient_at_the_rounded_weights() -> None:
    model = make()
    assert model.banks.fake is not None
    model.banks.fake.turn(True)
    loss_of(model).backward()
    rounded = make()
    with torch.no_grad():
        for key in rounded.banks.entries:
            rounded.banks.bank(key).copy_(model.banks.fake(key, model.banks.bank(key)))
    loss_of(rounded).backward()
    for key in model.banks.entries:
        torch.testing.assert_close(model.banks.bank(key).grad, rounded.banks.bank(key).grad)


def test_the_soft_staircase() -> None:
    x = torch.linspace(-3, 3, 601, dtype=torch.float64, requires_grad=True)
    y = _soften(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert (y[1:] - y[:-1]).min() > -1e-9
    whole = np.arange(-2, 3)
    assert y.detach()[(whole + 3) * 100].numpy() == pytest.approx(whole, abs=1e-6)
    assert slope[(whole + 3) * 100].numpy() == pytest.approx(np.full(5, slope[350].item() / 14), rel=0.02)
    near = (x.detach() - x.detach().round()).abs() <= 1 / 6
    assert (y.detach() - x.detach().round())[near].abs().max() < 0.05


@pytest.mark.parametrize("rounding", ["straight", "soft"])
def test_the_switch_compiles_nothing(rounding: str) -> None:
    model = make(rounding)
    assert model.banks.fake is not None
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, dynamic=False)
    ids = torch.randint(0, 320, (2, 17), generator=torch.Generator().manual_seed(1))
    losses = []
    for on in (False, True, False, True):
        model.banks.fake.turn(on)
        loss = compiled(ids[:, :-1], ids[:, 1:])
        loss.backward()
        losses.append(loss.item())
    assert counter.frame_count == 1
    assert losses[0] == losses[2]
    assert losses[1] == losses[3]
    assert losses[0] != losses[1]
