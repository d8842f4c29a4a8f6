"""Sums over the lines that programs leave behind."""

import pytest
import torch
from aot import Job, build
from checking import assert_same_bits

from parbank.ops import configs
from parbank.ops.sums import BLOCK_COLS, BLOCK_LINES, sum_lines


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 7, 17), (3, 257, 40), (1, 600, 8), (2, 0, 5), (1, 3, 0)])
def test_matches_a_sum_in_float64(shape, device, poison):
    partial = torch.randn(shape, device=device)
    torch.testing.assert_close(sum_lines(partial), partial.double().sum(1).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_compiles_without_spills():
    signature = {"partial": "*fp32", "out": "*fp32", "lines": "i32", "cols": "i32"}
    sizes = {"BLOCK_LINES": BLOCK_LINES, "BLOCK_COLS": BLOCK_COLS}
    jobs = [
        Job("parbank.ops.sums:_sum_lines_kernel", signature, sizes, capability, 4, 1)
        for capability in configs.ARCHITECTURES.values()
    ]
    assert all(built.stack == 0 for built in build(jobs))


@pytest.mark.gpu
def test_same_bits_every_time(device):
    assert_same_bits(sum_lines, [torch.randn(3, 660, 512, device=device)], backward=False)
