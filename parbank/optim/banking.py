"""Banks for a model that was not written with them: weights of one shape become views of one tensor.

The model's forward, parameter names and state dict stay unchanged. With several ranks, the gradients of a shape are
then one tensor, reduced in place without a copy. Bank a model after it is on its device and before other code keeps
references to its weights' memory. Moving it afterwards undoes the banks, harmlessly. Gradients are zeroed in place: a
layer that no backward reaches has zeros, not None, and is still moved by momentum and decay.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from parbank.errors import ConfigError


@dataclass(frozen=True)
class Bank:
    """Weights of one shape, in one tensor."""

    weights: Tensor = field(repr=False)
    """(N, *shape); parameter i is weights[i]."""
    grads: Tensor = field(repr=False)
    """The same for gradients, as long as they are zeroed in place (`ParallelMuon.zero_grad` does, for banked weights)."""
    names: tuple[str, ...]


@torch.no_grad()
def bank(model: nn.Module) -> list[Bank]:
    """Moves all weights of two or more dimensions that share their shape into banks, in place, and returns the banks.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
    >>> [(bank.names, tuple(bank.weights.shape)) for bank in parbank.bank(model)]
    [(('0.weight', '1.weight'), (2, 8, 8))]
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"bank takes the model, a torch.nn.Module, got a {type(model).__name__}")
    shapes: dict[tuple[torch.Size, torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
    for name, param in model.named_parameters():
        if param.ndim >= 2 and param.requires_grad and param.is_contiguous() and not hasattr(param, "to_local"):
            shapes.setdefault((param.shape, param.dtype, param.device), []).append((name, param))
    banks = []
    for (shape, dtype, device), items in shapes.items():
        if len(items) < 2:
            continue
        weights = torch.empty(len(items), *shape, dtype=dtype, device=device)
        grads = torch.zeros_like(weights)
        for (_, param), weight, grad in zip(items, weights, grads):
            weight.copy_(param)
            param.data = weight
            if param.grad is not None:
                grad.copy_(param.grad)
            param.grad = grad
            param.bank_grad = grad  # type: ignore[attr-defined]
        banks.append(Bank(weights, grads, tuple(name for name, _ in items)))
    return banks


def zero_bank_grads(params: list[Tensor]) -> list[Tensor]:
    """Zeroes the gradients of banked parameters in place. Returns the parameters that are not banked."""
    banked = [p for p in params if _is_in_bank(p)]
    if banked:
        torch._foreach_zero_([p.bank_grad for p in banked])  # type: ignore[attr-defined]
        for param in banked:
            param.grad = param.bank_grad  # type: ignore[attr-defined]
    return [p for p in params if not _is_in_bank(p)]


def _is_in_bank(param: Tensor) -> bool:
    """Whether the parameter is still in its bank: not moved to another device or dtype since."""
    grad = getattr(param, "bank_grad", None)
    return grad is not None and grad.device == param.device and grad.dtype == param.dtype
