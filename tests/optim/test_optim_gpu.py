"""On a GPU: the kernels, the CUDA graph, and that nothing waits for the device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parbank.ops.backend import use_backend
from parbank.optim import ParallelMuon, orthogonalize
from tests.optim.definition import ADAM_TOLERANCE, TOLERANCE, Settings, define, train, worst_error
from tests.optim.spectra import check_ends, leading, structured
from tests.optim.test_optim_newton_schulz import ENDS

pytestmark = pytest.mark.gpu

SHAPES = ((4, 128, 256), (256, 128), (3, 96, 96), (100, 36))


def _params(device: str, dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in SHAPES]
    small = [nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in ((50, 16), (7,))]
    return matrices, small


def _optimizer(
    matrices: list[nn.Parameter], small: list[nn.Parameter], method: str = "symmetric", **options: Any
) -> ParallelMuon:
    """With our kernels, in a CUDA graph and without one: left to itself it would take cuBLAS for small products outside."""
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": small, "algorithm": "adamw", "lr": 1e-2, "weight_decay": 0.1},
    ]
    return ParallelMuon(groups, max_norm=1.0, method=method, **options)


def _set_gradients(params: list[nn.Parameter], step: int, in_place: bool) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
        if in_place and param.grad is not None:
            param.grad.copy_(grad)
        else:
            param.grad = grad


def _train(
    steps: int, change: Callable[[ParallelMuon, int], None] | None = None, in_place: bool = True, **options: Any
) -> Any:
    matrices, small = _params("cuda")
    params = [*matrices, *small]
    averages = [p.detach().clone() for p in params]
    optimizer = _optimizer(
        matrices,
        small,
        extra_captured=lambda: torch._foreach_lerp_(averages, [p.detach() for p in params], 0.1),
        **options,
    )
    held: list[Tensor] = []
    for step in range(steps):
        if not in_place:
            held.append(torch.empty(1000 * step + 1, device="cuda"))  # so that new gradients land elsewhere
            for param in params:
                param.grad = None
        _set_gradients(params, step, in_place)
        if change is not None:
            change(optimizer, step)
        optimizer.step()
    torch.cuda.synchronize()
    return optimizer, [*[p.detach() for p in params], *averages]


@contextmanager
def _no_waiting() -> Iterator[None]:
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", ["plain", "symmetric", "gram"])
@pytest.mark.parametrize("shape", [(4, 256, 256), (3, 128, 512), (2, 300, 130)])
def test_orthogonalize_in_sixteen_bits(method: str, shape: tuple[int, ...]) -> None:
    G = torch.randn(shape, device="cuda")
    expected = orthogonalize(G.double().cpu(), method="plain")
    found = orthogonalize(G, method=method).double().cpu()
    assert (found - expected).norm() / expected.norm() < 6e-3


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("shape", [(16, 32), (64, 128), (512, 512), (256, 512), (512, 2048), (2048, 512)])
@pytest.mark.parametrize("coefficients", ["quintic", "polar_express"])
@pytest.mark.parametrize("method", ["auto", "plain", "symmetric", "gram"])
def test_orthogonalize_uneven_spectra(method: str, coefficients: str, shape: tuple[int, int], graphed: bool) -> None:
    """Inputs of tests/optim/test_optim_newton_schulz.py, through the kernels, in the shapes of a planned model too."""
    rows, cols = sorted(shape)
    count = 56 if rows < 256 else 14
    G = torch.cat([leading(count, rows, cols), structured(rows, cols)]).cuda()
    found = orthogonalize(G.mT if shape[0] > shape[1] else G, 5, coefficients, method, graphed=graphed)
    check_ends(found, ENDS[coefficients], full=count)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cautious", [False, True])
def test_a_step_equals_its_definition(backend: str, dtype: torch.dtype, cautious: bool) -> None:
    settings = Settings(cautious=cautious)
    with use_backend(backend):
        found = train("cuda", dtype, settings, method="plain")
    matrices, small = worst_error(found, define(dtype, settings), dtype)
    assert matrices < TOLERANCE
    assert small < ADAM_TOLERANCE


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("method", ["auto", "symmetric", "gram"])
def test_every_method_steps_by_the_definition(method: str, graphed: bool) -> None:
    found = train("cuda", torch.float32, Settings(), method=method, cuda_graph=graphed)
    matrices, small = worst_error(found, define(torch.float32, Settings()), torch.float32)
    assert matrices < TOLERANCE
    assert small < ADAM_TOLERANCE


def test_a_step_waits_for_nothing() -> None:
    matrices, small = _params("cuda")
    optimizer = _optimizer(matrices, small, normuon=True)
    for step in range(4):
        _set_gradients([*matrices, *small], step, in_place=True)
        optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
        torch.cuda.synchronize()
        if step < 2:  # compiles
            optimizer.step()
        else:
            with _no_waiting():
                optimizer.step()


def _schedule(optimizer: ParallelMuon, step: int) -> None:
    optimizer.param_groups[0].update(lr=0.02 / (step + 1), momentum=0.8 + 0.005 * step, weight_decay=0.01 * step)
    optimizer.param_groups[1].update(lr=0.01 / (step + 1), weight_decay=0.1 + 0.01 * step)
    optimizer.max_norm = 1.0 + step


def test_graph_equals_eager_and_follows_hyperparameters() -> None:
    _, expected = _train(8, _schedule, cuda_graph=False)
    optimizer, found = _train(8, _schedule, cuda_graph=True)
    assert optimizer._graph is not None
    assert optimizer._graph.captures == 1
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_graph_is_captured_again_when_something_changes() -> None:
    def change(optimizer: ParallelMuon, step: int) -> None:
        if step == 4:
            optimizer.load_state_dict(optimizer.state_dict())
        if step == 8:
            optimizer.param_groups[1]["betas"] = (0.8, 0.9)
        if step == 12:
            optimizer.param_groups[0]["ns_steps"] = 4
        if step == 16:
            optimizer.param_groups[0]["params"][0].grad = None

    _, expected = _train(20, change, cuda_graph=False)
    optimizer, found = _train(20, change, cuda_graph=True)
    assert optimizer._graph is not None
    assert 4 <= optimizer._graph.captures <= 6
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_graph_with_gradients_that_move() -> None:
    _, expected = _train(24, in_place=False, cuda_graph=False)
    optimizer, found = _train(24, in_place=False, cuda_graph=True)
    assert optimizer._graph is not None
    assert optimizer._graph.captures >= 1
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_graph_skips_what_is_not_finite() -> None:
    def poison(optimizer: ParallelMuon, step: int) -> None:
        if step in (5, 6):
            optimizer.param_groups[0]["params"][0].grad.view(-1)[3] = float("nan")

    results = [_train(7, poison, cuda_graph=graphed) for graphed in (False, True)]
    for optimizer, _ in results:
        assert int(optimizer.skipped_in_a_row) == 2
        assert bool(optimizer.last_skipped)
    for a, b in zip(results[0][1], results[1][1]):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_graph_keeps_gradients_in_place_by_default() -> None:
    matrices, small = _params("cuda")
    optimizer = _optimizer(matrices, small, cuda_graph=True)
    _set_gradients([*matrices, *small], 0, in_place=False)
    before = matrices[0].grad
    optimizer.zero_grad()
    assert matrices[0].grad is before
    assert not before.any()  # type: ignore[union-attr]


def test_auto_captures_by_itself() -> None:
    """Extra work stays outside the graph, so that it may count on the host."""
    _, expected = _train(24, _schedule, cuda_graph=False)
    optimizer, found = _train(24, _schedule, cuda_graph="auto")
    assert optimizer._graph is not None
    assert optimizer._graph.captures == 1
    assert optimizer._graph.pilot.replays >= 10
    assert "steps replayed, captured 1 times)" in repr(optimizer)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_auto_stays_out_of_the_callers_graph() -> None:
    matrices, small = _params("cuda")
    optimizer = _optimizer(matrices, small, cuda_graph="auto")
    for step in range(6):
        _set_gradients([*matrices, *small], step, in_place=True)
        optimizer.step()
    torch.cuda.synchronize()
    graph, before = torch.cuda.CUDAGraph(), matrices[0].detach().clone()
    with torch.cuda.graph(graph):
        optimizer.step()
    assert torch.equal(matrices[0], before), "recorded, not run"
    graph.replay()
    assert not torch.equal(matrices[0], before)


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_memory_is_the_momentum_a_tenth_and_one_batch(cuda_graph: bool) -> None:
    shapes = [(8, 512, 512), (8, 256, 512), (8, 512, 1536)]
    params = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer = ParallelMuon(params, cuda_graph=cuda_graph)
    for _ in range(6):
        optimizer.step()
    torch.cuda.synchronize()
    momentum = 4 * sum(param.numel() for param in params)
    # In 16 bits: updates twice and five squares of the shorter side, of the largest batch; one more copy of the updates in the
    # kernels' iteration, which cannot write into a given buffer.
    work = max(2 * count * (3 * rows * cols + 5 * rows * rows) for count, rows, cols in shapes)
    assert torch.cuda.max_memory_allocated() - before < 1.1 * momentum + work + 2**20


@pytest.mark.parametrize("graphed", [False, True])
def test_odd_memory_layouts(graphed: bool) -> None:
    """Transposed and channels_last matrices, and an AdamW weight with gaps: as contiguous copies; no foreign memory
    changes."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(64, 96, generator=generator).cuda()
    conv = torch.randn(64, 8, 3, 3, generator=generator).cuda()
    held = torch.full((32, 40), 7.0, device="cuda")
    odd = [nn.Parameter(wide.T), nn.Parameter(conv.to(memory_format=torch.channels_last)), nn.Parameter(held[:, 4:20])]
    plain = [nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in odd]
    for params in (odd, plain):
        optimizer = _optimizer(params[:2], params[2:], cuda_graph=graphed)
        for step in range(6):
            _set_gradients(params, step, in_place=True)
            optimizer.step()
    for a, b in zip(odd, plain):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)  # Newton-Schulz in float16, on permuted columns
    assert (held[:, :4] == 7).all()
    assert (held[:, 20:] == 7).all()
