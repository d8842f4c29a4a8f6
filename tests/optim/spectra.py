"""Inputs whose singular values are as uneven as a momentum's, for the 16-bit Newton-Schulz. Random matrices are not."""

import torch
from torch import Tensor

LEAST = 2e-3  # of the norm; float16 loses digits of what is smaller, and with it the lower end


def leading(count: int, rows: int, cols: int) -> Tensor:
    """Matrices with one singular value of 0.75 to 0.95 of the norm, under tails of four kinds. In every other matrix the
    leading direction has a few of the rows only."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(count, rows, rows, generator=generator, dtype=torch.float64)
    basis[::2, rows // 8 :, 0] = 0
    first = torch.linspace(0.75, 0.95, count, dtype=torch.float64)[:, None]
    power = torch.tensor([0.0, 1.0, 1.0, 3.0, 3.0, 8.0, 8.0], dtype=torch.float64).repeat(count)[:count, None]
    tail = torch.arange(1, rows, dtype=torch.float64) ** -power
    tail = tail * (1 - first**2).sqrt() / tail.norm(dim=1, keepdim=True)
    values = torch.cat([first, tail], dim=1).clamp_min(LEAST)
    other = torch.randn(count, cols, rows, generator=generator, dtype=torch.float64)
    return _compose(torch.linalg.qr(basis)[0], values, torch.linalg.qr(other)[0])


def structured(rows: int, cols: int) -> Tensor:
    """Low ranks, nearly low ranks, power laws, many decades, equal values, zero rows, and matrices of few or equal entries."""
    generator = torch.Generator().manual_seed(1)
    i = torch.arange(1, rows + 1, dtype=torch.float64)
    spectra = [torch.where(i <= rank, 1.0, rest) for rank in (1, 4, rows) for rest in (0.0, 1e-4, 1e-2)]
    spectra += [i**-power for power in (0.5, 1.0, 2.0, 3.0)]
    spectra += [torch.logspace(0, -decades, rows, dtype=torch.float64) for decades in (2, 4, 8)]
    count = len(spectra)
    U, V = (
        torch.linalg.qr(torch.randn(count, side, rows, generator=generator, dtype=torch.float64))[0]
        for side in (rows, cols)
    )
    zeros, one_entry, one_row = torch.zeros(3, rows, cols).unbind()
    zeros[::2] = torch.randn(rows, cols, generator=generator)[::2]
    one_entry[0, 0] = one_row[0] = 1
    plain = torch.stack([zeros, one_entry, one_row, torch.ones(rows, cols), torch.eye(rows, cols)])
    return torch.cat([_compose(U, torch.stack(spectra), V), plain])


def _compose(U: Tensor, values: Tensor, V: Tensor) -> Tensor:
    return (U * values[:, None, :] @ V.mT).float()


def check_ends(found: Tensor, ends: tuple[float, float], full: int) -> None:
    """Singular values end where they should: the first `full` matrices' between both ends, all others' below the upper."""
    assert torch.isfinite(found).all()
    values = torch.linalg.svdvals(found.double())
    low, high = ends
    assert values.max() < high + 0.01, values.max()
    assert values[:full].min() > low - 0.01, values[:full].min()
