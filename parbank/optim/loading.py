"""Checkpoints before they are loaded: PyTorch's own optimizers are translated, missing options kept, misfits refused."""

from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parbank.config import require
from parbank.errors import ConfigError
from parbank.optim.layout import name_of
from parbank.optim.master import LIKE_THE_WEIGHT

if TYPE_CHECKING:
    from parbank.optim.parallel_muon import ParallelMuon

IMPLEMENTATIONS = ("foreach", "fused", "capturable", "decoupled_weight_decay")
"""Options of PyTorch's optimizers that choose an implementation, or that are always so here."""
UNAVAILABLE = ("amsgrad", "differentiable")
MARKS = {"adjust_lr_fn": "muon", "amsgrad": "adamw", "dampening": "sgd"}
"""Options that show which of PyTorch's optimizers wrote a group."""
FOREIGN_STATES = {
    "muon": {"momentum_buffer"},
    "adamw": {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
}
"""What PyTorch's optimizers keep for a parameter."""
NO_OPTIONS = ("params", "param_names", "initial_lr")


def prepare(optimizer: "ParallelMuon", state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict that PyTorch's `load_state_dict` can take: every group has all options of this optimizer."""
    check_form(state_dict)
    values = dict(state_dict["state"])
    own = optimizer.param_groups
    saved = state_dict["param_groups"]
    _check_order(saved, own)
    groups = [_complete(group, own[n], values) if n < len(own) else group for n, group in enumerate(saved)]
    return {**state_dict, "state": values, "param_groups": groups}


def check_form(state_dict: Any) -> None:
    """Refuses anything but the result of an optimizer's `state_dict()`."""
    given = (
        f"the keys {', '.join(map(repr, state_dict))}"
        if isinstance(state_dict, dict)
        else f"a {type(state_dict).__name__}"
    )
    whole = isinstance(state_dict, dict) and isinstance(state_dict.get("state"), dict)
    groups = state_dict.get("param_groups") if whole else None
    require(
        isinstance(groups, (list, tuple)) and all(isinstance(group, dict) and "params" in group for group in groups),
        f"load_state_dict takes what state_dict() of an optimizer returns, with 'state' and 'param_groups'; got {given}. Of a "
        "checkpoint of a whole run, pass the optimizer's part",
    )


def _complete(saved: dict[str, Any], group: dict[str, Any], values: dict[Any, Any]) -> dict[str, Any]:
    """A saved group with every option of ours; translates and checks its states in `values`."""
    for key in UNAVAILABLE:
        require(not saved.get(key), f"the checkpoint was written with {key}=True, which ParallelMuon does not have")
    written = _find_writer(saved, group, values)
    require(
        written == group["algorithm"],
        f"the checkpoint's group was written by {written}, and the group here has algorithm={group['algorithm']!r}, for which "
        "its learning rate and its state mean nothing; make the groups as they were, or load the weights only",
    )
    coupled = saved.get("decoupled_weight_decay") is False and saved.get("weight_decay")
    require(
        not coupled,
        f"the checkpoint was written by Adam with weight_decay={saved.get('weight_decay')}, which Adam adds to gradients and "
        "AdamW subtracts from weights; set its weight_decay to 0 before loading, and choose AdamW's after",
    )
    translated = _translate_muon(saved, values) if "adjust_lr_fn" in saved else saved
    for position, (key, param) in enumerate(zip(saved["params"], group["params"])):
        _check_shapes(values.get(key, {}), param, name_of(group, position))
    kept = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    given = {key: value for key, value in translated.items() if key not in (*IMPLEMENTATIONS, *UNAVAILABLE)}
    return {**kept, **given}


def _find_writer(saved: dict[str, Any], group: dict[str, Any], values: dict[Any, Any]) -> str:
    """The algorithm that wrote a group. Refuses groups of optimizers that are neither ours nor known."""
    ours = "lr_scale" in saved  # no other optimizer has this option
    writer = None if ours else next((MARKS[mark] for mark in MARKS if mark in saved), None)
    strange = sorted(set(saved) - set(group) - set(NO_OPTIONS))
    if writer in FOREIGN_STATES:
        keys = {key for number in saved["params"] for key in values.get(number, {})}
        strange = sorted(keys - FOREIGN_STATES[writer])
    if not ours and writer != "sgd" and strange:
        raise ConfigError(
            f"the checkpoint was written by another optimizer: it has {', '.join(strange)}, which neither ParallelMuon nor "
            "torch.optim.AdamW, Adam or Muon has. Its learning rate and its state mean nothing here; load the weights only"
        )
    return writer or saved.get("algorithm") or group["algorithm"]


def _translate_muon(saved: dict[str, Any], values: dict[Any, Any]) -> dict[str, Any]:
    """A group of torch.optim.Muon, by our names. Its momentum is a mean of gradients, ours a sum: scaled, in `values`."""
    own = {key: value for key, value in saved.items() if key not in ("adjust_lr_fn", "ns_coefficients", "eps")}
    own["lr_scale"] = "rms" if saved["adjust_lr_fn"] == "match_rms_adamw" else "spectral"
    own["coefficients"] = tuple(saved["ns_coefficients"])
    for key in saved["params"]:
        if "momentum_buffer" in values.get(key, {}):
            total = values[key]["momentum_buffer"].float() / (1 - saved["momentum"])
            values[key] = {**values[key], "momentum_buffer": total}
    return own


def _check_order(saved: Sequence[dict[str, Any]], own: Sequence[dict[str, Any]]) -> None:
    """Refuses the same names in another order. Other names pass: wrappers add prefixes."""
    there, here = ([name for group in groups for name in group.get("param_names", ())] for groups in (saved, own))
    if there != here and sorted(there) == sorted(here):
        a, b = next((a, b) for a, b in zip(there, here) if a != b)
        raise ConfigError(
            f"the checkpoint has {a} where the optimizer has {b}: states are matched by their order; give the optimizer the "
            "parameters in the order of the checkpoint"
        )


def _check_shapes(held: dict[str, Any], param: Tensor, name: str) -> None:
    step = held.get("step", 0)
    one = isinstance(step, Real) or (isinstance(step, Tensor) and step.numel() == 1)
    require(one, f"{name}: the checkpoint's step is {step!r} instead of a number; take an earlier checkpoint")
    for key in LIKE_THE_WEIGHT:
        if key not in held:
            continue
        value = held[key]
        require(
            isinstance(value, Tensor),
            f"{name}: the checkpoint's {key} is a {type(value).__name__} instead of a tensor; take an earlier checkpoint",
        )
        require(
            value.is_floating_point() or (key == "low_bits" and value.dtype == torch.int16),
            f"{name}: the checkpoint's {key} is {value.dtype}, which no optimizer writes; take an earlier checkpoint",
        )
        require(
            value.shape == param.shape,
            f"{name}: the checkpoint's {key} has shape {tuple(value.shape)}, and the weight has "
            f"{tuple(param.shape)}; the optimizer must have the parameters of the checkpoint in the same order",
        )
