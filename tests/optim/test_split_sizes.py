"""A joint matrix whose blocks of rows have their own heights trains as those blocks do as parameters of their own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parbank.errors import ConfigError
from parbank.optim import ParallelMuon

SIZES = {"query, key, value": (8, 4, 4), "gate and up": (6, 10), "equal": (4, 4, 4), "one": (8,)}


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("stack", [0, 3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_equals_parameters_of_their_own(sizes: tuple[int, ...], stack: int, dtype: torch.dtype) -> None:
    shape = (stack, sum(sizes), 6) if stack else (sum(sizes), 6)
    joint = nn.Parameter(_random(0, *shape).to(dtype))
    parts = [nn.Parameter(part.clone()) for part in joint.detach().split(sizes, dim=-2)]
    options: dict[str, Any] = {
        "lr": 0.1, "weight_decay": 0.1, "normuon": True, "cautious": True, "lr_scale": "rms", "max_norm": 1.0,
    }  # fmt: skip
    together = ParallelMuon([{"params": [joint], "split_sizes": sizes}], **options)
    apart = ParallelMuon(parts, **options)
    for step in range(3):
        grad = _random(step + 1, *shape).to(dtype)
        joint.grad = grad.clone()
        for param, part in zip(parts, grad.split(sizes, dim=-2)):
            param.grad = part.clone()
        together.step()
        apart.step()
    assert float(together.last_grad_norm) == pytest.approx(float(apart.last_grad_norm), rel=1e-5)
    torch.testing.assert_close(joint.detach(), torch.cat([p.detach() for p in parts], dim=-2), rtol=1e-4, atol=1e-5)


def test_a_checkpoint_goes_on_exactly() -> None:
    params = [nn.Parameter(_random(0, 16, 6)) for _ in range(2)]
    optimizers = [ParallelMuon([{"params": [p], "split_sizes": [8, 4, 4], "normuon": True}]) for p in params]
    for step in range(4):
        for param, optimizer in zip(params, optimizers):
            param.grad = _random(step + 1, 16, 6)
            optimizer.step()
        if step == 1:
            saved = optimizers[0].state_dict()
            assert saved["state"][0]["momentum_buffer"].shape == (16, 6)
            assert saved["state"][0]["row_moment.1"].shape == (2, 4)
            optimizers[1] = ParallelMuon([{"params": [params[1]], "split_sizes": (8, 4, 4), "normuon": True}])
            optimizers[1].load_state_dict(saved)
    assert torch.equal(*params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_sizes": (8, 4)}, "16 rows, and .* has 12 in all"),
        ({"split_sizes": (16, 0)}, "give the height of each block"),
        ({"split_sizes": (8, 8), "num_heads": 2}, "both num_heads=2 and split_sizes"),
        ({"split_sizes": (8, 8), "transposed": (True,)}, "one or the other"),
    ],
)
def test_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelMuon([{"params": [nn.Parameter(torch.zeros(16, 6))], **options}])


def test_refuses_rows_that_are_not_contiguous() -> None:
    with pytest.raises(ConfigError, match=r"split_sizes=.* splits rows, which must be contiguous"):
        ParallelMuon([{"params": [nn.Parameter(torch.zeros(6, 16).T)], "split_sizes": (8, 8)}])
