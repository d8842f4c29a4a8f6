"""Parameter groups: their options, checked when they are added."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parbank.config import require
from parbank.errors import ConfigError
from parbank.optim.algorithm import MatrixAlgorithm, find_algorithm
from parbank.optim.dtensor import is_sharded, local_of
from parbank.optim.hyper import check_count, check_rates
from parbank.optim.layout import block_shape, name_of
from parbank.optim.master import check_dtype
from parbank.optim.memory import overlaps

LR_SCALES = ("spectral", "rms", None)
ADDED = {"maximize": False, "split_sizes": None, "equilibrate": False}
"""Options that optimizers pickled by earlier versions lack."""
FLAGS = ("nesterov", "cautious", "maximize", "normuon", "equilibrate", "flatten")
OF_THE_OPTIMIZER = ("max_norm", "process_group", "reduce_gradients", "cuda_graph", "extra_captured")
"""Arguments of ParallelMuon that a group cannot have for itself."""
OTHER_NAMES = {
    "adam_lr": "lr", "learning_rate": "lr", "wd": "weight_decay", "mu": "momentum", "beta1": "betas", "beta2": "betas",
    "epsilon": "eps", "use_muon": "algorithm='adamw' or 'muon'", "adjust_lr": "lr_scale", "adjust_lr_fn": "lr_scale",
    "ns_coefficients": "coefficients", "heads": "num_heads",
}  # fmt: skip
"""What other optimizers call an option of a group, and adam_lr, which is for groups without a learning rate."""
SIMILAR = 0.85  # "momentun" is this near to an option; "max_momentum", which schedulers add to groups, is not
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
    _make_tuple(group, "split_sizes", int, "the heights of the blocks of rows, such as (768, 256, 256)")
    _make_tuple(group, "transposed", bool, "True or False for each matrix of a stack, such as (True, False)")
    algorithm.complete(group)


def _make_tuple(group: dict[str, Any], key: str, kind: Callable[[Any], Any], allowed: str) -> None:
    """Brings an option of several values into its usual form, in place."""
    if group[key] is not None:
        require(isinstance(group[key], Sequence), f"{key} must be {allowed}; got {group[key]!r}")
        group[key] = tuple(map(kind, group[key]))


def check_names(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuses names in a new group that look like options and would do nothing. All others are the caller's own."""
    options = {*defaults, *find_algorithm(group).defaults, *ADDED, *UNAVAILABLE, "params", "param_names"}
    for key in sorted(group.keys() - options):
        require(
            key not in OF_THE_OPTIMIZER,
            f"{key} is an option of the whole optimizer, not of a group: ParallelMuon({key}=)",
        )
        similar = difflib.get_close_matches(key, options, n=1, cutoff=SIMILAR)
        meant = OTHER_NAMES.get(key) or next(iter(similar), None)
        require(meant is None, f"{key} is not an option of a group of ParallelMuon; use {meant} instead")


def name_params(group: dict[str, Any], others: Sequence[dict[str, Any]]) -> None:
    """If some of the groups have names, gives names to the others, in place: PyTorch wants names for all or for none."""
    given = group["params"]
    if isinstance(given, set):  # without an order: PyTorch refuses it
        return
    group["params"] = [given] if isinstance(given, Tensor) else list(given)
    groups = [*others, group]
    named = ["param_names" in each or any(isinstance(param, tuple) for param in each["params"]) for each in groups]
    for number, each in enumerate(groups):
        if any(named) and not named[number]:
            each["param_names"] = [f"parameter {position} of group {number}" for position in range(len(each["params"]))]


def check_group(group: dict[str, Any]) -> None:
    """Refuses a group that cannot be used, with the remedy."""
    algorithm = find_algorithm(group)
    require(group["lr_scale"] in LR_SCALES, f"lr_scale must be 'spectral', 'rms' or None, got {group['lr_scale']!r}")
    check_rates(group)
    for key in FLAGS:
        require(group[key] in (True, False), f"{key} must be True or False, got {group[key]!r}")
    if group["num_heads"] is not None:
        check_count("num_heads", group["num_heads"])
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


def find_device(groups: Sequence[dict[str, Any]]) -> torch.device:
    """The device of the first parameter; the CPU, if all groups are empty."""
    return next((param.device for group in groups for param in group["params"]), torch.device("cpu"))


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
    raised = [p for group in groups if group["maximize"] for p in group["params"] if p.grad is not None]
    if not raised:
        return []
    others = [p.grad for group in groups if not group["maximize"] for p in group["params"] if p.grad is not None]
    seen = {local_of(grad).data_ptr() for grad in others}
    for param in raised:
        grad = local_of(param.grad)
        if grad.data_ptr() in seen or overlaps(grad):
            param.grad = param.grad.clone(memory_format=torch.contiguous_format)
        seen.add(grad.data_ptr())
    return [param.grad for param in raised]


def negate(tensors: list[Tensor]) -> None:
    """In place."""
    if tensors:
        torch._foreach_neg_(tensors)
