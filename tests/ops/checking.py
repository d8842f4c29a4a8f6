"""How the ops' tests compare: values and gradients of an op against its reference in float64."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# The poison fixture goes through PyTorch's deterministic mode, in which cuBLAS refuses to run without this.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Largest error as a share of the largest value: a few roundings of the dtype."""

Function = Callable[..., Any]


def evaluate(fn: Function, inputs: Sequence[Tensor | None], seed: int = 1) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of fn and the gradients of every floating input, under fixed random output gradients."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) if x is not None else None for x in inputs]
    found = fn(*leaves)
    outputs = [found] if isinstance(found, Tensor) else list(found)
    random = torch.Generator().manual_seed(seed)
    # Drawn in half precision, so that the float64 evaluation sees the same numbers.
    # A scalar gets the 1 that backward() gives it.
    heads = [
        (torch.randn(y.shape, generator=random) if y.dim() else torch.ones(())).bfloat16().to(y.device, y.dtype)
        for y in outputs
    ]
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    return outputs, list(torch.autograd.grad(outputs, wanted, heads))


def widen(inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [x.double() if x is not None and x.is_floating_point() else x for x in inputs]


def assert_matches(fn: Function, reference: Function, inputs: Sequence[Tensor | None]) -> None:
    """Values and gradients are those of the reference in float64, to a few roundings, in the right dtype and shape."""
    outputs, grads = evaluate(fn, inputs)
    exact_outputs, exact_grads = evaluate(reference, widen(inputs))
    narrow, _ = evaluate(reference, inputs)
    assert [y.dtype for y in outputs] == [y.dtype for y in narrow]
    leaves = [x for x in inputs if x is not None and x.is_floating_point()]
    assert [g.dtype for g in grads] == [x.dtype for x in leaves]
    tolerance = max(TOLERANCE[x.dtype] for x in leaves)
    for index, (found, exact) in enumerate(zip([*outputs, *grads], [*exact_outputs, *exact_grads], strict=True)):
        assert found.shape == exact.shape, index
        if exact.numel():
            error = (found.double() - exact).abs().max().item()
            assert error <= tolerance * max(exact.abs().max().item(), 0.1), f"tensor {index}: {error}"


def assert_as_exact_as_torch(fn: Function, reference: Function, inputs: Sequence[Tensor | None]) -> None:
    """The error against float64, over each whole tensor, is no larger than PyTorch's own on the same input.

    A thousandth is for luck: the two round the same numbers at different places (1.0002 is the largest ratio seen on an
    H200 in 16 bits). float32 results also may have one rounding of that type, where PyTorch's own error is next to none.
    """
    ours, theirs, exact = (
        [tensor for part in evaluate(f, values) for tensor in part]
        for f, values in ((fn, inputs), (reference, inputs), (reference, widen(inputs)))
    )
    for index, (a, b, c) in enumerate(zip(ours, theirs, exact, strict=True)):
        error, own = (a.double() - c).norm().item(), (b.double() - c).norm().item()
        floor = 2.0**-23 * c.norm().item() if a.dtype == torch.float32 else 0.0
        assert error <= 1.001 * own + floor, f"tensor {index}: {error} against PyTorch's {own}"


def assert_same_bits(fn: Function, inputs: Sequence[Tensor | None], runs: int = 100) -> None:
    first = [tensor for part in evaluate(fn, inputs) for tensor in part]
    for _ in range(runs - 1):
        again = [tensor for part in evaluate(fn, inputs) for tensor in part]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
