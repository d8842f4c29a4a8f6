"""Newton-Schulz against the exact polynomial of the singular values, and against the polar factor, in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parbank.errors import ConfigError
from parbank.ops.backend import INTERPRETED, use_backend
from parbank.optim import orthogonalize
from parbank.optim.coefficients import QUINTIC, derive_minimax, resolve_coefficients
from parbank.optim.newton_schulz import METHODS, RESTART, choose_method, count_products, find_restart, hides_launch
from tests.optim.spectra import check_ends, leading, structured

NAMED = ("quintic", "polar_express")
# Where singular values of at least 1e-3 (of the Frobenius norm) end up after five steps; test_where_values_end holds it.
ENDS = {"quintic": (0.47, 1.21), "polar_express": (0.86, 1.14)}


def exact(G: Tensor, coefficients: str, steps: int = 5) -> Tensor:
    """The iteration's own limit of accuracy: its polynomial on the singular values, all in float64."""
    U, S, V = torch.linalg.svd(G.double(), full_matrices=False)
    S = S / torch.linalg.vector_norm(S, dim=-1, keepdim=True).clamp_min(1e-300)
    for a, b, c in resolve_coefficients(coefficients, steps):
        S = S * (a + S**2 * (b + S**2 * c))
    return U * S[..., None, :] @ V


def spectrum(values: Tensor, rows: int, cols: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    U, _, V = torch.linalg.svd(
        torch.randn(2, rows, cols, dtype=torch.float64, generator=generator), full_matrices=False
    )
    return U * values @ V


def cases() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(3, 24, 80, generator=generator)
    return {
        "square": torch.randn(2, 32, 32, generator=generator),
        "wide": wide,
        "tall": torch.randn(80, 24, generator=generator),
        "nested": torch.randn(2, 2, 8, 16, generator=generator),
        "rank deficient": spectrum((torch.arange(32) < 5).double(), 32, 64).float(),
        "decaying": spectrum(torch.logspace(0, -4, 32, dtype=torch.float64), 32, 64).float(),
        "tiny": wide * 1e-8,
        "huge": wide * 1e8,
        "mixed scales": wide * torch.tensor([1e-8, 1.0, 1e8]).view(3, 1, 1),
        "not contiguous": torch.randn(80, 3, 24, generator=generator).permute(1, 2, 0),
        "strided": torch.randn(3, 48, 160, generator=generator)[:, ::2, ::2],
        "one row": torch.randn(1, 7, generator=generator),
    }


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("coefficients", NAMED)
@pytest.mark.parametrize("method", METHODS)
def test_equals_the_exact_polynomial(case: str, coefficients: str, method: str) -> None:
    G = cases()[case]
    before = G.clone()
    found = orthogonalize(G, 5, coefficients, method)
    expected = exact(G, coefficients)
    assert found.dtype == G.dtype
    assert found.shape == G.shape
    assert torch.equal(G, before)
    error = (found.double() - expected).norm() / expected.norm()
    # float32 has 6e-8; rounding at the scale of the largest singular value is amplified in the smallest, up to 8 * 4^4 times
    assert error < 2e-4, error


@pytest.mark.parametrize("coefficients", NAMED)
def test_nears_the_polar_factor(coefficients: str) -> None:
    """Without small singular values, the result is U V^T times values within the stated bounds."""
    generator = torch.Generator().manual_seed(0)
    G = torch.randn(4, 32, 128, generator=generator)
    U, _, V = torch.linalg.svd(G.double(), full_matrices=False)
    found = orthogonalize(G, 5, coefficients).double()
    low, high = ENDS[coefficients]
    values = torch.linalg.svdvals(found)
    assert low <= values.min() <= values.max() <= high
    difference = torch.linalg.matrix_norm(found - U @ V, ord=2)
    assert difference.max() <= max(1 - low, high - 1)


def test_many_steps_converge() -> None:
    G = torch.randn(16, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    U, _, V = torch.linalg.svd(G, full_matrices=False)
    found = orthogonalize(G, 12, [*derive_minimax(6), (1.875, -1.25, 0.375)])
    torch.testing.assert_close(found, U @ V, rtol=0, atol=1e-9)


@pytest.mark.parametrize("coefficients", NAMED)
def test_where_values_end(coefficients: str) -> None:
    """The figures that docs and comments give for the named coefficients."""
    values = np.geomspace(1e-3, 1.0, 200_001)
    for a, b, c in resolve_coefficients(coefficients, 5):
        values = values * (a + values**2 * (b + values**2 * c))
    low, high = ENDS[coefficients]
    assert low <= values.min() < low + 0.01
    assert high - 0.01 < values.max() <= high


def test_minimax_is_the_best_of_its_neighbours() -> None:
    """Without cushion and safety, no nearby triple is better on the interval: it is a minimax polynomial."""
    (triple,) = derive_minimax(1, lower=0.1, cushion=0.0, safety=1.0)
    x = np.linspace(0.1, 1.0, 10_001)

    def error(a: float, b: float, c: float) -> float:
        return float(np.abs(1 - (a * x + b * x**3 + c * x**5)).max())

    best = error(*triple)
    generator = np.random.default_rng(0)
    for scale in (1e-1, 1e-2, 1e-3):
        for shift in generator.normal(size=(200, 3)) * scale:
            assert error(*(np.array(triple) + shift)) > best - 1e-6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_zero_gives_zero(method: str, dtype: torch.dtype) -> None:
    G = torch.randn(3, 8, 16).to(dtype)
    G[1] = 0
    found = orthogonalize(G, method=method)
    assert torch.isfinite(found).all()
    assert (found[1] == 0).all()
    assert (found[0] != 0).any()


@pytest.mark.parametrize("method", ["plain", "gram"])
def test_sixteen_bits(method: str) -> None:
    """What a GPU computes in: float16 must beat bfloat16, and the Gram iteration must stay as good as the plain one."""
    G = torch.randn(2, 64, 192, generator=torch.Generator().manual_seed(0))
    expected = exact(G, "quintic")
    errors = {
        dtype: ((orthogonalize(G, method=method, dtype=dtype).double() - expected).norm() / expected.norm()).item()
        for dtype in (torch.float16, torch.bfloat16)
    }
    assert errors[torch.float16] < 5e-3
    assert errors[torch.float16] < errors[torch.bfloat16] / 2


@pytest.mark.parametrize("shape", [(64, 64), (64, 128), (64, 256), (256, 64)])
@pytest.mark.parametrize("coefficients", NAMED)
@pytest.mark.parametrize("method", METHODS)
def test_sixteen_bits_on_uneven_spectra(method: str, coefficients: str, shape: tuple[int, int]) -> None:
    rows, cols = sorted(shape)
    G = torch.cat([leading(28, rows, cols), structured(rows, cols)])
    found = orthogonalize(G.mT if shape[0] > shape[1] else G, 5, coefficients, method, torch.float16)
    check_ends(found, ENDS[coefficients], full=28)


@pytest.mark.parametrize("shape", [(64, 128), (128, 512)])
@pytest.mark.parametrize("coefficients", NAMED)
@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_does_not_explode(method: str, coefficients: str, shape: tuple[int, int]) -> None:
    """It is the precision of autocast on a CPU. Its lower end is less exact than float16's."""
    G = torch.cat([leading(28, *shape), structured(*shape)])
    found = orthogonalize(G, 5, coefficients, method, torch.bfloat16)
    check_ends(found, (0.0, ENDS[coefficients][1] + 0.02), full=28)


@pytest.mark.skipif(not INTERPRETED, reason="interprets the kernels; set TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("method", "coefficients"), [("auto", "quintic"), ("auto", "polar_express"), ("gram", "polar_express")]
)
def test_kernels_on_uneven_spectra(method: str, coefficients: str) -> None:
    """The path of a CUDA graph. The kernels copy half of a product to the other half. In float16 its factors do not quite
    commute, so the copy adds an error that plain PyTorch does not have."""
    G = torch.cat([leading(42, 16, 32), structured(16, 32)])
    with use_backend("triton"):
        found = orthogonalize(G, 5, coefficients, method, torch.float16, graphed=True)
    check_ends(found, ENDS[coefficients], full=42)


def test_growth_decides_the_restarts() -> None:
    for dtype in (torch.float16, torch.float32):
        assert find_restart(resolve_coefficients("quintic", 5), dtype) == RESTART
    assert find_restart(resolve_coefficients("quintic", 5), torch.bfloat16) == 1
    polar = resolve_coefficients("polar_express", 5)
    assert find_restart(polar, torch.float16) == find_restart(polar, torch.bfloat16) == 1
    assert find_restart(polar, torch.float32) == RESTART
    assert choose_method(512, 2048, 5, kernels=True, restart=1) == "symmetric"
    assert choose_method(512, 2048, 5, kernels=False, restart=1) == "plain"


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 7),
    st.integers(-8, 8),
    st.sampled_from(METHODS),
)
def test_any_shape(batch: int, rows: int, cols: int, steps: int, exponent: int, method: str) -> None:
    G = torch.randn(batch, rows, cols, generator=torch.Generator().manual_seed(rows * 31 + cols)) * 10.0**exponent
    found = orthogonalize(G, steps, "quintic", method)
    torch.testing.assert_close(found.double(), exact(G, "quintic", steps), rtol=0, atol=5e-4)


