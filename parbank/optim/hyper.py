"""Hyperparameters on the device: a small table that kernels read, one row per parameter group.

Groups stay ordinary Python dicts that schedulers write floats into. A step that finds them changed sends the whole
table in one copy from pinned memory, without waiting. Kernels, CUDA graphs and compiled code read the table and never
see a Python number that could change.
"""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from parbank.config import require

LR, MOMENTUM, DECAY, ROW_BETA = range(4)
WIDTH = 4
ROUNDING = 1e-12  # LinearLR that ends at 0, for example, may end this far below 0


class HyperTable:
    """(groups + 1, WIDTH) float32 on the device; the last row holds the clip."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.values: Tensor = torch.empty(0, WIDTH, dtype=torch.float32, device=device)
        self._sent: list[list[float | None]] | None = None

    def refresh(self, groups: Sequence[dict[str, Any]], max_norm: float | None) -> None:
        """Sends the values that changed since the last step. A learning rate that is a tensor is copied on the device."""
        rows: list[list[Any]] = [
            [_to_send(group["lr"]), _read(group["momentum"]), _to_send(group["weight_decay"]), _read(group["row_beta"])]
            for group in groups
        ]
        rows.append([math.inf if max_norm is None else max_norm, 0.0, 0.0, 0.0])
        if rows != self._sent:
            check_max_norm(max_norm)
            for group in groups:
                check_rates(group)
            fresh = send([[float(number or 0.0) for number in row] for row in rows], torch.float32, self.device)
            # In place where possible: a captured graph reads this very memory.
            self.values = self.values.copy_(fresh) if self.values.shape == fresh.shape else fresh
            self._sent = rows
        for number, group in enumerate(groups):
            for column, key in ((LR, "lr"), (DECAY, "weight_decay")):
                if isinstance(group[key], Tensor):
                    self.values[number, column].copy_(group[key].squeeze(), non_blocking=True)

    @property
    def max_norm(self) -> Tensor:
        return self.values[-1, 0]


def send(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copies host numbers to the device without waiting for it."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    if torch.cuda.is_current_stream_capturing():  # a replay would copy the host memory's contents of that time
        raise RuntimeError("host numbers are sent to the device inside the capture")
    # Pinned memory is recycled by PyTorch only after the copy has run.
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True).to(device, non_blocking=True)


def check_max_norm(max_norm: float | None) -> None:
    """Refuses 0, by which some trainers mean no clip and which would stop training, and less, which would go uphill."""
    good = max_norm is None or (isinstance(max_norm, Real) and max_norm > 0)
    require(good, f"max_norm must be a number above 0, or None for no clip, got {max_norm!r}")


def check_rates(group: dict[str, Any]) -> None:
    """Refuses numbers of a group by which weights would become NaN or grow without bound. Schedules may change them."""
    check_number("lr", group["lr"])
    check_number("weight_decay", group["weight_decay"])
    for key in ("momentum", "row_beta"):
        check_number(key, group[key], below=1)


def check_number(name: str, value: Any, below: float = math.inf) -> None:
    """Refuses anything but one number in 0 <= value < below. A tensor on a GPU would have to be waited for: it passes."""
    if isinstance(value, Tensor):
        require(value.numel() == 1, f"{name} must be one number, got {value}")
        if value.device.type != "cpu":
            return
    require(isinstance(value, (float, Real, Tensor)), f"{name} must be a number, got {value!r}")
    require(not value < -ROUNDING, f"{name} must not be negative, got {value}")
    allowed = "a finite number" if math.isinf(below) else f"at least 0 and below {below:g}"
    require(bool(value < below), f"{name} must be {allowed}, got {value}")


def check_count(name: str, value: Any) -> None:
    """Refuses anything but a whole number of at least 1."""
    good = isinstance(value, Integral) and int(value) >= 1
    require(good, f"{name} must be a whole number of at least 1, got {value!r}")


def _to_send(value: Any) -> Any:
    """The value; None for a tensor, which is copied on the device. A number that replaces the tensor then differs and is sent."""
    return None if isinstance(value, Tensor) else value


def _read(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value
