# mypy: disable-error-code="no-untyped-def"
"""The columns of one block of GPTQ in Triton: one launch instead of about 26 a column.

A program takes some rows and keeps their block, all its columns, in registers. Rows are independent, so it needs
nothing of other programs. The numbers are those of `gptq._column_by_column` to the last bit: divisions are rounded as
IEEE says, and products are not fused with sums.
"""

from torch import Tensor

from parbank.gpu import on_device
from parbank.ops.backend import tl, triton

BLOCK = 64  # columns; a power of two
ROWS = 32  # a program's: with 4 warps a thread holds 16 weights and 16 errors


@triton.jit
def _round_block_kernel(work, values, errors, scales, table, upper, curvature, rows, cols, first, width, q, entries, PRICED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip  # noqa: E501
    n = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    known = r < rows
    inside = (c < width)[:, None] & known[None, :]
    tile = tl.load(work + n * cols * rows + (first + c)[:, None] * rows + r[None, :], mask=inside, other=0.0)
    step = tl.load(scales + n * rows + r, mask=known, other=0.0)
    divisor = tl.where(step > 0, step, float("inf"))
    found = tl.zeros((BLOCK, ROWS), tl.float32)
    for j in range(width):
        place = n * cols + first + j
        here = c == j
        column = tl.sum(tl.where(here[:, None], tile, 0.0), 0)  # of one weight and zeros: exact
        scaled = tl.div_rn(column, divisor)
        size = tl.abs(scaled)
        # Adding 2^23 leaves float32 no room for a fraction: ties go to the even number, as torch.round's do.
        near = tl.minimum((tl.minimum(size, 1048576.0) + 8388608.0) - 8388608.0, q)
        if PRICED:
            price = tl.load(table + (n * entries + near.to(tl.int32)) * rows + r, mask=known, other=0.0)
            toll = tl.div_rn(price, tl.zeros((ROWS,), tl.float32) + tl.load(curvature + place))
            near = tl.where((near > 0) & (size - near + 0.5 < toll), near - 1, near)
        rounded = tl.where(scaled < 0, -near, near)
        line = tl.load(upper + place * cols + first + c, mask=(c >= j) & (c < width), other=0.0)
        corner = tl.sum(tl.where(here, line, 0.0), 0)
        error = tl.div_rn(column - rounded * step, tl.zeros((ROWS,), tl.float32) + corner)
        found = tl.where(here[:, None], error[None, :], found)
        tile = tl.where((c > j)[:, None], tile - line[:, None] * error[None, :], tile)
        tl.store(values + place * rows + r, rounded.to(tl.int8), mask=known)
    tl.store(errors + n * width * rows + c[:, None] * rows + r[None, :], found, mask=inside)


def round_block(
    work: Tensor,
    values: Tensor,
    errors: Tensor,
    scales: Tensor,
    table: Tensor | None,
    upper: Tensor,
    curvature: Tensor,
    *,
    first: int,
    q: int,
) -> None:
    """Rounds columns `first` onwards, as many as `errors` has: writes their integers and their errors.

    work and values (N, cols, rows), errors (N, width, rows), scales (N, rows), table (N, q + 1, rows), upper
    (N, cols, cols), curvature (N, cols); all contiguous, float32 except for the int8 values.
    """
    n, cols, rows = work.shape
    width = errors.shape[1]
    with on_device(work.device):
        _round_block_kernel[(triton.cdiv(rows, ROWS), n)](
            work, values, errors, scales, scales if table is None else table, upper, curvature, rows, cols, first, width,
            float(q), q + 1, PRICED=table is not None, BLOCK=BLOCK, ROWS=ROWS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