def test_costs_choose_the_method() -> None:
    assert choose_method(512, 512, 5, kernels=False) == "plain"
    assert choose_method(512, 1536, 5, kernels=False) == "gram"
    assert choose_method(512, 512, 5, kernels=True) == "symmetric"
    assert choose_method(768, 3072, 5, kernels=True) == "gram"
    assert count_products(512, 512, 5, "plain", True) == 15
    assert count_products(512, 1536, 5, "gram", False) == 26


def test_kernels_wait_for_products_that_hide_their_launch() -> None:
    assert not hides_launch(22, 512, 512)  # the golf banks
    assert not hides_launch(12, 768, 3072)  # GPT-2 small
    assert hides_launch(4, 4096, 4096)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"G": torch.ones(3)}, "takes matrices"),
        ({"steps": 0}, "at least one step"),
        ({"coefficients": "cubic"}, "unknown coefficients"),
        ({"coefficients": [(1.0, 2.0)]}, "triples"),
        ({"coefficients": []}, "triples"),
        ({"method": "fast"}, "unknown method"),
    ],
)
def test_refuses(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        orthogonalize(**{"G": torch.ones(2, 2), **arguments})  # type: ignore[arg-type]


def test_coefficients_in_every_form() -> None:
    assert resolve_coefficients(QUINTIC, 2) == (QUINTIC, QUINTIC)
    assert resolve_coefficients([(1, 2, 3), (4, 5, 6)], 3) == ((1, 2, 3), (4, 5, 6), (4, 5, 6))
    assert resolve_coefficients([(1, 2, 3), (4, 5, 6)], 1) == ((1, 2, 3),)
