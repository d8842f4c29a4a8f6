"""Pruning lowers D + lambda R, and only ever turns ones into zeros."""

import torch

from parbank.quant.pruning import prune_ones
from parbank.quant.rate import measure


def test_pruning_pays_and_touches_ones_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 32, 64, generator=generator)
    x = torch.randn(500, 64, generator=generator)
    hessians = (x.T @ x / 500).expand(2, 64, 64)
    scales, sensitivity, multiplier = torch.full((2, 32, 1), 1.0).half(), torch.ones(2, 32), 0.03
    values = weights.round().clamp(-3, 3).to(torch.int8)

    def cost(integers: torch.Tensor) -> float:
        d = integers.float() - weights
        return float(0.5 * ((d @ hessians) * d).sum() + multiplier * measure(integers).bits.sum())

    pruned = prune_ones(weights, values, scales, hessians, sensitivity, multiplier)
    changed = pruned != values
    assert changed.any()
    assert (values[changed].abs() == 1).all()
    assert not pruned[changed].any()
    assert cost(pruned) < cost(values)
    free = prune_ones(weights, values, scales, hessians, sensitivity, 0.0)
    assert cost(free) <= cost(values), "at no price only ones that lower the error itself may go"


def test_the_rate_is_the_entropy_of_rows_by_their_spread() -> None:
    generator = torch.Generator().manual_seed(0)
    wide = (20 * torch.randn(1, 64, 256, generator=generator)).round().clamp(-127, 127)
    narrow = torch.randn(1, 64, 256, generator=generator).round()
    mixed = measure(torch.cat([wide, narrow], 1).to(torch.int8)).bits
    apart = measure(wide.to(torch.int8)).bits + measure(narrow.to(torch.int8)).bits
    torch.testing.assert_close(mixed, apart)  # neither pays for the other's spread
    per_weight = float(measure(wide.to(torch.int8)).bits) / wide.numel()
    assert abs(per_weight - 6.37) < 0.15  # log2(20 sqrt(2 pi e)) and the side information
    zeros = measure(torch.zeros(3, 8, 8, dtype=torch.int8))
    assert zeros.bits.shape == (3,)
    assert (zeros.bits < 8 * 8).all()
