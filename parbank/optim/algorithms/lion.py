"""Lion (Chen et al. 2023): the sign of a mean of gradients, from one state where AdamW has two.

With mean m and gradient g: the weight moves against sign(b1 m + (1 - b1) g), then m becomes b2 m + (1 - b2) g. Every
number moves by the learning rate, so that Lion takes a smaller one than AdamW, by 3 to 10.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from parbank.optim.algorithm import ElementwiseAlgorithm, Group, Settings, check_betas
from parbank.optim.master import wide_dtype


class Lion(ElementwiseAlgorithm):
    """Options: betas."""

    defaults = {"lr": 1e-4, "betas": (0.9, 0.99)}  # noqa: RUF012 (a constant of this class)

    def check_options(self, options: Group) -> None:
        check_betas(options["betas"])

    def constants(self, group: Group) -> Hashable:
        return tuple(map(float, group["betas"]))

    def init_state(self, state: dict[str, Any], param: Tensor) -> None:
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(param, dtype=wide_dtype(param.dtype))

    def update(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        states: Sequence[dict[str, Any]],
        group: Group,
        settings: Settings,
    ) -> None:
        first, second = (float(beta) for beta in group["betas"])
        means = [state["exp_avg"] for state in states]
        changes = torch._foreach_sub([settings.scale(grad) for grad in grads], means)
        moves = torch._foreach_add(means, changes, alpha=1 - first)
        torch._foreach_sign_(moves)
        torch._foreach_mul_(changes, (1 - second) * settings.taken)
        torch._foreach_add_(means, changes)
        rate = settings.lr * settings.taken
        torch._foreach_mul_(weights, 1 - rate * settings.weight_decay)
        torch._foreach_mul_(moves, rate)
        torch._foreach_sub_(weights, moves)
