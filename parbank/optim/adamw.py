"""AdamW for what is not a matrix: PyTorch's fused kernel, fed so that nothing waits for the device.

The kernel divides gradients by `grad_scale` and does nothing when `found_inf` is 1, both read on the device: that is the
global clip and the skipped step. It takes the learning rate as a tensor; betas and eps are numbers to it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parbank.optim.master import join_master, split_master
from parbank.optim.sharded import local_of


def init_state(state: dict[str, Any], param: Tensor) -> None:
    """Fills an empty state: moments in float32 whatever the weight, the step count on the device."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
        state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
    if param.dtype == torch.bfloat16 and "low_bits" not in state:
        state["low_bits"] = torch.zeros_like(param, dtype=torch.int16)


def step_adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    group: dict[str, Any],
    hyper: Tensor,
    grad_scale: Tensor,
    skip: Tensor,
    decay_on_device: bool,
) -> None:
    """One AdamW step of some parameters of a group. `hyper` is (lr, momentum, weight decay, ...) on the device.

    grad_scale: what gradients are divided by. skip: 1.0 where nothing may change. decay_on_device: apply the weight decay
    from `hyper` in its own pass, so that a captured graph follows it; otherwise the kernel does it in passing.
    """
    if not params:
        return
    params = [local_of(param) for param in params]
    states = [{key: local_of(value) for key, value in state.items()} for state in states]
    masters = [join_master(p, s["low_bits"]) if p.dtype == torch.bfloat16 else p for p, s in zip(params, states)]
    matching = [_like(local_of(grad), master) for grad, master in zip(grads, masters)]
    lr = hyper[0]
    decay = group["weight_decay"]
    if isinstance(decay, Tensor) or (decay_on_device and decay):
        torch._foreach_mul_(masters, 1 - lr * hyper[2] * (1 - skip))
        decay = 0.0
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, [1 - skip] * len(steps))
    torch._fused_adamw_(
        masters,
        matching,
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
        grad_scale=grad_scale,
        found_inf=skip,
    )
    for param, master, state in zip(params, masters, states):
        if master is not param:
            split_master(master, param, state["low_bits"])


def _like(grad: Tensor, master: Tensor) -> Tensor:
    """The gradient in the dtype and memory order of the weight, which the kernel walks in step."""
    if grad.dtype == master.dtype and grad.stride() == master.stride():
        return grad
    return torch.empty_like(master).copy_(grad)
