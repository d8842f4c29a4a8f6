"""A plain matrix product in Triton, y = x w^T: what a hand-written GEMM costs beside cuBLAS. Only the study of kernels uses it.

Each program computes one tile of y and walks over K. Programs that run together share rows of x and w: they come in groups
of GROUP rows of tiles, so that both stay in L2 (as in Triton's tutorial of matrix products).
"""

import torch
from torch import Tensor

from parbank.ops.backend import tl, triton

# A tile of 128 x 256 for two warp groups fills Hopper's tensor cores from shared memory: 3 stages of 48 KiB fit.
TILES = {"ROWS": 128, "COLS": 256, "DEPTH": 64, "GROUP": 8}
WARPS, STAGES = 8, 3


@triton.jit
def product_kernel(  # type: ignore[no-untyped-def]  # a Triton kernel's arguments have no Python types
    x, w, y, rows, cols, depth, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr
):
    program, down, across = tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(cols, COLS)
    first = program // (GROUP * across) * GROUP
    height = min(down - first, GROUP)
    i = first + program % (GROUP * across) % height
    j = program % (GROUP * across) // height
    row, col = i * ROWS + tl.arange(0, ROWS), j * COLS + tl.arange(0, COLS)
    k = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        inside = start + k < depth
        left = tl.load(
            x + row[:, None] * depth + start + k[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0
        )
        right = tl.load(
            w + col[None, :] * depth + start + k[:, None], mask=(col < cols)[None, :] & inside[:, None], other=0.0
        )
        total = tl.dot(left, right, total)
    tl.store(
        y + row[:, None] * cols + col[None, :],
        total.to(y.dtype.element_ty),
        mask=(row < rows)[:, None] & (col < cols)[None, :],
    )


def product(x: Tensor, w: Tensor) -> Tensor:
    """x (rows, depth) times w (cols, depth) transposed, both contiguous, of less than 2^31 numbers each."""
    (rows, depth), cols = x.shape, w.shape[0]
    assert max(rows * depth, cols * depth, rows * cols) < 2**31, "offsets are 32 bits"
    y = torch.empty(rows, cols, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(rows, TILES["ROWS"]) * triton.cdiv(cols, TILES["COLS"]),)
    product_kernel[grid](x, w, y, rows, cols, depth, **TILES, num_warps=WARPS, num_stages=STAGES)
    return y
