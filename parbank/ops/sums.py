"""Sums the lines that programs write, one float32 line per program: the second pass of a sum over all rows.

PyTorch's reduction of (2, 396, 512) is mostly latency, since few of its threads have work, and a pass of the golf
recipe has 23 such sums. Here a program takes 16 columns and loads 256 lines at a time. The order of the sum
is fixed.
"""

import torch
from torch import Tensor

from parbank.gpu import on_device
from parbank.ops.backend import tl, triton

BLOCK_LINES, BLOCK_COLS = 256, 16


@triton.jit
def _sum_lines_kernel(partial, out, lines, cols, BLOCK_LINES: tl.constexpr, BLOCK_COLS: tl.constexpr):
    col = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    known = col < cols
    start = partial + tl.program_id(1) * lines * cols
    total = tl.zeros((BLOCK_LINES, BLOCK_COLS), tl.float32)
    for first in range(0, lines, BLOCK_LINES):
        line = first + tl.arange(0, BLOCK_LINES)
        inside = (line < lines)[:, None] & known[None, :]
        total += tl.load(start + line[:, None] * cols + col[None, :], mask=inside, other=0.0)
    tl.store(out + tl.program_id(1) * cols + col, tl.sum(total, 0), mask=known)


def sum_lines(partial: Tensor) -> Tensor:
    """partial (sums, lines, cols), contiguous, in float32, summed over its lines."""
    sums, lines, cols = partial.shape
    out = torch.empty((sums, cols), dtype=torch.float32, device=partial.device)
    if out.numel():
        with on_device(partial.device):
            _sum_lines_kernel[(triton.cdiv(cols, BLOCK_COLS), sums)](
                partial, out, lines, cols, BLOCK_LINES=BLOCK_LINES, BLOCK_COLS=BLOCK_COLS, num_warps=4, num_stages=1
            )
    return out
