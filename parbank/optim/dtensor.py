"""Helpers for DTensors that do not import torch.distributed.tensor."""

import math
from typing import Any

from torch import Tensor

from parbank.errors import ConfigError


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "to_local")


def local_of(tensor: Any) -> Tensor:
    """This rank's part of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def check_mesh(param: Any, name: str, world: int, reduce_gradients: bool) -> None:
    """Refuses a weight on a mesh that is not all ranks: no code would average gradients over the other ranks."""
    size = param.device_mesh.size()
    if size > world or (size < world and reduce_gradients):
        raise ConfigError(
            f"{name} lies on a mesh of {size} ranks, and the optimizer works with {world}: gradients of the others would not be "
            "averaged; call fully_shard over the other dimension of the mesh, pass process_group=mesh.get_group(), or average "
            "gradients yourself and pass reduce_gradients=False"
        )


def place_gradient(param: Any) -> None:
    """Places the gradient of a DTensor as its weight, in place of the old one. Collective where they differ.

    Sequence parallelism leaves norms with partial sums, one on each rank.
    """
    grad = param.grad
    if grad is not None and tuple(grad.placements) != tuple(param.placements):
        param.grad = grad.redistribute(placements=param.placements)


def count_copies(tensor: Any, world: int) -> int:
    """The number of ranks that hold the same part of a DTensor."""
    mesh = tensor.device_mesh
    cuts = [mesh.size(dim) for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return world // math.prod(cuts)
