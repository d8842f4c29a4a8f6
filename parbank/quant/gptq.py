"""GPTQ (Frantar et al. 2022): after each column is rounded, the remaining columns compensate for its error.

For one row the loss increase of an error d is proportional to d H d^T (H: the second moment of the layer's input).
Write H = V V^T with V upper triangular and U = V^-1. Rounding the columns in order and moving, after column j, every
later column k by -e_j U_jk / U_jj makes the whole error

    d H d^T = sum_j e_j^2 / U_jj^2,      e_j: the rounding error of column j itself,

so 1 / U_jj^2 is the curvature that column j has left once all later columns follow it. The total falls from sum_j
H_jj to sum_j 1 / U_jj^2 for the same rounding errors. A diagonal H gives plain rounding.

All rows of all matrices of a bank are independent, so a bank (N, rows, cols) is rounded in `cols` steps; the columns
beyond a block of `BLOCK` receive its errors as one product.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from parbank.ops.backend import use_triton
from parbank.quant.kernels import BLOCK, round_block


@dataclass(frozen=True)
class HessianFactors:
    """The factorised Hessians of a bank. They depend on the Hessians alone, so many roundings share them."""

    order: Tensor
    """(N, cols): columns in the order they are rounded."""
    upper: Tensor
    """(N, cols, cols), float32: U above in that order."""
    curvature: Tensor
    """(N, cols): 1 / U_jj^2, in that order."""


def factorise(hessians: Tensor, *, damping: float = 0.01, activation_order: bool = True) -> HessianFactors:
    """(N, cols, cols), symmetric and positive semidefinite, of any rank.

    In activation order the columns of the largest curvature are rounded first, while many others can still compensate.
    `damping` times the mean of the diagonal is added. It makes the factorisation exist, and prevents corrections that
    only the noise of few tokens supports. Matrices of one input (query, key and value) often come as one expanded
    tensor. An H of zeros counts as the identity, which gives plain rounding.
    """
    wide = hessians.double()
    diagonal = wide.diagonal(dim1=1, dim2=2)
    level = diagonal.mean(1)
    level = torch.where(level > 0, level, torch.ones_like(level))
    cols = wide.shape[1]
    order = torch.argsort(diagonal, dim=1, descending=True, stable=True)
    if not activation_order:
        order = torch.arange(cols, device=wide.device).repeat(len(wide), 1)
    ordered = wide.gather(1, order[:, :, None].expand(-1, -1, cols)).gather(2, order[:, None, :].expand(-1, cols, -1))
    ordered.diagonal(dim1=1, dim2=2).add_(damping * level[:, None] + torch.finfo(torch.float32).tiny)
    # torch factorises into lower times upper; flipping rows and columns turns that into upper times lower
    v = torch.linalg.cholesky(ordered.flip(1, 2)).flip(1, 2)
    eye = torch.eye(cols, dtype=v.dtype, device=v.device).expand_as(v)
    upper = torch.linalg.solve_triangular(v, eye, upper=True)
    curvature = v.diagonal(dim1=1, dim2=2).square()
    return HessianFactors(order, upper.float(), curvature.float())


def round_bank(
    weights: Tensor, scales: Tensor, q: int, factors: HessianFactors, prices: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Integers (N, rows, cols) within -q..q for weights of that shape, and the error d H d^T of every row (N, rows).

    `scales` (N, rows, groups): group g covers cols / groups columns. A scale of 0 makes zeros.

    `prices` (N, rows, q + 1), where given, makes rounding rate-aware: price[m] * curvature^-1 is how far beyond the
    midpoint a magnitude must lie to be rounded up to m instead of m - 1 (see parbank.quant.pruning.prices).
    """
    n, rows, cols = weights.shape
    order = factors.order[:, :, None].expand(n, cols, rows)
    work = weights.float().mT.gather(1, order)  # (N, cols, rows): a step works on whole lines of memory
    values = torch.empty(n, cols, rows, dtype=torch.int8, device=weights.device)
    error = torch.zeros(n, rows, device=weights.device)
    table = None if prices is None else prices.mT.contiguous()
    round_columns = _in_kernel if scales.shape[2] == 1 and use_triton(work) else _column_by_column
    for first in range(0, cols, BLOCK):
        last = min(first + BLOCK, cols)
        errors = round_columns(work, values, scales, q, factors, table, first, last)
        error += errors.square().sum(1)
        work[:, last:] -= factors.upper[:, first:last, last:].mT @ errors
    back = torch.empty_like(values).scatter_(1, order, values)
    return back.mT.contiguous(), error


def _column_by_column(
    work: Tensor,
    values: Tensor,
    scales: Tensor,
    q: int,
    factors: HessianFactors,
    table: Tensor | None,
    first: int,
    last: int,
) -> Tensor:
    """Rounds the columns of a block into `values`, and returns their errors (N, last - first, rows). Changes the block."""
    steps, block = _column_scales(scales, factors.order), work[:, first:last]
    errors = torch.empty_like(block)
    for j in range(last - first):
        place = first + j
        column, step = block[:, j], steps(place)
        rounded = _round(column, step, q, table, factors.curvature[:, place, None])
        row = factors.upper[:, place, place:last, None]
        errors[:, j] = (column - rounded * step) / row[:, 0]
        block[:, j + 1 :] -= row[:, 1:] * errors[:, None, j]
        values[:, place] = rounded.to(torch.int8)
    return errors


def _in_kernel(
    work: Tensor,
    values: Tensor,
    scales: Tensor,
    q: int,
    factors: HessianFactors,
    table: Tensor | None,
    first: int,
    last: int,
) -> Tensor:
    """`_column_by_column` in one launch, for one scale a row. Leaves the block as it is: nothing reads it again."""
    errors = torch.empty(len(work), last - first, work.shape[2], device=work.device)
    steps, upper = scales[:, :, 0].float().contiguous(), factors.upper.contiguous()
    curvature = factors.curvature.contiguous()
    round_block(work, values, errors, steps, table, upper, curvature, first=first, q=q)
    return errors


def _column_scales(scales: Tensor, order: Tensor) -> Callable[[int], Tensor]:
    """A function from a place in the order to the scales (N, rows) of the column there."""
    n, rows, groups = scales.shape
    wide = scales.float()
    if groups == 1:
        return lambda place: wide[:, :, 0]
    group = order * groups // order.shape[1]  # the group of every column, in order
    return lambda place: wide.gather(2, group[:, place, None, None].expand(n, rows, 1))[:, :, 0]


def _round(column: Tensor, step: Tensor, q: int, prices: Tensor | None, curvature: Tensor) -> Tensor:
    """The nearest multiple within -q..q, or its neighbour towards zero where the price says so."""
    scaled = column / torch.where(step > 0, step, torch.inf)
    if prices is None:
        return scaled.round().clamp(-q, q)
    size = scaled.abs()
    near = size.round().clamp(max=q)
    toll = prices.gather(1, near.long()[:, None])[:, 0] / curvature
    near = torch.where((near > 0) & (size - near + 0.5 < toll), near - 1, near)
    return near * scaled.sign()
