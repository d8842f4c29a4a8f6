"""GPTQ against a plain float64 reading of it, and against rounding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parbank.quant.gptq import factorise, round_bank
from parbank.quant.pruning import prices
from parbank.quant.rate import measure


def random_hessians(n: int, cols: int, tokens: int, seed: int) -> Tensor:
    """Second moments of correlated inputs; fewer tokens than columns make them singular."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(n, cols, cols, generator=generator, dtype=torch.float64)
    x = torch.randn(n, tokens, cols, generator=generator, dtype=torch.float64) @ mix
    return x.mT @ x / max(tokens, 1)


def plain_rounding(weights: Tensor, scales: Tensor, q: int) -> Tensor:
    wide = scales.float().repeat_interleave(weights.shape[2] // scales.shape[2], 2)
    return (weights / torch.where(wide > 0, wide, torch.inf)).round().clamp(-q, q)


def error_in(hessians: Tensor, weights: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    wide = scales.double().repeat_interleave(weights.shape[2] // scales.shape[2], 2)
    d = values.double() * wide - weights.double()
    return ((d @ hessians.double()) * d).sum(2)


def plain_gptq(weights: Tensor, step: Tensor, q: int, hessian: Tensor, damping: float, ordered: bool = True) -> Tensor:
    """One matrix, column by column, each time solving for the best move of the columns that are left."""
    cols = weights.shape[1]
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True) if ordered else torch.arange(cols)
    h = hessian[order][:, order].double() + damping * hessian.diagonal().mean() * torch.eye(cols, dtype=torch.float64)
    work, out = weights[:, order].double().clone(), torch.zeros_like(weights, dtype=torch.float64)
    for j in range(cols):
        out[:, j] = (work[:, j] / step).round().clamp(-q, q)
        error = out[:, j] * step - work[:, j]
        if j + 1 < cols:
            # minimise (e, m) H (e, m)^T over m: m = -e H_jR H_RR^-1
            rest = h[j + 1 :, j + 1 :]
            work[:, j + 1 :] -= error[:, None] * torch.linalg.solve(rest, h[j, j + 1 :])[None]
    back = torch.zeros_like(out)
    back[:, order] = out
    return back


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("cols", [1, 5, 24])
def test_equals_the_plain_algorithm(cols: int, ordered: bool) -> None:
    hessians = random_hessians(2, cols, 3 * cols, seed=cols)
    weights = torch.randn(2, 7, cols, generator=torch.Generator().manual_seed(1))
    scales = torch.full((2, 7, 1), 0.25).half()
    values, _ = round_bank(weights, scales, 7, factorise(hessians, damping=0.01, activation_order=ordered))
    for i in range(2):
        expected = plain_gptq(weights[i], torch.full((7,), 0.25, dtype=torch.float64), 7, hessians[i], 0.01, ordered)
        assert torch.equal(values[i].double(), expected)


def test_blocks_do_not_show() -> None:
    """More columns than a block holds: the products between blocks must continue the steps inside."""
    hessians = random_hessians(1, 300, 900, seed=0)
    weights = torch.randn(1, 16, 300, generator=torch.Generator().manual_seed(1))
    scales = torch.full((1, 16, 1), 0.125).half()
    values, _ = round_bank(weights, scales, 127, factorise(hessians))
    expected = plain_gptq(weights[0], torch.full((16,), 0.125, dtype=torch.float64), 127, hessians[0], 0.01)
    assert (values[0].double() != expected).double().mean() < 0.01, "float32 may tip a tie, no more"


def test_the_reported_error_is_the_error() -> None:
    hessians = random_hessians(3, 32, 100, seed=4)
    weights = torch.randn(3, 9, 32, generator=torch.Generator().manual_seed(2))
    scales = torch.rand(3, 9, 1, generator=torch.Generator().manual_seed(3)).half() + 0.1
    values, reported = round_bank(weights, scales, 127, factorise(hessians, damping=1e-9))
    torch.testing.assert_close(reported.double(), error_in(hessians, weights, values, scales), rtol=1e-3, atol=1e-6)


def test_beats_rounding_on_average_and_by_much_where_inputs_are_correlated() -> None:
    ratios = []
    for seed in range(20):
        hessians = random_hessians(2, 24, 60, seed)
        weights = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(seed))
        scales = torch.full((2, 8, 1), 0.3).half()
        values, _ = round_bank(weights, scales, 15, factorise(hessians))
        plain = error_in(hessians, weights, plain_rounding(weights, scales, 15), scales).sum()
        ratios.append(float(error_in(hessians, weights, values, scales).sum() / plain))
    assert max(ratios) < 1
    assert sum(ratios) / len(ratios) < 0.5


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), cols=st.integers(1, 20), q=st.sampled_from([1, 3, 31, 127]))
def test_a_diagonal_hessian_is_plain_rounding(seed: int, cols: int, q: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(2, 5, cols, generator=generator)
    scales = torch.rand(2, 5, 1, generator=generator).half()
    hessians = torch.diag_embed(torch.rand(2, cols, generator=generator))
    values, _ = round_bank(weights, scales, q, factorise(hessians))
    assert torch.equal(values.float(), plain_rounding(weights, scales, q))


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_hessians_without_full_rank(tokens: int) -> None:
    """No token, one token, and columns that no token ever lit up."""
    hessians = random_hessians(2, 16, tokens, seed=0)
    hessians[:, 5] = hessians[:, :, 5] = 0
    weights = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    scales = torch.full((2, 6, 1), 0.5).half()
    values, error = round_bank(weights, scales, 7, factorise(hessians))
    assert error.isfinite().all()
    assert values.abs().max() <= 7
    after = error_in(hessians, weights, values, scales).sum()
    assert after <= error_in(hessians, weights, plain_rounding(weights, scales, 7), scales).sum() + 1e-9


def test_group_scales_belong_to_columns_not_to_places_in_the_order() -> None:
    """Columns are visited by their curvature; a group stays the group of its columns."""
    weights = torch.tensor([[[1.0, 2.0, 30.0, 40.0]]])
    scales = torch.tensor([[[1.0, 10.0]]]).half()
    hessians = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))[None]
    values, error = round_bank(weights, scales, 7, factorise(hessians))
    assert values.tolist() == [[[1, 2, 3, 4]]]
    assert float(error.sum()) == 0


