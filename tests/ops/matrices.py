"""Matrices for the tests of products: how they may lie in memory, and what their product is."""

from collections.abc import Callable

import torch
from torch import Tensor

Layout = Callable[[Tensor], Tensor]
HANDLE, STREAM = 42, 7  # what the stand-in for cuBLASLt asks for


def by_rows(x: Tensor) -> Tensor:
    return x


def by_columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def rows_apart(x: Tensor) -> Tensor:
    """The middle columns of a wider matrix."""
    wide = x.new_full((x.shape[0], x.shape[1] + 24), 1e4)
    return wide[:, 8 : 8 + x.shape[1]].copy_(x)


def columns_apart(x: Tensor) -> Tensor:
    return rows_apart(x.t()).t()


def unaligned(x: Tensor) -> Tensor:
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


def scattered(x: Tensor) -> Tensor:
    """Neither rows nor columns are neighbours."""
    return torch.empty(2 * x.shape[0], 2 * x.shape[1], dtype=x.dtype, device=x.device)[::2, ::2].copy_(x)


LAYOUTS = [by_rows, by_columns, rows_apart, columns_apart, unaligned, scattered]
Layout = Callable[[Tensor], Tensor]


def made(m: int, k: int, n: int, device="cpu", dtype=torch.float32) -> list[Tensor]:
    return [torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (k, n), (m, n))]


def counted(m: int, k: int, n: int) -> list[Tensor]:
    """Small integers, with which every order of sums is exact in bfloat16."""
    return [torch.randint(-2, 3, shape).bfloat16() for shape in ((m, k), (k, n), (m, n))]


def exact(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    found = a.double() @ b.double()
    return found if c is None else found + c.double()
