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
