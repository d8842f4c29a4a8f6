"""AdamW (Loshchilov and Hutter 2017): PyTorch's fused kernel, called so that the host never waits for the device.

The kernel divides gradients by `grad_scale` and does nothing when `found_inf` is 1, both read on the device: these
serve as the global clip and the skipped step. It takes the learning rate as a tensor; betas and eps by value.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from parbank.optim.algorithm import ElementwiseAlgorithm, Group, Settings, check_betas
from parbank.optim.hyper import check_number
from parbank.optim.master import wide_dtype


class AdamW(ElementwiseAlgorithm):
    """Options: betas, eps."""

    def check_options(self, options: Group) -> None:
        check_number("eps", options["eps"])
        check_betas(options["betas"])

    def constants(self, group: Group) -> Hashable:
        decay = group["weight_decay"]
        decays = isinstance(decay, Tensor) or bool(decay)  # a tensor on a GPU would have to be waited for
        return *map(float, group["betas"]), float(group["eps"]), decays

    def init_state(self, state: dict[str, Any], param: Tensor) -> None:
        """Moments in float32 (float64 for float64), the step count on the device."""
        if not ("step" in state and "exp_avg" in state and "exp_avg_sq" in state):
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"] = torch.zeros_like(param, dtype=wide_dtype(param.dtype))
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=wide_dtype(param.dtype))

    def update(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        states: Sequence[dict[str, Any]],
        group: Group,
        settings: Settings,
    ) -> None:
        """In a graph, weight decay is a separate pass, so that it can change; otherwise the kernel applies it."""
        lr, taken = settings.lr, settings.taken
        decay = group["weight_decay"]
        if isinstance(decay, Tensor) or (settings.captured and decay):
            torch._foreach_mul_(weights, 1 - lr * settings.weight_decay * taken)
            decay = 0.0
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, [taken] * len(steps))
        torch._fused_adamw_(
            weights,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=lr,
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            weight_decay=float(decay),
            eps=float(group["eps"]),
            amsgrad=False,
            maximize=False,
            grad_scale=1 / settings.factor,
            found_inf=1 - taken,
        )
