"""A fast estimate, on the device, of the coded size of integers: the rate of a rate-distortion search.

The entropy coder separates rows of different spread. Here the rows of a tensor are classed by mean magnitude, half an
octave each, and a class costs its own entropy. Signs are even, so a magnitude m > 0 costs one more bit. The estimate
is a few percent off the real file, always in the same direction; the solver measures by how much.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_PER_OCTAVE = 2
_LOWEST = -16  # rows of mean magnitude under 2^-8 share a class: they are all but zero
_CLASSES = 7 * _PER_OCTAVE - _LOWEST + 1  # up to a mean of 2^7
_LEVELS = 128  # magnitudes of integers within -127..127
_SCALE_BITS = 5.0  # a scale on the log grid: rows of one tensor lie within a few octaves of eight steps
_COUNT_BITS = 6.0  # one entry of a class's histogram, to a few percent


@dataclass(frozen=True)
class Rate:
    """The cost of one bank's integers."""

    bits: Tensor
    """(N,), float64: of every tensor, scales included."""
    classes: Tensor
    """(N, rows): the class of every row, numbered through all tensors."""
    lengths: Tensor
    """(N * classes, 128): bits of a magnitude in a class, sign included."""


def measure(values: Tensor) -> Rate:
    """The rate of integers (N, rows, cols), int8."""
    n, rows, _ = values.shape
    magnitudes = values.abs()
    spread = magnitudes.sum(2, dtype=torch.int32).double() / max(values.shape[2], 1)
    classes = (_PER_OCTAVE * torch.log2(spread.clamp(min=2.0**-30))).round().int()
    classes = classes.clamp(_LOWEST, 7 * _PER_OCTAVE) - _LOWEST
    classes = classes + _CLASSES * torch.arange(n, dtype=torch.int32, device=values.device)[:, None]
    index = classes[:, :, None] * _LEVELS + magnitudes
    counts = torch.bincount(index.flatten(), minlength=n * _CLASSES * _LEVELS).view(-1, _LEVELS).double()
    # Half a count everywhere: a magnitude that was not seen costs much, not infinitely much.
    smoothed = counts + 0.5
    lengths = torch.log2(smoothed.sum(1, keepdim=True)) - torch.log2(smoothed)
    lengths[:, 1:] += 1.0
    shares = torch.where(counts > 0, counts / counts.sum(1, keepdim=True).clamp(min=1), 1.0)
    bits = -(counts * torch.log2(shares)).sum(1) + counts[:, 1:].sum(1) + _COUNT_BITS * (counts > 0).sum(1)
    return Rate(bits.view(n, -1).sum(1) + _SCALE_BITS * rows, classes.long(), lengths.float())
