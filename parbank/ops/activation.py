"""LeakyReLU squared, forward and backward. Only the input is kept. (Squared ReLU: So et al., Primer; the leaky form:
parameter-golf #493.)

    y  = x^2 where x > 0, (slope*x)^2 elsewhere
    dx = dy * 2 * x * (1 where x > 0, slope^2 elsewhere)
"""

from typing import Any

import torch
from torch import Tensor

from parbank.errors import ParbankError
from parbank.gpu import on_device
from parbank.ops import configs, reference
from parbank.ops.backend import tl, triton
from parbank.ops.checks import fake, refuse_double_backward, takes_kernel
from parbank.ops.configs import ANY, Launch
from parbank.ops.register import operator

# 16 (forward) and 8 (backward) elements a thread: two 16-byte loads in flight each, and registers for full occupancy.
configs.register("leaky_relu_squared", sm80=[(ANY, Launch({"BLOCK": 1024}, num_warps=4, num_stages=1))])
configs.register("leaky_relu_squared_backward", sm80=[(ANY, Launch({"BLOCK": 2048}, num_warps=8, num_stages=1))])


@triton.jit
def _leaky_forward_kernel(x, y, count, slope, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + index, mask=index < count, other=0.0).to(tl.float32)
    value = tl.where(value > 0, value, value * slope)
    tl.store(y + index, (value * value).to(y.dtype.element_ty), mask=index < count)


@triton.jit
def _leaky_backward_kernel(dy, x, dx, count, slope, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + index, mask=index < count, other=0.0).to(tl.float32)
    grad = tl.load(dy + index, mask=index < count, other=0.0).to(tl.float32)
    back = grad * (2.0 * value) * tl.where(value > 0, 1.0, slope * slope)
    tl.store(dx + index, back.to(dx.dtype.element_ty), mask=index < count)


@operator("leaky_relu_squared", "(Tensor x, float slope) -> Tensor")
def _leaky_relu_squared(x: Tensor, slope: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        launch = configs.choose("leaky_relu_squared", x.numel(), x.device)
        with on_device(x.device):
            grid = (triton.cdiv(x.numel(), launch.blocks["BLOCK"]),)
            _leaky_forward_kernel[grid](x.contiguous(), y, x.numel(), slope, **launch.kwargs())
    return y


@operator("leaky_relu_squared_backward", "(Tensor dy, Tensor x, float slope) -> Tensor")
def _leaky_relu_squared_backward(dy: Tensor, x: Tensor, slope: float) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        launch = configs.choose("leaky_relu_squared_backward", x.numel(), x.device)
        with on_device(x.device):
            grid = (triton.cdiv(x.numel(), launch.blocks["BLOCK"]),)
            _leaky_backward_kernel[grid](dy.contiguous(), x.contiguous(), dx, x.numel(), slope, **launch.kwargs())
    return dx


@fake(_leaky_relu_squared)
def _(x: Tensor, slope: float) -> Tensor:
    return x.new_empty(x.shape)


@fake(_leaky_relu_squared_backward)
def _(dy: Tensor, x: Tensor, slope: float) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.slope = inputs
    ctx.save_for_backward(x)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (x,) = ctx.saved_tensors
    return _leaky_relu_squared_backward(dy, x, ctx.slope), None


torch.library.register_autograd(_leaky_relu_squared, _differentiate, setup_context=_save)
torch.library.register_autograd(_leaky_relu_squared_backward, refuse_double_backward("leaky_relu_squared"))


def leaky_relu_squared(x: Tensor, slope: float) -> Tensor:
    """LeakyReLU(x)^2: x^2 where x > 0, (slope*x)^2 elsewhere, in one pass each way."""
    if not x.dtype.is_floating_point:
        raise ParbankError(f"leaky_relu_squared: x is {x.dtype}; it must be floating point")
    if not takes_kernel(x):
        return reference.leaky_relu_squared(x, slope)
    return _leaky_relu_squared(x, slope)
