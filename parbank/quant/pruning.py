"""Rate-aware rounding: moves integers towards zero where the bits saved are worth more than the error. (Rate-distortion
rounding: DeepCABAC, Wiedemann et al. 2019.)

The measure is D + lambda R: nats of loss plus lambda times bits. `prices` applies it inside GPTQ, where later columns
compensate; `prune_ones` applies it to existing integers.
"""

import torch
from torch import Tensor

from parbank.quant.rate import Rate, measure

_STEEPEST = 8.0  # bits between neighbouring magnitudes; beyond lie only the histogram's empty ends


def prices(rate: Rate, scales: Tensor, sensitivity: Tensor, multiplier: float, q: int) -> Tensor:
    """The rounding thresholds of `gptq.round_bank`, (N, rows, q + 1).

    At magnitude x, in steps, rounding to m costs 1/2 g c (x - m)^2 step^2 + lambda bits(m), with g the row's sensitivity
    and c the curvature of the column. m beats m - 1 where

        x - m + 1/2 > lambda (bits(m) - bits(m - 1)) / (g c step^2),

    and the right side without c is the price.
    """
    slopes = rate.lengths.diff(dim=1, prepend=rate.lengths[:, :1]).clamp(0.0, _STEEPEST)[:, : q + 1]
    stiffness = sensitivity * scales[:, :, 0].float().square()
    # a row that costs nothing to lose (or is all zero anyway) has no use for a threshold beyond one whole step
    unit = torch.where(stiffness > 0, multiplier / stiffness.clamp(min=torch.finfo(torch.float32).tiny), 0.0)
    return slopes[rate.classes] * unit[:, :, None]


def prune_ones(
    weights: Tensor, values: Tensor, scales: Tensor, hessians: Tensor, sensitivity: Tensor, multiplier: float
) -> Tensor:
    """Sets +-1 to 0 where D + lambda R falls; (N, rows, cols) throughout, scales per row.

    Zeroing the integer i of column j moves the error d = value * scale - w by -i * scale there, and D by

        1/2 g (-2 i scale (d H)_j + scale^2 H_jj).

    Neighbours that are zeroed together add cross terms this leaves out, so half of the candidates are taken, by
    alternating columns, before the other half is judged again.
    """
    values = values.clone()
    step = scales[:, :, :1].float()
    diagonal = hessians.diagonal(dim1=1, dim2=2)[:, None, :]
    for parity in (0, 1):
        rate = measure(values)
        saved = (rate.lengths[:, 1] - rate.lengths[:, 0])[rate.classes][:, :, None]
        error = values.float() * step - weights
        growth = -2 * values.float() * step * (error @ hessians) + step.square() * diagonal
        pays = (values.abs() == 1) & (0.5 * sensitivity[:, :, None] * growth < multiplier * saved)
        pays[:, :, parity::2] = False
        values[pays] = 0
    return values
