"""Memory layouts: a parameter trains as its contiguous copy does, or is refused; memory around it never changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parbank.errors import ConfigError
from parbank.optim import ParallelMuon
from parbank.optim.collect import collect

GUARD = 7.0  # the value of every number that does not belong to the parameter


def _inside(*shape: int, view: Callable[[Tensor], Tensor]) -> Tensor:
    """A view into guarded memory of a shape, filled with random numbers."""
    inner = view(torch.full(shape, GUARD))
    return inner.copy_(torch.randn(inner.shape, generator=torch.Generator().manual_seed(0)))


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: _inside(4, 6, view=lambda t: t),
    "storage offset": lambda: _inside(9, 6, view=lambda t: t[3:7]),
    "transposed": lambda: _inside(6, 4, view=lambda t: t.T),
    "columns of a wider tensor": lambda: _inside(4, 12, view=lambda t: t[:, 1:7]),
    "every second row": lambda: _inside(8, 6, view=lambda t: t[::2]),
    "transposed columns": lambda: _inside(6, 9, view=lambda t: t[:, :4].T),
    "channels_last": lambda: _inside(6, 3, 3, 4, view=lambda t: t.permute(0, 3, 1, 2)),
    "part of channels_last": lambda: _inside(6, 3, 3, 8, view=lambda t: t.permute(0, 3, 1, 2)[:, :4]),
    "one column": lambda: _inside(4, 5, view=lambda t: t[:, 2:3]),
    "zero-size": lambda: torch.zeros(0, 6),
}
OVERLAPS: dict[str, Callable[[], Tensor]] = {
    "expanded rows": lambda: torch.zeros(1, 6).expand(4, 6),
    "expanded scalar": lambda: torch.zeros(()).expand(4, 6),
    "windows": lambda: torch.zeros(12).unfold(0, 6, 2),
}
MUON_REFUSES = {"columns of a wider tensor", "every second row", "transposed columns", "part of channels_last",
                "one column", "zero-size"}  # fmt: skip


def _train(param: nn.Parameter, algorithm: str, steps: int = 3, like: bool = False) -> ParallelMuon:
    optimizer = ParallelMuon([{"params": [param], "algorithm": algorithm, "lr": 0.1, "weight_decay": 0.1}])
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype).copy_(grad) if like else grad
        optimizer.step()
    return optimizer


def _around(param: Tensor) -> Tensor:
    """All numbers of the parameter's storage that are not its own."""
    whole = torch.empty(0, dtype=param.dtype).set_(param.untyped_storage())
    own = torch.zeros(whole.numel(), dtype=torch.bool)
    own.as_strided(param.shape, param.stride(), param.storage_offset()).fill_(True)
    return whole[~own]


@pytest.mark.parametrize("like", [False, True], ids=["plain gradient", "gradient laid out as the weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_trains_as_its_contiguous_copy(algorithm: str, layout: str, dtype: torch.dtype, like: bool) -> None:
    made = LAYOUTS[layout]()
    storage = torch.empty(0).set_(made.untyped_storage()).to(dtype)
    param = nn.Parameter(storage.as_strided(made.shape, made.stride(), made.storage_offset()))
    twin = nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format))
    if algorithm == "muon" and layout in MUON_REFUSES:
        with pytest.raises(ConfigError, match=r"contiguous|algorithm='adamw'"):
            _train(param, algorithm)
        return
    ours, theirs = _train(param, algorithm, like=like), _train(twin, algorithm)
    torch.testing.assert_close(param, twin, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert (_around(param.detach()) == GUARD).all()
    for key, value in theirs.state[twin].items():
        if key != "low_bits":
            torch.testing.assert_close(ours.state[param][key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", OVERLAPS)
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_refuses_numbers_that_share_memory(algorithm: str, layout: str) -> None:
    param = nn.Parameter(OVERLAPS[layout]())
    with pytest.raises(ConfigError, match=r"parameter 0 .*strides .*contiguous"):
        _train(param, algorithm)
    moved = nn.Parameter(torch.zeros(param.shape))
    optimizer = ParallelMuon([{"params": [moved], "algorithm": algorithm}])
    moved.data = OVERLAPS[layout]()  # after the group was checked
    moved.grad = torch.ones(param.shape)
    with pytest.raises(ConfigError, match=r"strides .*contiguous"):
        optimizer.step()


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_a_weight_may_change_its_memory_order_between_steps(algorithm: str) -> None:
    """model.to(memory_format=torch.channels_last) after the first steps: the state has the old order."""
    params = [nn.Parameter(torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0))) for _ in range(2)]
    optimizers = [ParallelMuon([{"params": [p], "algorithm": algorithm, "lr": 0.1}]) for p in params]
    for step in range(4):
        if step == 2:
            params[0].data = params[0].data.contiguous(memory_format=torch.channels_last)
        grad = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(step + 1))
        for param, optimizer in zip(params, optimizers):
            param.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(params[0], params[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_an_expanded_gradient_is_read_and_not_written(algorithm: str) -> None:
    params = [nn.Parameter(torch.eye(4, 6)) for _ in range(2)]
    groups: list[Any] = [[{"params": [p], "algorithm": algorithm}] for p in params]
    row = torch.arange(6.0) + 1
    params[0].grad, params[1].grad = row.expand(4, 6), row.expand(4, 6).clone()
    for group in groups:
        ParallelMuon(group, max_norm=1.0).step()
    torch.testing.assert_close(params[0], params[1])


def test_a_gradient_in_another_order_is_copied_to_one_address() -> None:
    """A CUDA graph reads the addresses of the step that it captured."""
    param = nn.Parameter(torch.zeros(4, 6).T)
    param.grad = torch.zeros(6, 4)
    optimizer = ParallelMuon([{"params": [param], "algorithm": "muon"}])
    batches, staging = optimizer.batches(), {}
    pieces, addresses = [batch.pieces(0) for batch in batches], set()
    for step in range(3):
        param.grad = torch.full((6, 4), float(step))
        found = collect(
            optimizer.param_groups, batches, pieces, optimizer._ranks, False, optimizer.buffers.constant, staging
        ).pieces[0][0]
        assert (found == step).all()
        addresses.add(found.data_ptr())
    assert len(addresses) == 1