def test_a_scale_of_zero_makes_zeros() -> None:
    weights = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))
    values, error = round_bank(weights, torch.zeros(1, 3, 1).half(), 7, factorise(torch.eye(8)[None]))
    assert not values.any()
    assert error.isfinite().all()


def test_prices_take_the_cheaper_of_two_neighbours() -> None:
    """With a diagonal H every weight is alone: D + lambda R of each must be that of the better candidate."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1, 40, 64, generator=generator)
    scales = torch.full((1, 40, 1), 0.5).half()
    curvature, sensitivity, multiplier = torch.rand(64, generator=generator) + 0.5, torch.rand(1, 40) + 0.5, 0.01
    factors = factorise(torch.diag(curvature)[None], damping=1e-9)
    rate = measure(plain_rounding(weights, scales, 127).to(torch.int8))
    table = prices(rate, scales, sensitivity, multiplier, 127)
    values, _ = round_bank(weights, scales, 127, factors, table)

    def cost(magnitude: Tensor) -> Tensor:
        d = (weights.abs() - magnitude * 0.5).square() * curvature * sensitivity[:, :, None] / 2
        lengths = rate.lengths[rate.classes]
        return d + multiplier * lengths.gather(2, magnitude.long())

    near = (weights.abs() / 0.5).round()
    best = torch.where(cost((near - 1).clamp(min=0)) < cost(near), (near - 1).clamp(min=0), near)
    rising = rate.lengths[rate.classes].gather(2, near.long()) >= rate.lengths[rate.classes].gather(
        2, (near - 1).clamp(min=0).long()
    )
    assert torch.equal(values.abs().float()[rising], best[rising])
    assert (best < near).any(), "the test must see a weight that moves"
    assert math.isfinite(float(table.sum()))
