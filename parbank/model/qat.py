"""Quantisation-aware training on banks: the forward pass sees the weights as integers per row would store them.

With s a row's largest magnitude over q and w_hat = s round(w / s), the forward pass reads

    w + switch * (w_hat - w),

where the switch is a tensor of 0 or 1. It is part of every graph from the first step, so turning it on in the middle
of a run compiles nothing, and a captured CUDA graph follows it. At 0 the weights are unchanged, to the bit.

Backward treats the rounding as the identity (straight through, Bengio et al. 2013). Or both directions replace it by
the soft staircase

    soft(x) = floor(x) + 1/2 + tanh(a (x - floor(x) - 1/2)) / (2 tanh(a / 2)),

which is steep between the integers and flat on them. A row is a row of the matrix as the model reads it: a column of
the bank if the matrix is stored transposed.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

Rounding = Literal["straight", "soft"]
# Of the soft staircase: at 4 it stays within a twentieth of an integer over the third of a step around it, and its gradient on
# an integer is a fourteenth of that half-way between two.
STEEPNESS = 4.0


class FakeQuantiser(nn.Module):
    """Applied to every bank before it is cast; does nothing until `turn(True)`."""

    switch: Tensor

    def __init__(self, transposed: dict[str, tuple[bool, ...]], *, bits: int, rounding: Rounding) -> None:
        """`transposed` says, bank by bank, which matrices are stored transposed."""
        super().__init__()
        self.q, self.rounding = 2 ** (bits - 1) - 1, rounding
        self.register_buffer("switch", torch.zeros(()), persistent=False)
        for key, flags in transposed.items():
            self.register_buffer(f"turned_{key}", torch.tensor(flags)[:, None, None], persistent=False)

    def turn(self, on: bool) -> None:
        """Sets the switch, without waiting for the device and without compiling anything."""
        self.switch.fill_(float(on))

    def forward(self, key: str, bank: Tensor) -> Tensor:
        scale = self._scales(key, bank.detach())
        units = bank / scale
        if self.rounding == "soft":
            return torch.lerp(bank, scale * _soften(units), self.switch)
        return bank + self.switch * (scale * units.round() - bank).detach()

    def _scales(self, key: str, bank: Tensor) -> Tensor:
        sizes = bank.abs()
        rows, columns = sizes.amax(-1, keepdim=True), sizes.amax(-2, keepdim=True)
        largest = torch.where(getattr(self, f"turned_{key}"), columns, rows)
        return largest.clamp(min=torch.finfo(torch.float32).tiny * self.q) / self.q


def _soften(x: Tensor) -> Tensor:
    below = x.detach().floor()
    return below + 0.5 + torch.tanh(STEEPNESS * (x - below - 0.5)) / (2 * math.tanh(STEEPNESS / 2))
