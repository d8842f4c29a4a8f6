"""Parameter groups of a run: the only module that knows both the model and the optimizer."""

from collections.abc import Sequence
from typing import Any

from parbank.errors import CheckpointError
from parbank.model import GPT
from parbank.optim.config import OptimConfig
from parbank.optim.parallel_muon import ParallelMuon
from parbank.optim.widths import carry_rate
from parbank.training.config import read_config


def parameter_groups(model: GPT, config: OptimConfig) -> list[dict[str, Any]]:
    """One group per bank, because a bank knows which of its matrices are stored transposed; the rest by role. The group
    stores `peak_lr` and `peak_decay`, which the schedule multiplies."""
    named = dict(model.named_parameters())
    banks = [
        {
            "params": [named.pop(f"banks.{key}")],
            "algorithm": config.matrix_algorithm,
            "peak_lr": _carry(config.matrix_lr, _matrix_role(config), model, config),
            "weight_decay": config.matrix_weight_decay,
            "cautious": config.cautious_decay,
            "ns_steps": config.newton_schulz_steps,
            "coefficients": config.coefficients,
            "lr_scale": config.lr_scale,
            "normuon": config.normuon,
            "equilibrate": config.equilibrate,
            "betas": (config.beta1, config.beta2),
            "transposed": model.banks.transposed[key],
        }
        for key in model.banks.entries
    ]
    roles: dict[float, list[Any]] = {}
    for name, parameter in named.items():
        if name.endswith("embedding.weight"):
            lr = _carry(config.embedding_lr, "embedding", model, config)
        elif name == "head.weight":
            lr = _carry(config.head_lr, "head", model, config)
        else:
            lr = _carry(config.scalar_lr, "scalar", model, config)
        roles.setdefault(lr, []).append(parameter)
    others = [
        {
            "params": parameters,
            "algorithm": config.other_algorithm,
            "peak_lr": lr,
            "betas": (config.beta1, config.beta2),
            "weight_decay": config.adam_weight_decay,
        }
        for lr, parameters in roles.items()
    ]
    return [{**group, "lr": group["peak_lr"], "peak_decay": group["weight_decay"]} for group in banks + others]


def load_optimizer(
    optimizer: ParallelMuon,
    state: dict[str, Any],
    model: GPT,
    config: OptimConfig,
    saved_config: dict[str, Any] | None = None,
) -> None:
    """Momenta come from the state; learning rates and decay from `config`, which --set may have changed. `saved_config` is the
    config of the run that saved the state, if that may differ."""
    groups = parameter_groups(model, config)
    if saved_config is not None and _sizes(state["param_groups"]) != _sizes(groups):
        state = _regroup(state, parameter_groups(model, read_config(saved_config).optim), groups)
    for saved, wanted in zip(state["param_groups"], groups):
        if saved.get("algorithm") not in (None, wanted["algorithm"]):
            asked = (
                f"the config asks for {wanted['algorithm']}; resume as it was started, or start again in another --out"
            )
            raise CheckpointError(f"the checkpoint was trained by {saved['algorithm']}, and {asked}")
    optimizer.load_state_dict(state)
    for group, wanted in zip(optimizer.param_groups, groups):
        group.update({name: value for name, value in wanted.items() if name not in ("params", "lr")})


def _sizes(groups: Sequence[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _regroup(
    state: dict[str, Any], before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """An optimizer's state with the groups `before`, for the groups `after` of the same parameters. Parameters of one learning
    rate share a group, so other learning rates may make other groups."""
    homes = {
        id(param): (number, saved)
        for saved, group in zip(state["param_groups"], before, strict=True)
        for number, param in zip(saved["params"], group["params"], strict=True)
    }
    found = [[homes[id(param)] for param in group["params"]] for group in after]
    groups = [{**places[0][1], "params": [number for number, _ in places]} for places in found]
    return {**state, "param_groups": groups}


def _matrix_role(config: OptimConfig) -> str:
    if config.matrix_algorithm != "muon":
        return "elementwise"
    return "rms" if config.lr_scale == "rms" else "spectral"


def _carry(lr: float, role: str, model: GPT, config: OptimConfig) -> float:
    """A learning rate at the model's width, if it was tuned at another."""
    if not config.tuned_width:
        return lr
    return carry_rate(lr, role, tuned_at=config.tuned_width, width=model.config.width)
