"""Products in FP8 (Micikevicius et al. 2022): y = x W^T and dX = dY W on e4m3 numbers; dW = dY^T x stays in the compute
dtype.

Each row that a product sums over has its own scale: its largest magnitude over e4m3's largest number, found in the
pass that rounds it.

    s = max |x_i| / 448,   x_i ~ s q_i,   y_ij = s_i t_j sum_k q_ik r_jk

So nothing overflows, and no state is kept between steps. Gradients are e4m3 too. The usual e5m2 trades precision for
range, but a row's own scale leaves range enough: 448 over the smallest number is 2^18. A matrix is rounded twice,
along rows for y and along columns for dX, because each product reads the numbers it sums contiguously. dW sums over
tokens. It would need transposed copies of both factors, and its rounding errors would accumulate over a run.

The rounding is plain PyTorch around PyTorch's scaled product, so that Inductor fuses it with the activation and its
derivative. A NaN makes its whole row NaN, and the optimizer skips the step.

A model says which of its parts use these products (`GPT.fp8`). Without CUDA the same numbers are multiplied in float32.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from parbank.errors import ConfigError
from parbank.ops import reference

Parts = Literal["off", "mlp", "head", "mlp+head"]

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
# The smallest magnitude a row's scale is made from: both the scale and its reciprocal are then normal float32 numbers.
SMALLEST = LARGEST * torch.finfo(torch.float32).tiny
MIN_CAPABILITY = (8, 9)  # the first NVIDIA GPUs that multiply in 8 bits
MULTIPLE = 16  # of every side of a matrix: the hardware reads 16 bytes at a time


def check_device(parts: Parts, device: torch.device) -> None:
    """Refuses FP8 on a device that cannot run it. `parts` is not "off"."""
    what = f"train.fp8={parts} needs an NVIDIA GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell), but "
    rest = "; leave it off (--set train.fp8=off)"
    if device.type != "cuda":
        raise ConfigError(f"{what}this run is on {device.type}{rest}")
    if torch.version.hip is not None:
        raise ConfigError(f"{what}this PyTorch is built for AMD{rest}")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < MIN_CAPABILITY:
        raise ConfigError(f"{what}{torch.cuda.get_device_name(device)} has {major}.{minor}{rest}")


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (rows, depth) as e4m3 numbers, side by side along a row, and a float32 scale for each row (rows, 1)."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    return (wide * (LARGEST / largest)).to(DTYPE).contiguous(), largest / LARGEST


def multiply(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """A B^T of two quantised matrices (m, depth) and (n, depth)."""
    if not a[0].is_cuda:
        return multiply_plainly(a, b, dtype)
    # Fast accumulation: about 14 bits in the tensor cores, far finer than the e4m3 numbers that are summed.
    return torch._scaled_mm(a[0], b[0].t(), scale_a=a[1], scale_b=b[1].t(), out_dtype=dtype, use_fast_accum=True)


def multiply_plainly(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """The reference for `multiply`: the same numbers in float32."""
    product = (a[0].float() @ b[0].float().t()) * a[1] * b[1].t()
    # An autograd.Function that ends in a cast to the same type loses its gradients in torch 2.11's compiler.
    return product if product.dtype == dtype else product.to(dtype)


class _Linear(torch.autograd.Function):
    """An autograd.Function, not a torch.library op: the compiler sees through it and fuses the rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return multiply(quantise(x), quantise(w), x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        dx = multiply(quantise(dy), quantise(w.t()), x.dtype)
        return dx, torch.mm(dy.t(), x)


def linear(x: Tensor, w: Tensor) -> Tensor:
    """x W^T of x (..., inputs) and w (outputs, inputs), both multiples of 16 on CUDA; w may be a transposed view."""
    return _Linear.apply(x.reshape(-1, x.shape[-1]), w).view(*x.shape[:-1], w.shape[0])


def mlp(x: Tensor, w_up: Tensor, w_down: Tensor, slope: float) -> Tensor:
    """`ops.mlp` in FP8. The activation is plain PyTorch, so that the compiler fuses it with the rounding."""
    return linear(reference.leaky_relu_squared(linear(x, w_up), slope), w_down)
