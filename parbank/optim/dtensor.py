"""Helpers for DTensors that do not import torch.distributed.tensor."""

from typing import Any

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "to_local")


def local_of(tensor: Any) -> Tensor:
    """This rank's part of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor
