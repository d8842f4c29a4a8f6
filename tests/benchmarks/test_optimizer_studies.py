"""The optimizer's studies do on a CPU what they do on a GPU, at a size of seconds."""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

Load = Callable[[str], ModuleType]


@pytest.mark.parametrize("provider", ["torch.optim.Muon", "ParallelMuon, auto", "ParallelMuon, eager"])
@pytest.mark.parametrize("moving", [False, True])
def test_the_loop_times_every_step(benchmark: Load, provider: str, moving: bool) -> None:
    loop = benchmark("optimizer_loop")
    shapes = [(8, 12), (12, 8), (8, 8)]
    found = loop.measure(loop.PROVIDERS[provider], shapes, moving=moving, device="cpu", repeats=3)
    assert 0 < found.host_ms <= found.wall_ms
    assert found.memory_mib is None
    assert ("the parameters are on cpu" in found.about) == (provider == "ParallelMuon, auto")


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
