"""Parameter groups of a run: the only module that knows both the model and the optimizer."""

from typing import Any

from parbank.model import GPT
from parbank.optim.config import OptimConfig


def parameter_groups(model: GPT, config: OptimConfig) -> list[dict[str, Any]]:
    """One group per bank, because a bank knows which of its matrices are stored transposed; the rest by role. The group
    stores `peak_lr`, which the schedule multiplies."""
    named = dict(model.named_parameters())
    banks = [
        {
            "params": [named.pop(f"banks.{key}")],
            "algorithm": config.matrix_algorithm,
            "peak_lr": config.matrix_lr,
            "weight_decay": config.matrix_weight_decay,
            "ns_steps": config.newton_schulz_steps,
            "betas": (config.beta1, config.beta2),
            "transposed": model.banks.transposed[key],
        }
        for key in model.banks.entries
    ]
    roles: dict[float, list[Any]] = {}
    for name, parameter in named.items():
        if name.endswith("embedding.weight"):
            lr = config.embedding_lr
        elif name == "head.weight":
            lr = config.head_lr
        else:
            lr = config.scalar_lr
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
    return [{**group, "lr": group["peak_lr"]} for group in banks + others]
