"""Memory: a step leaves nothing but the state behind, and needs no more than 10% of it and the work of one batch."""

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType

from parbank.optim import ParallelMuon, buffers, newton_schulz
from tests.distributed import run_distributed_test

# Six batches of about 64 KiB in float32, of one parameter or of several: to keep every update until the end would take five
# batches more than the bound allows.
SHAPES = ((4, 64, 64), (2, 80, 104), (96, 170), (88, 186), (72, 228), (64, 256))
MANY = ((64, 64),) * 12
SLACK = 2**13  # norms, flags and the table of hyperparameters


def _peak(run: Callable[[], Any]) -> int:
    """The most bytes that PyTorch's allocator had given out during a call, beyond those before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    changes = [(e.start_time_ns, e.extra_fields.alloc_size) for e in _walk(results.experimental_event_tree())]
    assert changes, "allocations were seen"
    live = peak = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        live += size
        peak = max(peak, live)
    return peak


def _walk(events: list[Any]) -> Iterator[Any]:
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event
        yield from _walk(event.children)


def _make(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, **options: Any) -> tuple[ParallelMuon, int]:
    """An optimizer with gradients, and the bytes of its state."""
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape).to(dtype)
    optimizer = ParallelMuon(params, weight_decay=0.1, **options)
    optimizer.step()
    return optimizer, _bytes([v for held in optimizer.state.values() for v in held.values()])


def _find_work(shape: tuple[int, ...]) -> int:
    """The bytes of a batch in flight: its updates twice, since a product cannot overwrite its factor, and the squares of
    Newton-Schulz: two, or five of the Gram iteration, which is for wide matrices."""
    *count, rows, cols = shape
    squares = (2 if rows == cols else 5) * min(rows, cols) ** 2
    return 4 * (count[0] if count else 1) * (2 * rows * cols + squares)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_needs_a_tenth_of_the_momentum_and_one_batch(
    dtype: torch.dtype, max_norm: float | None, cautious: bool
) -> None:
    optimizer, state = _make(SHAPES, dtype, max_norm=max_norm, cautious=cautious)
    assert state == sum((4 if dtype == torch.float32 else 6) * p.numel() for p in optimizer.state)
    assert _peak(optimizer.step) < 0.1 * state + max(map(_find_work, SHAPES)) + SLACK


def test_many_parameters_of_one_shape_need_no_more() -> None:
    optimizer, state = _make(MANY, torch.float32)
    assert _peak(optimizer.step) < 0.1 * state + _find_work((12, 64, 64)) + SLACK


def test_a_large_batch_is_worked_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, state = _make(MANY, torch.float32)
    expected = [param.detach().clone() for param in optimizer.state]
    optimizer.step()
    monkeypatch.setattr(newton_schulz, "WORK", 2 * 64 * 64)
    other, _ = _make(MANY, torch.float32)
    with torch.no_grad():
        for mine, theirs, start in zip(other.state, optimizer.state, expected):
            mine.copy_(start)
            other.state[mine]["momentum_buffer"].copy_(optimizer.state[theirs]["momentum_buffer"])
            mine.grad = theirs.grad
    peak = _peak(other.step)
    optimizer.step()
    whole = 4 * 12 * 64 * 64
    assert peak < whole + 5 * whole // 6 + 0.1 * state + SLACK, "all updates, and the work of two matrices"


def test_nothing_but_the_state_remains() -> None:
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = ParallelMuon(params, max_norm=1.0)
    for param in params:
        param.grad = torch.randn(param.shape)
    before = _find_live()
    optimizer.step()
    after = {address: size for address, size in _find_live().items() if address not in before}
    state = {v.untyped_storage().data_ptr() for held in optimizer.state.values() for v in held.values()}
    assert state <= after.keys()
    assert sum(size for address, size in after.items() if address not in state) < SLACK


def _drop_layers(most: int, steps: int) -> tuple[int, Tensor]:
    """Each step leaves out other layers, as stochastic depth does."""
    buffers.MOST_CONSTANTS = most
    params = [nn.Parameter(torch.full((4, 4), float(n))) for n in range(12)]
    optimizer = ParallelMuon(params)
    for step in range(1, steps + 1):
        for n, param in enumerate(params):
            param.grad = torch.eye(4) if step >> n & 1 else None
        optimizer.step()
    return len(optimizer.buffers._constants), torch.stack(params).detach()


def test_steps_that_leave_out_layers_keep_nothing_of_each_other() -> None:
    bounded, unbounded = (run_distributed_test(_drop_layers, 2, args=(most, 40))[0] for most in (16, 1024))
    assert bounded[0] <= 16 < unbounded[0]
    assert torch.equal(bounded[1], unbounded[1])


def _find_live() -> dict[int, int]:
    """The bytes of every tensor that Python can reach, by the address of its storage."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter):
            with suppress(RuntimeError):  # tensors of other tests without memory of their own: sparse ones, wrappers
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found
