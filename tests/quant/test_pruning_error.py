"""What pruning takes for its error is the error: every decision against D + lambda R worked out from its definition."""

import torch
from torch import Tensor

from parbank.quant.gptq import _round
from parbank.quant.pruning import prices, prune_ones
from parbank.quant.rate import measure

ROWS, COLS = 6, 32


def make_problem() -> tuple[Tensor, ...]:
    """Weights, integers near them, scales and sensitivities that differ by row, and a Hessian that is not diagonal."""
    generator = torch.Generator().manual_seed(0)
    scales = (0.02 * torch.arange(1, ROWS + 1)).half().view(1, ROWS, 1)
    weights = 1.2 * scales.float() * torch.randn(1, ROWS, COLS, generator=generator)
    values = (weights / scales.float()).round().to(torch.int8)
    x = torch.randn(200, COLS, generator=generator) @ torch.randn(COLS, COLS, generator=generator)
    sensitivity = torch.linspace(0.5, 2.0, ROWS).view(1, ROWS)
    return weights, values, scales, (x.T @ x / 200)[None], sensitivity


def loss(values: Tensor, weights: Tensor, scales: Tensor, hessians: Tensor, sensitivity: Tensor) -> Tensor:
    """(rows,) 1/2 g d H d^T of the first matrix, in float64."""
    d = (values.double() * scales.double() - weights.double())[0]
    return 0.5 * sensitivity[0].double() * ((d @ hessians[0].double()) * d).sum(1)


def prune_by_definition(values: Tensor, multiplier: float, *about: Tensor) -> tuple[Tensor, Tensor]:
    """The same decisions, each from two whole losses; and how near each was, as a share of the bits' worth."""
    values, nearest = values.clone(), torch.full(values.shape[1:], torch.inf, dtype=torch.float64)
    for parity in (0, 1):
        rate = measure(values)
        before, changed = loss(values, *about), values.clone()
        for row in range(ROWS):
            lengths = rate.lengths[rate.classes[0, row]].double()
            worth = multiplier * float(lengths[1] - lengths[0])
            for col in range(1 - parity, COLS, 2):
                if abs(int(values[0, row, col])) != 1:
                    continue
                without = values.clone()
                without[0, row, col] = 0
                growth = float(loss(without, *about)[row] - before[row])
                nearest[row, col] = abs(growth - worth) / abs(worth)
                if growth < worth:
                    changed[0, row, col] = 0
        values = changed
    return values, nearest


def test_every_one_goes_or_stays_as_the_loss_says() -> None:
    weights, values, scales, hessians, sensitivity = make_problem()
    ones = values.abs() == 1
    # What the bits of a one are worth here: the median of what the ones cost, so that half of them go.
    growth = 0.5 * sensitivity[:, :, None] * scales.float().square() * hessians.diagonal(dim1=1, dim2=2)[:, None, :]
    multiplier = float(growth.expand_as(values)[ones].median())
    expected, nearest = prune_by_definition(values, multiplier, weights, scales, hessians, sensitivity)
    gone = int((expected != values).sum())
    assert 0.2 * int(ones.sum()) < gone < 0.8 * int(ones.sum()), "the price must leave some ones and take others"
    assert nearest.min() > 1e-4, "no decision hangs on rounding"
    assert torch.equal(prune_ones(weights, values, scales, hessians, sensitivity, multiplier), expected)


def test_rounding_turns_where_both_neighbours_cost_the_same() -> None:
    """A magnitude a little above the threshold is rounded up, a little below it down; and the costs of both agree."""
    _, values, scales, _, sensitivity = make_problem()
    rate, multiplier, curvature = measure(values), 2e-5, 0.7
    table = prices(rate, scales, sensitivity, multiplier, 3)
    checked = 0
    for row in range(ROWS):
        step, g = float(scales[0, row, 0]), float(sensitivity[0, row])
        lengths = rate.lengths[rate.classes[0, row]].double()
        for m in (1, 2, 3):
            threshold = m - 0.5 + float(table[0, row, m]) / curvature
            if not m - 0.5 < threshold < m + 0.5:  # beyond, another integer is the nearest
                continue
            costs = [
                0.5 * g * curvature * ((threshold - i) * step) ** 2 + multiplier * float(lengths[i]) for i in (m - 1, m)
            ]
            assert abs(costs[0] - costs[1]) < 1e-4 * costs[1]
            for nudge, expected in ((-1e-3, m - 1), (1e-3, m)):
                column = torch.full((1, ROWS), (threshold + nudge) * step)
                found = _round(column, scales[:, :, 0].float(), 3, table.mT.contiguous(), torch.full((1, 1), curvature))
                assert int(found[0, row]) == expected
            checked += 1
    assert checked > ROWS
