"""Parameter groups: their options, checked when they are added."""

from typing import Any

import torch
from torch import Tensor

from parbank.config import require
from parbank.optim.algorithm import MatrixAlgorithm, find_algorithm
from parbank.optim.dtensor import is_sharded
from parbank.optim.layout import block_shape, name_of
from parbank.optim.memory import overlaps

LR_SCALES = ("spectral", "rms", None)
DTYPES = (torch.float32, torch.bfloat16)


def complete_group(group: dict[str, Any], defaults: dict[str, Any], adam_lr: float | Tensor) -> None:
    """Fills in missing options, in place. Element-wise algorithms take AdamW's learning rate, since Muon's is far too
    high for them."""
    group.setdefault("algorithm", defaults["algorithm"])
    algorithm = find_algorithm(group)
    lr = defaults["lr"] if isinstance(algorithm, MatrixAlgorithm) else adam_lr
    for key, value in {**defaults, "lr": lr, **algorithm.defaults}.items():
        group.setdefault(key, value)
    if group["lr_scale"] == "none":
        group["lr_scale"] = None
    if group["transposed"] is not None:
        group["transposed"] = tuple(bool(flag) for flag in group["transposed"])
    algorithm.complete(group)


def check_group(group: dict[str, Any]) -> None:
    """Refuses a group that cannot be used, with the remedy."""
    algorithm = find_algorithm(group)
    require(group["lr_scale"] in LR_SCALES, f"lr_scale must be 'spectral', 'rms' or None, got {group['lr_scale']!r}")
    for key in ("lr", "weight_decay"):
        require(isinstance(group[key], Tensor) or group[key] >= 0, f"{key} must not be negative, got {group[key]}")
    algorithm.check_options(group)
    for position, param in enumerate(group["params"]):
        name = name_of(group, position)
        require(
            param.dtype in DTYPES,
            f"{name} is {param.dtype}; ParallelMuon updates float32 and bfloat16 weights: convert it, e.g. model.float()",
        )
        require(
            not overlaps(param),
            f"{name} has shape {tuple(param.shape)} and strides {param.stride()}: several of its numbers share memory and "
            "cannot have values of their own; give the optimizer param.contiguous()",
        )
        if isinstance(algorithm, MatrixAlgorithm):
            block_shape(param, group, name)
            if is_sharded(param):
                algorithm.check_sharded(param, group, name)
