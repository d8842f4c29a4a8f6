"""bfloat16 weights without lost updates: the 16 mantissa bits that bfloat16 lacks are kept beside it. (As in
modded-nanogpt #190.)

A bfloat16 is the upper half of a float32. Rounding the float32 master to the nearest bfloat16 leaves a remainder of
at most half a unit in the last place. The remainder, a signed 16-bit integer in units of the master's last bit,
restores the master exactly: bits(master) = bits(weight) << 16 + remainder. The weight is the rounded master; a
truncated master would be biased towards zero. Weight and remainder take 4 bytes, not 6.

If other code changes a weight, its remainder is stale but still less than half a unit: nothing breaks.
"""

import torch
from torch import Tensor

from parbank.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
LIKE_THE_WEIGHT = ("momentum_buffer", "exp_avg", "exp_avg_sq", "low_bits")
"""States with one number for each weight."""

_HALF = 0x8000  # half a unit in the last place of the upper 16 bits


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a weight's state and arithmetic."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_dtype(param: Tensor, name: str) -> None:
    """Refuses a weight whose dtype no algorithm updates."""
    if param.dtype not in DTYPES:
        raise ConfigError(
            f"{name} is {param.dtype}; ParallelMuon updates float32, bfloat16 and float64 weights: convert it, e.g. model.float()"
        )


def check_fit(shape: tuple[int, ...], earlier: tuple[int, ...]) -> None:
    """Refuses a weight whose state was made for another shape."""
    if shape != earlier:
        raise ConfigError(
            f"a parameter had shape {tuple(earlier)} at an earlier step and has {tuple(shape)} now, which its state does not "
            "fit; make a new optimizer, or start its state anew with optimizer.state.pop(param)"
        )


def join_master(weight: Tensor, low_bits: Tensor) -> Tensor:
    """The float32 master of a bfloat16 weight and its remainder (int16)."""
    bits = (weight.view(torch.int16).to(torch.int32) << 16) + low_bits.to(torch.int32)
    return bits.view(torch.float32)


def split_master(master: Tensor, weight: Tensor, low_bits: Tensor) -> None:
    """Stores a float32 master into a bfloat16 weight (nearest, halves upwards in magnitude) and its remainder."""
    bits = master.view(torch.int32)
    high = (bits + _HALF) >> 16
    weight.view(torch.int16).copy_(high)
    low_bits.copy_(bits - (high << 16))
