"""What a caller has set around a step does not reach into it: autocast, another current device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parbank.optim import ParallelMuon, orthogonalize
from parbank.optim.newton_schulz import METHODS

SHAPES = ((16, 64), (3, 8, 8), (40, 12), (5,))


def _train(dtype: torch.dtype, method: str, autocast: torch.dtype | None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    groups = [{"params": params[:3], "normuon": True}, {"params": params[3:], "algorithm": "adamw"}]
    optimizer = ParallelMuon(groups, max_norm=1.0, method=method, weight_decay=0.1)
    for _ in range(2):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(dtype)
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_inside_autocast(method: str, dtype: torch.dtype) -> None:
    """float16, as Newton-Schulz's dtype and autocast's differ on a GPU. A CPU's step follows autocast to bfloat16."""
    expected = _train(dtype, method, None)
    assert all(torch.equal(a, b) for a, b in zip(_train(dtype, method, torch.float16), expected))
    for a, b in zip(_train(dtype, method, torch.bfloat16), expected):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_orthogonalize_inside_autocast(method: str) -> None:
    G = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(0))
    expected = orthogonalize(G, method=method)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(orthogonalize(G, method=method), expected)


def test_a_step_runs_on_the_device_of_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs the current device may be another: Triton would launch there. tests/optim/test_graph_gpu.py does it on two."""
    current: list[torch.device] = []

    @contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def extra() -> None:
        seen.append([*current])

    seen: list[Any] = []
    monkeypatch.setattr("parbank.optim.parallel_muon.on_device", enter, raising=False)
    param = nn.Parameter(torch.ones(4, 4))
    param.grad = torch.ones(4, 4)
    ParallelMuon([param], extra_captured=extra).step()
    assert seen == [[param.device]]


def test_a_step_inside_torch_compile() -> None:
    """No compiler has PyTorch's fused AdamW, collectives in flight, or tables of addresses: the step runs as it is."""
    ends = []
    for compiled in (False, True):
        params = [nn.Parameter(torch.eye(4)), nn.Parameter(torch.ones(4))]
        optimizer = ParallelMuon([{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}], max_norm=1.0)

        def step(scale: Tensor, params: list[nn.Parameter] = params, optimizer: ParallelMuon = optimizer) -> None:
            for param in params:
                param.grad = torch.full_like(param, 0.5) * scale
            optimizer.step()

        work = torch.compile(step, backend="eager") if compiled else step
        for number in range(3):
            work(torch.tensor(1.0 + number))
        ends.append([param.detach() for param in params])
    assert all(torch.equal(a, b) for a, b in zip(*ends))
