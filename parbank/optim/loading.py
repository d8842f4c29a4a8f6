"""Checkpoints before they are loaded: PyTorch's own optimizers are translated, missing options kept, misfits refused."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from parbank.config import require
from parbank.optim.layout import name_of

if TYPE_CHECKING:
    from parbank.optim.parallel_muon import ParallelMuon

IMPLEMENTATIONS = ("foreach", "fused", "capturable", "decoupled_weight_decay")
"""Options of PyTorch's optimizers that choose an implementation, or that are always so here."""
UNAVAILABLE = ("amsgrad", "differentiable")
LIKE_THE_WEIGHT = ("momentum_buffer", "exp_avg", "exp_avg_sq", "low_bits")
"""States with one number for each weight."""


def prepare(optimizer: "ParallelMuon", state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict that PyTorch's `load_state_dict` can take: every group has all options of this optimizer."""
    values = dict(state_dict["state"])
    own = optimizer.param_groups
    saved = state_dict["param_groups"]
    groups = [_complete(group, own[n], values) if n < len(own) else group for n, group in enumerate(saved)]
    return {**state_dict, "state": values, "param_groups": groups}


def _complete(saved: dict[str, Any], group: dict[str, Any], values: dict[Any, Any]) -> dict[str, Any]:
    """A saved group with every option of ours; translates and checks its states in `values`."""
    for key in UNAVAILABLE:
        require(not saved.get(key), f"the checkpoint was written with {key}=True, which ParallelMuon does not have")
    translated = _translate_muon(saved, values) if "adjust_lr_fn" in saved else saved
    for position, (key, param) in enumerate(zip(saved["params"], group["params"])):
        _check_shapes(values.get(key, {}), param, name_of(group, position))
    kept = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    given = {key: value for key, value in translated.items() if key not in (*IMPLEMENTATIONS, *UNAVAILABLE)}
    return {**kept, **given}


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


def _check_shapes(held: dict[str, Any], param: Tensor, name: str) -> None:
    for key in LIKE_THE_WEIGHT:
        value = held.get(key)
        require(
            not isinstance(value, Tensor) or value.shape == param.shape,
            f"{name}: the checkpoint's {key} has shape {tuple(getattr(value, 'shape', ()))}, and the weight has "
            f"{tuple(param.shape)}; the optimizer must have the parameters of the checkpoint in the same order",
        )
