"""Places where a fault would show in one step in a thousand, or in a run that nobody repeats."""

import math

import pytest
import torch
from torch import nn

from parbank.optim import ParallelMuon
from parbank.optim.schedules import linear


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_skipped_step_does_not_decay_by_a_rate_on_the_device(algorithm: str) -> None:
    """A weight decay that is a tensor, as in a CUDA graph, is applied in a pass of its own, which must know of the skip."""
    weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    group = {"params": [weight], "algorithm": algorithm, "lr": 0.1, "weight_decay": torch.tensor(0.5)}
    optimizer = ParallelMuon([group])
    before = weight.detach().clone()
    weight.grad = torch.full((8, 8), math.nan)
    optimizer.step()
    assert torch.equal(weight, before)
    weight.grad = torch.zeros(8, 8)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("floor", [0.0, 0.1, 0.5])
def test_the_linear_warmdown_is_one_straight_line_down_to_its_floor(floor: float) -> None:
    values = [linear(0.6 + 0.04 * step, 0.4, floor) for step in range(11)]
    assert values == pytest.approx([1 - (1 - floor) * step / 10 for step in range(11)])


@pytest.mark.parametrize("culprit", ["blocks.0.weight", "gain"])
def test_skipped_steps_are_said_once_with_the_parameter(culprit: str, caplog: pytest.LogCaptureFixture) -> None:
    weights = {"blocks.0.weight": nn.Parameter(torch.eye(4)), "gain": nn.Parameter(torch.ones(4))}
    first, second = weights.items()
    optimizer = ParallelMuon([{"params": [first]}, {"params": [second], "algorithm": "adamw"}], max_norm=1.0)

    def step(name: str | None) -> None:
        for key, weight in weights.items():
            weight.grad = torch.full_like(weight, math.nan if key == name else 1.0)
        optimizer.step()

    step(None)
    assert not caplog.records
    for _ in range(50):
        step(culprit)
    assert len(caplog.records) == 1
    assert f"that of {culprit} of shape" in caplog.text
    optimizer.reset()
    step(culprit)
    assert len(caplog.records) == 2


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_the_default_dtype_changes_nothing(default: torch.dtype, max_norm: float | None) -> None:
    results = []
    for dtype in (torch.float32, default):
        torch.set_default_dtype(dtype)
        try:
            weights = [torch.eye(6, 4, dtype=torch.float32), torch.ones(5, dtype=torch.float32)]
            params = [nn.Parameter(weight) for weight in weights]
            groups = [{"params": params[:1], "normuon": True}, {"params": params[1:], "algorithm": "adamw"}]
            optimizer = ParallelMuon(groups, max_norm=max_norm)
            for step in range(3):
                for param in params:
                    generator = torch.Generator().manual_seed(step)
                    param.grad = torch.randn(param.shape, dtype=torch.float32, generator=generator)
                optimizer.step()
            states = [value for values in optimizer.state.values() for value in values.values()]
            assert {value.dtype for value in states} == {torch.float32}
            results.append([*[p.detach() for p in params], optimizer.last_grad_norm])
        finally:
            torch.set_default_dtype(torch.float32)
    for found, expected in zip(*results):
        assert torch.equal(found, expected)
