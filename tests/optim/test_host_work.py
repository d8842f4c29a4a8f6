"""The host's work in a step: eager, Python launches everything, and its calls must not grow with each parameter."""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parbank.optim import ParallelMuon

VIEWS = ("view", "permute", "slice", "select", "t", "transpose", "as_strided", "unsqueeze", "alias", "detach")


class Count(TorchDispatchMode):
    """Counts calls of PyTorch: views, and the others."""

    def __init__(self) -> None:
        super().__init__()
        self.views = self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in VIEWS:
            self.views += 1
        else:
            self.others += 1
        return func(*args, **(kwargs or {}))


def _count(matrices: int, small: int, monkeypatch: Any, *, kernels: bool = False) -> Count:
    """A step's calls around the arithmetic of a batch, which a GPU does in a fixed number of launches. `kernels`: as where
    Triton runs."""
    params = [nn.Parameter(torch.randn(4, 6)) for _ in range(matrices)]
    gains = [nn.Parameter(torch.randn(6)) for _ in range(small)]
    optimizer = ParallelMuon([{"params": params}, {"params": gains, "algorithm": "adamw"}], max_norm=1.0)
    updates = torch.zeros(matrices, 4, 6)
    for name in ("update", "kernels"):
        monkeypatch.setattr(f"parbank.optim.{name}.prepare", lambda *args: updates)
        monkeypatch.setattr(f"parbank.optim.{name}.apply", lambda *args: None)
    for user in ("kernels", "algorithms.muon"):
        monkeypatch.setattr(f"parbank.optim.{user}.use_kernels", lambda *args: kernels)
    for _ in range(3):
        for param in (*params, *gains):
            param.grad = torch.randn(param.shape)  # a new address, as after zero_grad()
        with Count() as count:
            optimizer.step()
    return count


def test_calls_do_not_grow_with_the_parameters(monkeypatch: Any) -> None:
    few, many = (_count(matrices, 10, monkeypatch) for matrices in (10, 60))
    assert many.views - few.views <= 50, "one view of each gradient; views of weights and momentum are kept"
    assert many.others == few.others
    more = _count(10, 60, monkeypatch)
    assert (more.views, more.others) == (few.views, few.others)
    few, many = (_count(matrices, 10, monkeypatch, kernels=True) for matrices in (10, 60))
    assert (many.views, many.others) == (few.views, few.others), "kernels read addresses: they need no views"


def test_kept_views_follow_tensors_that_move() -> None:
    params = [nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(0))) for _ in range(2)]
    optimizers = [ParallelMuon([param], lr=0.1) for param in params]
    for step in range(6):
        if step == 2:
            params[0].data = params[0].data.clone()
        if step == 4:
            state = optimizers[0].state[params[0]]
            state["momentum_buffer"] = state["momentum_buffer"].clone()
        for param, optimizer in zip(params, optimizers):
            param.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(step + 1))
            optimizer.step()
    assert torch.equal(*params)
