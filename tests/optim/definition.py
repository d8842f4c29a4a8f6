"""A whole step of ParallelMuon by its definition, in float64 and matrix by matrix, and how near to it any device must come.

What is compared is what the steps have moved, not where the weights are: a weight of 1 that moves by a thousandth hides any
update behind a relative tolerance of 1%, and with it the weight decay, the caution and the momentum.

The bound. On a GPU Newton-Schulz works in float16 and everything else in float32. Measured against float64, five steps in
float16 are wrong by 0.1 to 0.3% of the update, whichever the method (tests/optim/test_optim_definition.py does it on a CPU;
`test_orthogonalize_in_sixteen_bits` allows 0.6% on a GPU). Updates of later steps add up as their errors do, so the share
stays. Caution doubles it at most: it decays or spares a weight by the sign of an update that may be near zero. float32 rounds
a weight of 0.1 by 3e-9 a step, where a step moves it by 1e-3. AdamW has no part in float16: its bound is float32's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parbank.optim import ParallelMuon
from parbank.optim.master import join_master

TOLERANCE = 1e-2  # three times what float16 was measured to lose; a fifth of what the least of the faults does
ADAM_TOLERANCE = 1e-4  # float32, and a weight that a step moves by a tenth of itself
STEPS = 6  # as many as it takes until momentum 0.9 for 0.95 moves every weight by 5% more or less
SHAPES = ((2, 128, 192), (144, 80), (3, 96, 96), (100, 36))
SMALL = ((50, 16), (7,))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the optimizer is given and what the definition goes by: two of them that differ stand for a fault."""

    lr: float = 0.02
    momentum: float = 0.95
    weight_decay: float = 0.1
    cautious: bool = False
    adam_lr: float = 0.01
    adam_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_norm: float = 1.0


def make_parameters(device: str, dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices and small parameters of about 0.1, where a step's decay is a fifth of its update and both show."""
    generator = torch.Generator().manual_seed(0)

    def make(shape: tuple[int, ...]) -> nn.Parameter:
        return nn.Parameter((0.1 * torch.randn(shape, generator=generator)).to(device, dtype))

    return [make(shape) for shape in SHAPES], [make(shape) for shape in SMALL]


def make_gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """On the CPU, of norms that the clip cuts."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in (*SHAPES, *SMALL)]


def train(device: str, dtype: torch.dtype, settings: Settings, **options: Any) -> list[Tensor]:
    """What ParallelMuon makes of the parameters; of bfloat16 ones their float32 masters."""
    matrices, small = make_parameters(device, dtype)
    muon = {"lr": settings.lr, "momentum": settings.momentum, "weight_decay": settings.weight_decay}
    adam = {"lr": settings.adam_lr, "weight_decay": settings.adam_decay, "betas": settings.betas}
    groups = [{"params": matrices, **muon}, {"params": small, "algorithm": "adamw", **adam}]
    optimizer = ParallelMuon(groups, cautious=settings.cautious, max_norm=settings.max_norm, **options)
    for step in range(STEPS):
        for param, grad in zip((*matrices, *small), make_gradients(step, dtype)):
            param.grad = grad.to(device) if param.grad is None else param.grad.copy_(grad)  # a graph wants it in place
        optimizer.step()
    graphed = optimizer._graph is not None and optimizer._graph.captures > 0
    assert graphed or options.get("cuda_graph") is not True, "the steps were to run as a graph"
    found = [
        join_master(p.detach(), optimizer.state[p]["low_bits"]) if p.dtype == torch.bfloat16 else p.detach()
        for p in (*matrices, *small)
    ]
    return [tensor.double().cpu() for tensor in found]


def define(dtype: torch.dtype, settings: Settings) -> list[Tensor]:
    """The same by the definition."""
    matrices, small = make_parameters("cpu", dtype)
    weights = [p.detach().double() for p in (*matrices, *small)]
    first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    for step in range(STEPS):
        grads = [grad.double() for grad in make_gradients(step, dtype)]
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        factor = min(1.0, settings.max_norm / float(norm))
        for number, (weight, grad) in enumerate(zip(weights, grads)):
            if number < len(matrices):
                _step_muon(weight, first[number], factor * grad, settings)
            else:
                _step_adamw(weight, first[number], second[number], factor * grad, step + 1, settings)
    return weights


def worst_error(found: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype) -> tuple[float, float]:
    """The largest error of what the matrices moved, as a share of that, and of what the small parameters did."""
    matrices, small = make_parameters("cpu", dtype)
    starts = [p.detach().double() for p in (*matrices, *small)]
    errors = [float((a - b).norm() / (b - start).norm()) for a, b, start in zip(found, expected, starts, strict=True)]
    return max(errors[: len(matrices)]), max(errors[len(matrices) :])


def _step_muon(weight: Tensor, buffer: Tensor, grad: Tensor, s: Settings) -> None:
    buffer.mul_(s.momentum).add_(grad)
    update = grad + s.momentum * buffer
    for matrix, direction in zip(weight, update) if weight.ndim == 3 else ((weight, update),):
        move = _newton_schulz(direction)
        spared = (move * matrix <= 0) & s.cautious
        matrix.mul_(torch.where(spared, 1.0, 1 - s.lr * s.weight_decay))
        matrix.sub_(move, alpha=s.lr * math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1])))


def _newton_schulz(G: Tensor) -> Tensor:
    X = G / G.norm()
    X = X.T if (tall := X.shape[0] > X.shape[1]) else X
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.T if tall else X


def _step_adamw(weight: Tensor, mean: Tensor, square: Tensor, grad: Tensor, step: int, s: Settings) -> None:
    mean.lerp_(grad, 1 - s.betas[0])
    square.lerp_(grad.square(), 1 - s.betas[1])
    weight.mul_(1 - s.adam_lr * s.adam_decay)
    root = (square / (1 - s.betas[1] ** step)).sqrt() + 1e-8
    weight.sub_(s.adam_lr * mean / (1 - s.betas[0] ** step) / root)
