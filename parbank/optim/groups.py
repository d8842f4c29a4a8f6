"""Parameter groups: their options, checked when they are added."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parbank.config import require
from parbank.errors import ConfigError
from parbank.optim.algorithm import MatrixAlgorithm, find_algorithm
from parbank.optim.dtensor import is_sharded, local_of
from parbank.optim.layout import block_shape, name_of
from parbank.optim.master import check_dtype
from parbank.optim.memory import overlaps

LR_SCALES = ("spectral", "rms", None)
ADDED = {"maximize": False, "split_sizes": None, "equilibrate": False}
"""Options that optimizers pickled by earlier versions lack."""
UNAVAILABLE = {
    "amsgrad": "it is not implemented",
    "differentiable": "a step is not recorded by autograd",
    "foreach": "a step always updates many tensors at once",
    "fused": "a step always uses fused kernels",
    "capturable": "pass cuda_graph=True to the optimizer instead",
}
"""Options of PyTorch's optimizers that have no meaning here, and why."""


def complete_group(group: dict[str, Any], defaults: dict[str, Any], adam_lr: float | Tensor) -> None:
    """Fills in missing options, in place. Element-wise algorithms take AdamW's learning rate, since Muon's is far too
    high for them."""
    group.setdefault("algorithm", defaults["algorithm"])
    algorithm = find_algorithm(group)
    lr = defaults["lr"] if isinstance(algorithm, MatrixAlgorithm) else adam_lr
    for key, value in {**ADDED, **defaults, "lr": lr, **algorithm.defaults}.items():
        group.setdefault(key, value)
    if group["lr_scale"] == "none":
        group["lr_scale"] = None
    if group["split_sizes"] is not None:
        group["split_sizes"] = tuple(int(size) for size in group["split_sizes"])
    if group["transposed"] is not None:
        group["transposed"] = tuple(bool(flag) for flag in group["transposed"])
    algorithm.complete(group)


def name_params(group: dict[str, Any], number: int) -> None:
    """Gives names to parameters that have none, in place. A set, which has no order, is left for PyTorch to refuse."""
    given = group["params"]
    if isinstance(given, set) or "param_names" in group:
        return
    params = [given] if isinstance(given, Tensor) else list(given)
    if all(isinstance(param, Tensor) for param in params):
        params = [(f"parameter {position} of group {number}", param) for position, param in enumerate(params)]
    group["params"] = params


def check_group(group: dict[str, Any]) -> None:
    """Refuses a group that cannot be used, with the remedy."""
    algorithm = find_algorithm(group)
    require(group["lr_scale"] in LR_SCALES, f"lr_scale must be 'spectral', 'rms' or None, got {group['lr_scale']!r}")
    for key in ("lr", "weight_decay"):
        value = group[key]
        known = not isinstance(value, Tensor) or value.device.type == "cpu"  # a GPU's would have to be waited for
        require(not isinstance(value, Tensor) or value.numel() == 1, f"{key} must be one number, got {value}")
        require(not known or value >= 0, f"{key} must not be negative, got {value}")
    for key, reason in UNAVAILABLE.items():
        require(not group.get(key), f"{key}={group.get(key)} is not an option of ParallelMuon: {reason}; leave it out")
    algorithm.check_options(group)
    for position, param in enumerate(group["params"]):
        name = name_of(group, position)
        check_dtype(param, name)
        require(
            not overlaps(param),
            f"{name} has shape {tuple(param.shape)} and strides {param.stride()}: several of its numbers share memory and "
            "cannot have values of their own; give the optimizer param.contiguous()",
        )
        if isinstance(algorithm, MatrixAlgorithm):
            block_shape(param, group, name)
            if is_sharded(param):
                algorithm.check_sharded(param, group, name)


def are_sharded(groups: Sequence[dict[str, Any]], reduces: bool) -> bool:
    """Whether the parameters are DTensors (FSDP2, tensor parallelism), whose gradients are reduced elsewhere.

    `reduces`: the optimizer averages gradients over ranks. Then DTensors and plain tensors cannot be mixed.
    """
    kinds = {is_sharded(param) for group in groups for param in group["params"]}
    if len(kinds) == 2 and reduces:
        raise ConfigError(
            "some parameters are sharded by FSDP2, which reduces their gradients, and some are plain tensors, whose gradients "
            "are not reduced; call fully_shard on the whole model, or reduce them yourself and pass reduce_gradients=False"
        )
    return True in kinds


def follow_schedulers(groups: Sequence[dict[str, Any]]) -> None:
    """Lets OneCycleLR and CyclicLR cycle Muon's momentum.

    They write `betas` where an optimizer has that option, which Muon does not read. They also leave "max_momentum" in a
    group whose momentum they cycle. A momentum that the user writes meanwhile stays.
    """
    for group in groups:
        cycled = "max_momentum" in group and isinstance(find_algorithm(group), MatrixAlgorithm)
        if cycled and group["momentum"] == group.get("cycled_momentum", group["momentum"]):
            group["momentum"] = group["cycled_momentum"] = float(group["betas"][0])


def find_raised(groups: Sequence[dict[str, Any]]) -> list[Tensor]:
    """The gradients of groups with `maximize`, to be negated in place: shared ones and expanded ones become copies first."""
    found: list[Tensor] = []
    seen: set[int] = set()
    for param in [p for group in groups if group["maximize"] for p in group["params"] if p.grad is not None]:
        place = local_of(param.grad).data_ptr()
        if place in seen or overlaps(local_of(param.grad)):
            param.grad = param.grad.clone(memory_format=torch.contiguous_format)
        seen.add(place)
        found.append(param.grad)
    return found


def negate(tensors: list[Tensor]) -> None:
    """In place."""
    if tensors:
        torch._foreach_neg_(tensors)
