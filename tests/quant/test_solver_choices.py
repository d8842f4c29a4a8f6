"""What the solver decides tensor by tensor: what an unmeasured tensor is worth, and which way of storing one is cheaper."""

import torch
from torch import Tensor

from parbank.quant.bank import QuantBank
from parbank.quant.calibration import Calibration
from parbank.quant.config import QuantConfig
from parbank.quant.solver import Solver

ROWS, COLS = 24, 64


def make_weights(count: int, outliers: float = 0.0) -> dict[str, Tensor]:
    """Matrices of noise, some with a few directions or columns that stick out."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for number in range(count):
        weight = 0.05 * torch.randn(ROWS, COLS, generator=generator)
        strength = outliers * number / max(count - 1, 1)
        weight += strength * torch.randn(ROWS, 1, generator=generator) @ torch.randn(1, COLS, generator=generator)
        weight[:, :2] += strength * 4 * torch.randn(ROWS, 2, generator=generator)
        found[f"w{number}"] = weight
    return found


def test_a_tensor_that_was_not_measured_counts_like_the_others() -> None:
    """The same weights, one measured and one not: with even curvature both must come out in the same integers."""
    weight = make_weights(1)["w0"]
    tensors = {"measured": weight, "unmeasured": weight.clone()}
    calibration = Calibration(
        hessians={"measured": 3.0 * torch.eye(COLS)}, sensitivity={"measured": torch.full((ROWS,), 2e-4)}, tokens=1
    )
    config = QuantConfig(rotation=False, pruning=0.0)
    solver = Solver(tensors, dict.fromkeys(tensors, "matrix"), calibration, config)
    (bank,) = solver.banks
    torch.testing.assert_close(bank.stiffness[0], bank.stiffness[1])
    contents, _ = solver.contents(1e-9)
    assert (contents["measured"].values == contents["unmeasured"].values).all()
    assert contents["measured"].q > 10, "the steps are fine enough to tell"


def test_a_row_that_happened_to_have_no_gradient_is_not_dropped() -> None:
    """Over few tokens a row's sensitivity is noise; the floor is a thousandth of its tensor's mean."""
    sensitivity = torch.ones(1, ROWS)
    sensitivity[0, 0] = 0.0
    weights, hessians = make_weights(1)["w0"][None], torch.eye(COLS)[None]
    bank = QuantBank.stack(("w0",), weights, hessians, sensitivity, 0.01)
    torch.testing.assert_close(bank.sensitivity[0, 0], 1e-3 * sensitivity.mean())
    assert torch.equal(bank.sensitivity[0, 1:], sensitivity[0, 1:])
    multiplier = 1e-7
    assert bank.round(multiplier).values[0, 0].any()


def test_every_tensor_is_stored_the_way_that_costs_least_of_loss_and_bits_together() -> None:
    tensors, multiplier = make_weights(8, outliers=0.3), 2e-5
    config = QuantConfig(low_rank=2)
    solver = Solver(tensors, dict.fromkeys(tensors, "matrix"), Calibration(), config)
    assert solver.choose(multiplier)
    ((plain, lowered, rotated, both),) = solver.ways
    rounded = [way.round(multiplier) for way in (plain, lowered, rotated, both)]
    losses = torch.stack([r.distortion for r in rounded])
    costs = losses + multiplier * torch.stack([r.bits for r in rounded])
    chosen = {name: (bool(bank.rotation), bank.low_rank is not None) for bank in solver.banks for name in bank.names}
    ways = [(False, False), (False, True), (True, False), (True, True)]
    assert chosen == {name: ways[i] for name, i in zip(plain.names, costs.argmin(0).tolist())}
    assert len(set(chosen.values())) > 1
    assert not torch.equal(costs.argmin(0), losses.argmin(0)), "the bits must matter, or the test sees nothing"
