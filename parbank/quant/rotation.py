"""Hadamard rotation (QuIP#, Tseng et al. 2024; QuaRot, Ashkboos et al. 2024): spreads outlying columns over a block
before quantising, and is undone exactly.

With T the matrix of ones and minus ones, T T = block * I. The weights are stored as W T and read as (W T) T / block:
additions and a power of two, so that reading is exact arithmetic. The product W x becomes (W T)(T x / block), hence
the Hessian of the rotated weights is T H T / block^2.
"""

import torch
from torch import Tensor


def block_size(cols: int) -> int:
    """The largest power of two that divides the columns."""
    return cols & -cols


def rotate(weights: Tensor, block: int) -> Tensor:
    """W T over the last dimension, block by block; applied twice it gives block * W."""
    shape = weights.shape
    half = 1
    while half < block:
        pairs = weights.reshape(*shape[:-1], shape[-1] // (2 * half), 2, half)
        first, second = pairs.unbind(-2)
        weights = torch.stack([first + second, first - second], dim=-2).reshape(shape)
        half *= 2
    return weights


def rotate_hessian(hessian: Tensor, block: int) -> Tensor:
    """T H T / block^2 over the last two dimensions: the Hessian of inputs T x / block."""
    return rotate(rotate(hessian, block).mT, block).mT / block**2
