"""Several ranks: the same result as one, whatever divides what, and no way to hang."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbank.optim import ParallelMuon
from tests.distributed import run_distributed_test

STEPS = 10
BATCH = 12  # divided by 1, 2, 3 and 4 ranks


class Banked(nn.Module):
    """A bank that 2 and 3 ranks don't divide, its mirror shape, single matrices, a lone matrix, and small parameters."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def make(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) / shape[-1] ** 0.5)

        self.bank = make(7, 8, 8)
        self.up = make(5, 12, 8)
        self.down = nn.ParameterList([make(8, 12) for _ in range(2)])
        self.head = make(6, 8)
        self.gain = make(8)
        self.bias = make(6)

    def forward(self, x: Tensor) -> Tensor:
        for w in self.bank:
            x = x + torch.tanh(x * self.gain @ w.T)
        for i, w in enumerate(self.up):
            x = x + torch.tanh(x @ w.T) @ self.down[i % 2].T
        return x @ self.head.T + self.bias

    def groups(self) -> list[dict[str, Any]]:
        return [
            {"params": [self.bank, *self.down], "lr": 0.02, "weight_decay": 0.1},
            {"params": [self.up], "lr": 0.03, "transposed": (True, False, True, False, False), "normuon": True},
            {"params": [self.head, self.gain, self.bias], "algorithm": "adamw", "lr": 0.01},
        ]


def _data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(BATCH, 8, generator=generator), torch.randn(BATCH, 6, generator=generator)


def _backward(model: Banked, step: int, rank: int, world: int) -> None:
    x, y = (t.chunk(world)[rank] for t in _data(step))
    model.zero_grad()
    (model(x) - y).square().mean().backward()


def _train(
    model: Banked, optimizer: ParallelMuon, rank: int, world: int, first: int = 0, last: int = STEPS
) -> list[float]:
    norms = []
    for step in range(first, last):
        _backward(model, step, rank, world)
        optimizer.step()
        norms.append(optimizer.last_grad_norm.item())
    return norms


def _vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _on_every_world(check: Callable[[int, int, Any], Any]) -> list[Any]:
    """Runs a check on the first 1, 2, 3 and 4 ranks of one set of processes."""
    results = []
    for world in range(1, dist.get_world_size() + 1):
        group = dist.new_group(range(world))
        rank = dist.get_rank()
        results.append(check(rank, world, group) if rank < world else None)
    return results


def _train_on(rank: int, world: int, group: Any) -> tuple[Tensor, list[float], dict[str, Any]]:
    model = Banked()
    optimizer = ParallelMuon(model.groups(), process_group=group, max_norm=0.5)
    norms = _train(model, optimizer, rank, world)
    return _vector(model), norms, optimizer.state_dict()


def _all_train() -> list[Any]:
    return _on_every_world(_train_on)


@pytest.fixture(scope="module")
def trained() -> list[list[Any]]:
    """[rank][world - 1]: weights, gradient norms and state dict after STEPS steps."""
    return run_distributed_test(_all_train, 4)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_equals_one_rank(trained: list[list[Any]], world: int) -> None:
    expected, norms, _ = trained[0][0]
    for rank in range(world):
        found, found_norms, _ = trained[rank][world - 1]
        assert torch.equal(found, trained[0][world - 1][0]), "ranks drifted apart"
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found_norms, norms, rtol=1e-4, atol=0)
    assert max(norms) > 0.5, "the clip must have been at work"
