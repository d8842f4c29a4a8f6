"""One tensor for several readers. One pass over memory sums their gradients.

    y_1 = ... = y_n = x;    dx = dy_1 + ... + dy_n

Autograd sums gradients in pairs: n - 1 passes that read two tensors and write one. Here each gradient is read once;
the sum is kept in float32 and rounded once. Under `torch.compile` this is plain PyTorch, because the compiler fuses
the pairs.
"""

from typing import Any

import torch
from torch import Tensor

from parbank.errors import ParbankError
from parbank.gpu import on_device
from parbank.ops import reference
from parbank.ops.backend import tl, triton
from parbank.ops.checks import check_floating, takes_kernel

BLOCK, WARPS = 1024, 4  # one 16-byte load a thread and gradient: twelve in flight are enough
MOST = 16  # gradients added by one launch: each is a pointer, and 16 of them leave registers for two blocks in flight


@triton.jit
def _sum_kernel(terms, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    total = tl.zeros((BLOCK,), tl.float32)
    for n in tl.static_range(len(terms)):
        total += tl.load(terms[n] + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def sum_tensors(terms: list[Tensor]) -> Tensor:
    """The sum of tensors of one shape and dtype, rounded once for every 16 of them."""
    while len(terms) > 1:
        now = [term.contiguous() for term in terms[:MOST]]
        out = torch.empty_like(now[0])
        if out.numel():
            with on_device(out.device):
                grid = (triton.cdiv(out.numel(), BLOCK),)
                _sum_kernel[grid](tuple(now), out, out.numel(), BLOCK=BLOCK, num_warps=WARPS)
        terms = [*terms[MOST:], out]
    return terms[0]


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for _ in range(copies))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:  # type: ignore[override]
        terms = [grad for grad in grads if grad is not None]
        # With gradients on, this backward is differentiated: plain sums have derivatives.
        plain = torch.is_grad_enabled() or not terms or not takes_kernel(*terms)
        return (sum(terms[1:], terms[0]) if terms else None) if plain else sum_tensors(terms), None


def fan_out(x: Tensor, copies: int) -> tuple[Tensor, ...]:
    """x, `copies` times. One pass sums the gradients of all of them."""
    if copies < 1:
        raise ParbankError(f"fan_out: copies is {copies}; it must be at least 1")
    check_floating("fan_out", x=x)
    if not x.requires_grad or not takes_kernel(x) or torch.compiler.is_compiling():
        return reference.fan_out(x, copies)
    return _FanOut.apply(x, copies)
