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
    leaves = make_leaves(inputs)
    outputs = as_list(fn(*leaves))
    return outputs, differentiate(outputs, leaves, draw_heads(outputs, seed))


def make_leaves(inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [x.detach().requires_grad_(x.is_floating_point()) if x is not None else None for x in inputs]


def as_list(found: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def draw_heads(outputs: Sequence[Tensor], seed: int = 1) -> list[Tensor]:
    """A random gradient for each output, drawn in half precision, so that the float64 evaluation sees the same numbers.

    A scalar gets the 1 that backward() gives it.
    """
    random = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(y.shape, generator=random) if y.dim() else torch.ones(())).bfloat16().to(y.device, y.dtype)
        for y in outputs
    ]


def differentiate(outputs: Sequence[Tensor], leaves: Sequence[Tensor | None], heads: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(outputs, [x for x in leaves if x is not None and x.requires_grad], heads))


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
    assert_all_near([*outputs, *grads], [*exact_outputs, *exact_grads], max(TOLERANCE[x.dtype] for x in leaves))


def assert_all_near(found: Sequence[Tensor], exact: Sequence[Tensor], tolerance: float) -> None:
    for index, (a, b) in enumerate(zip(found, exact, strict=True)):
        assert a.shape == b.shape, index
        if b.numel():
            error = (a.double() - b).abs().max().item()
            assert error <= tolerance * max(b.abs().max().item(), 0.1), f"tensor {index}: {error}"


def assert_end_matches(fn: Function, reference: Function, inputs: Sequence[Tensor | None], end: int) -> None:
    """`assert_matches` for tensors past 2^31 elements, where 32 bits of offset wrap: of the last `end` of their first dimension.

    Only that end has a gradient from above, so sums over all of it (a weight's gradient) are those of the end. Inputs as long
    as the first are cut to their end for the reference; the others are whole.
    """
    first = inputs[0]
    assert first is not None
    torch.cuda.empty_cache()  # whatever earlier tests have left: these take tens of gigabytes

    def cut(x: Tensor | None) -> Tensor | None:
        return x[-end:] if x is not None and x.shape[:1] == first.shape[:1] else x

    def end_of(*leaves: Tensor | None) -> list[Tensor]:
        return [y[-end:] for y in as_list(fn(*leaves))]

    outputs, grads = evaluate(end_of, inputs)
    exact_outputs, exact_grads = evaluate(reference, widen([cut(x) for x in inputs]))
    tails = [grad for grad in map(cut, grads) if grad is not None]
    assert_all_near([*outputs, *tails], [*exact_outputs, *exact_grads], TOLERANCE[first.dtype])


def assert_as_exact_as_torch(
    fn: Function, reference: Function, inputs: Sequence[Tensor | None], luck: float = 0.001
) -> None:
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
        assert error <= (1 + luck) * own + floor, f"tensor {index}: {error} against PyTorch's {own}"


def assert_same_bits(fn: Function, inputs: Sequence[Tensor | None], *, backward: bool = True, runs: int = 100) -> None:
    """Every run gives the same bits, forward and, where there is a backward, in the gradients of every floating input."""
    leaves = make_leaves(inputs) if backward else inputs
    heads = draw_heads(as_list(fn(*leaves))) if backward else []

    def run() -> list[Tensor]:
        outputs = as_list(fn(*leaves))
        return [*outputs, *(differentiate(outputs, leaves, heads) if backward else [])]

    first = run()
    for index in range(1, runs):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True)), f"run {index} differs from the first"
