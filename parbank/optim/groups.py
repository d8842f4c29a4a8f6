"""Parameter groups: what may stand in them, checked where they are given."""

from typing import Any

import torch
from torch import Tensor

from parbank.errors import ConfigError
from parbank.optim.coefficients import resolve_coefficients
from parbank.optim.layout import block_shape, name_of
from parbank.optim.newton_schulz import METHODS
from parbank.optim.sharded import check_sharded, is_sharded

ALGORITHMS = ("muon", "adamw")
LR_SCALES = ("spectral", "rms", None)
DTYPES = (torch.float32, torch.bfloat16)


def complete_group(group: dict[str, Any], defaults: dict[str, Any], adam_lr: float | Tensor) -> None:
    """Fills in what the group leaves open, in place. AdamW's learning rate has a default of its own: Muon's is far too high."""
    for key, value in defaults.items():
        group.setdefault(key, adam_lr if key == "lr" and group.get("algorithm") == "adamw" else value)
    if group["lr_scale"] == "none":
        group["lr_scale"] = None
    if group["transposed"] is not None:
        group["transposed"] = tuple(bool(flag) for flag in group["transposed"])
    if not isinstance(group["coefficients"], str):  # lists come back from JSON and from state dicts
        group["coefficients"] = resolve_coefficients(group["coefficients"], group["ns_steps"])


def check_group(group: dict[str, Any]) -> None:
    """Refuses a group that cannot be run, with the remedy."""
    _require(group["algorithm"] in ALGORITHMS, f"algorithm must be 'muon' or 'adamw', got {group['algorithm']!r}")
    _require(group["lr_scale"] in LR_SCALES, f"lr_scale must be 'spectral', 'rms' or None, got {group['lr_scale']!r}")
    _require(group["method"] in METHODS, f"method must be one of {', '.join(METHODS)}, got {group['method']!r}")
    _require(int(group["ns_steps"]) >= 1, f"ns_steps must be at least 1, got {group['ns_steps']}")
    resolve_coefficients(group["coefficients"], group["ns_steps"])
    for key in ("lr", "weight_decay", "eps"):
        _require(isinstance(group[key], Tensor) or group[key] >= 0, f"{key} must not be negative, got {group[key]}")
    for key in ("momentum", "row_beta"):
        _require(0 <= group[key] < 1, f"{key} must lie in 0 <= m < 1, got {group[key]}")
    betas = group["betas"]
    _require(
        len(betas) == 2 and all(0 <= b < 1 for b in betas), f"betas must be two numbers in 0 <= b < 1, got {betas}"
    )
    for position, param in enumerate(group["params"]):
        name = name_of(group, position)
        _require(
            param.dtype in DTYPES,
            f"{name} is {param.dtype}; ParallelMuon updates float32 and bfloat16 weights: convert it, e.g. model.float()",
        )
        if group["algorithm"] == "muon":
            block_shape(param, group, name)
            if is_sharded(param):
                check_sharded(param, group, name)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
