"""Numbers that a user passes in, changes between steps, and reads back."""

import pytest
import torch
from torch import Tensor, nn

from parbank.errors import ConfigError
from parbank.optim import ParallelMuon


def _step(optimizer: ParallelMuon, seed: int) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
    optimizer.step()


@pytest.mark.parametrize("max_norm", [0, 0.0, -1.0, float("nan")])
def test_a_clip_that_is_not_positive_is_refused(max_norm: float) -> None:
    """-1 would turn every step around, and 0 stop it; both are ways to say "no clip" elsewhere."""
    param = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ConfigError, match="max_norm must be a number above 0, or None for no clip, got"):
        ParallelMuon([param], max_norm=max_norm)
    optimizer = ParallelMuon([param], max_norm=1.0)
    _step(optimizer, 0)
    optimizer.max_norm = max_norm
    before = param.detach().clone()
    with pytest.raises(ConfigError, match="max_norm must be a number above 0"):
        _step(optimizer, 1)
    assert torch.equal(param, before)
    optimizer.max_norm = None
    _step(optimizer, 1)


@pytest.mark.parametrize("option", ["lr", "weight_decay"])
def test_a_number_after_a_tensor_counts(option: str) -> None:
    """Also 0.0, which is what the table held for a tensor."""
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizers = [ParallelMuon([param], lr=0.1, weight_decay=0.1) for param in params]
    optimizers[0].param_groups[0][option] = torch.tensor(0.1)
    for step in range(3):
        for optimizer in optimizers:
            if step == 1:
                optimizer.param_groups[0][option] = 0.0
            _step(optimizer, step)
    assert torch.equal(*params)


def test_what_is_read_after_a_step_stays() -> None:
    optimizer = ParallelMuon([nn.Parameter(torch.ones(4, 4))])
    norms: list[Tensor] = []
    skips: list[Tensor] = []
    counts: list[Tensor] = []
    for step in range(3):
        _step(optimizer, step)
        if step == 2:
            optimizer.param_groups[0]["params"][0].grad[0, 0] = float("nan")
            optimizer.step()
        norms.append(optimizer.last_grad_norm)
        skips.append(optimizer.last_skipped)
        counts.append(optimizer.skipped_in_a_row)
    assert norms[0] != norms[1]
    assert [bool(skip) for skip in skips] == [False, False, True]
    assert [int(count) for count in counts] == [0, 0, 1]
