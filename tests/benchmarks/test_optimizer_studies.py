"""The optimizer's studies do on a CPU what they do on a GPU, at a size of seconds."""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

Load = Callable[[str], ModuleType]


@pytest.mark.parametrize("provider", ["torch.optim.Muon", "ParallelMuon, auto", "ParallelMuon, default"])
@pytest.mark.parametrize("number", range(3))
def test_the_loop_times_every_step(benchmark: Load, provider: str, number: int) -> None:
    loop = benchmark("optimizer_loop")
    shapes = [(8, 12), (12, 8), (8, 8)]
    found = loop.measure(loop.PROVIDERS[provider], shapes, loop.LOOPS[number], device="cpu", repeats=3)
    assert 0 < found.host_ms <= found.wall_ms
    assert (found.peak_mib, found.held_mib) == (None, None)
    assert ("the parameters are on cpu" in found.about) == (provider == "ParallelMuon, auto")
    assert ("cuda_graph: False" in found.about) == (provider == "ParallelMuon, default"), "the default call"


@pytest.mark.parametrize("number", range(3))
def test_the_loop_is_that_of_a_trainer(benchmark: Load, number: int) -> None:
    """zero_grad() of the optimizer, then a real backward, before every step."""
    loop = benchmark("optimizer_loop")
    kind, events = loop.LOOPS[number], []

    class Spy(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool | None = None) -> None:
            events.append(f"zero_grad({set_to_none})")
            super().zero_grad()

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            grads = [param.grad for group in self.param_groups for param in group["params"]]
            assert all(grad is not None and grad.any() for grad in grads)
            events.append("step")

    loop.measure(lambda params: Spy(params, lr=0.1), [(64, 64)] * 3, kind, device="cpu", repeats=2)
    zero = "zero_grad(True)" if kind.to_none else "zero_grad(None)"
    assert events == [zero, "step"] * (loop.WARMUP + 2)
    rows = loop.list_rows("golf", kind, "dion, graph", loop.Measured(2.0, 1.0, 9.0, 100.0, 90.0, ""))
    assert [row.unit for row in rows] == ["ms", "ms", "ms", "MiB", "MiB"]
    assert kind.takes("ParallelMuon, default")
    assert kind.takes("dion, graph") != kind.to_none


def test_memory_counts_what_an_optimizer_makes_at_once(benchmark: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory before is that of parameters and gradients; dion makes its momentum in its constructor."""
    loop, events = benchmark("optimizer_loop"), []

    def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        assert all(param.grad is None for param in params)
        events.append("made")
        return torch.optim.SGD(params, lr=0.1)

    monkeypatch.setattr(loop, "_allocated", lambda device: events.append("allocated") or 0)
    monkeypatch.setattr(loop, "_held", lambda device: events.append("held") or 0)
    loop.measure(make, [(8, 8)], loop.LOOPS[0], device="cpu", repeats=1)
    assert events == ["allocated", "held", "made", "held"]


def test_convergence_tunes_beyond_the_edge_and_repeats_itself(benchmark: Load) -> None:
    convergence = benchmark("convergence")
    size = convergence.SIZES["tiny"]
    text = torch.arange(3000) % 3  # every step towards it lowers the loss
    study = convergence.Study(text, size, "cpu")
    assert (
        study.train(convergence.make_ours, 0.02, 1e-3, 0).bits == study.train(convergence.make_ours, 0.02, 1e-3, 0).bits
    )
    best, scores = study.tune(convergence.make_adamw, (1e-6, 2e-6), 0.0)
    assert len(scores) == 2 + convergence.EDGES, "every score beyond the edge was better"
    assert scores[best] == min(scores.values())
    shares = [convergence.share(step, 100) for step in range(100)]
    assert max(shares) == 1.0
    assert shares[0] == 0.2
    assert shares[-1] == pytest.approx(0.02)


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_rxtx_is_x_times_its_transpose(benchmark: Load, levels: int) -> None:
    rxtx = benchmark("rxtx")
    X = np.random.default_rng(0).standard_normal((48, 32))
    np.testing.assert_allclose(rxtx.rxtx(X, levels), X @ X.T, rtol=1e-12, atol=1e-12)
    assert len(rxtx.PRODUCTS) == 26
    assert rxtx.count_multiplications(4096, 1) / rxtx.count_multiplications(4096, 0) == pytest.approx(0.9375, rel=1e-3)


def test_newton_schulz_counts_five_plain_steps(benchmark: Load) -> None:
    sizes, harness = benchmark("optimizer_newton_schulz"), benchmark("harness")
    for aspect in sizes.ASPECTS:
        shape = sizes.find_shape(1024, aspect)
        batch, rows, cols = shape
        products = (
            2 * rows * rows * cols,
            2 * rows**3,
            2 * rows * rows * cols,
        )  # X X^T, its square, the product with X
        assert sizes.count_flops(shape) == batch * 5 * sum(products)
        assert batch * rows * cols == sizes.NUMBERS
    flops = sizes.count_flops(shape)
    rows = [
        harness.Row("square, 1024", "parbank", 2.0),
        harness.Row("square, 1024", "dion, Gram", None, note="missing"),
    ]
    found = sizes.to_rates(rows, shape)
    assert found[0].value == pytest.approx(flops / 2e-3 / 1e12)
    assert (found[0].unit, found[1].value, found[1].note) == ("TFLOP/s", None, "missing")
    assert len(list(sizes.list_cases(quick=True))) == 2 * len(sizes.QUICK_SIZES)


def test_newton_schulz_providers_agree(benchmark: Load) -> None:
    """Those that run on a CPU, on float32 inputs of any norm."""
    sizes = benchmark("optimizer_newton_schulz")
    G = 30 * torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
    expected = sizes.PROVIDERS["PyTorch, eager"]()(G).float()
    for name in (sizes.OURS, f"{sizes.OURS}, Gram", f"{sizes.OURS}, plain"):
        torch.testing.assert_close(sizes.PROVIDERS[name]()(G), expected, rtol=0.1, atol=0.05)
