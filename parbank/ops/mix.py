"""The residual mix and the RMS norm behind it: one pass over memory each way.

With m = a*x + b*x0, y the norm of m (norm.py), and dM the norm's dx at m plus the gradient that reached m itself,

    dx = a * dM,  dx0 = b * dM,  da = sum over rows of dM * x,  db = sum over rows of dM * x0.

Sums over rows are made as in norm.py.
"""

from typing import Any

import torch
from torch import Tensor

from parbank.ops import configs, reference
from parbank.ops.backend import tl, triton
from parbank.ops.checks import as_rows, as_vector, on_device, refuse_double_backward, takes_kernel
from parbank.ops.norm import backward_rows, check_channels, check_like, choose_launch, forward_rows
from parbank.ops.reference import NORM_EPS

MAX_WIDTH = 4096  # the longest row the tables below keep in registers; wider ones take the reference

configs.register(
    "mix_rms_norm",
    sm80=forward_rows({512: (4, 4), 1024: (2, 4), 2048: (1, 4), 4096: (1, 8)}),
)
configs.register(
    "mix_rms_norm_backward",
    sm80=backward_rows({512: (2, 4, 3), 1024: (1, 4, 4), 2048: (1, 8, 2), 4096: (1, 16, 1)}, stages=3),
)


@triton.jit
def _mix_norm_forward_kernel(
    x, x0, a, b, m, y, inverse, rows, stride_x, stride_x0, scale, eps,
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK)
    known = col < WIDTH
    live = row < rows
    inside = live[:, None] & known[None, :]
    first = tl.load(x + row[:, None] * stride_x + col[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x0 + row[:, None] * stride_x0 + col[None, :], mask=inside, other=0.0).to(tl.float32)
    of_x = tl.load(a + col, mask=known, other=0.0).to(tl.float32)[None, :]
    of_x0 = tl.load(b + col, mask=known, other=0.0).to(tl.float32)[None, :]
    mixed = (of_x * first + of_x0 * other).to(m.dtype.element_ty)
    value = mixed.to(tl.float32)
    r = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
    tl.store(m + row[:, None] * WIDTH + col[None, :], mixed, mask=inside)
    tl.store(
        y + row[:, None] * WIDTH + col[None, :], (value * (r * scale)[:, None]).to(y.dtype.element_ty), mask=inside
    )
    tl.store(inverse + row, r, mask=live)


@triton.jit
def _mix_norm_backward_kernel(
    dm, dy, x, x0, a, b, inverse, dx, dx0, partial_a, partial_b, rows, stride_dm, stride_dy, stride_x, stride_x0, scale,
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PER_SM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    known = col < WIDTH
    of_x = tl.load(a + col, mask=known, other=0.0).to(tl.float32)[None, :]
    of_x0 = tl.load(b + col, mask=known, other=0.0).to(tl.float32)[None, :]
    total_a = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    total_b = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = row < rows
        inside = live[:, None] & known[None, :]
        first = tl.load(x + row[:, None] * stride_x + col[None, :], mask=inside, other=0.0)
        other = tl.load(x0 + row[:, None] * stride_x0 + col[None, :], mask=inside, other=0.0)
        g = tl.load(dy + row[:, None] * stride_dy + col[None, :], mask=inside, other=0.0)
        straight = tl.load(dm + row[:, None] * stride_dm + col[None, :], mask=inside, other=0.0)
        r = tl.load(inverse + row, mask=live, other=0.0)
        # The mix is computed again, rounded as it was forward: cheaper than reading it, and it need not be kept.
        mixed = (of_x * first.to(tl.float32) + of_x0 * other.to(tl.float32)).to(x.dtype.element_ty).to(tl.float32)
        unit = mixed * r[:, None]
        g = g.to(tl.float32) * scale
        back = straight.to(tl.float32) + r[:, None] * (g - unit * (tl.sum(g * unit, 1) / WIDTH)[:, None])
        tl.store(dx + row[:, None] * WIDTH + col[None, :], (of_x * back).to(dx.dtype.element_ty), mask=inside)
        tl.store(dx0 + row[:, None] * WIDTH + col[None, :], (of_x0 * back).to(dx0.dtype.element_ty), mask=inside)
        total_a += back * first.to(tl.float32)
        total_b += back * other.to(tl.float32)
    tl.store(partial_a + program * WIDTH + col, tl.sum(total_a, 0), mask=known)
    tl.store(partial_b + program * WIDTH + col, tl.sum(total_b, 0), mask=known)


@torch.library.custom_op(
    "parbank::mix_rms_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor x0, Tensor a, Tensor b, float scale, float eps) -> (Tensor, Tensor, Tensor)",
)
def _mix_rms_norm(
    x: Tensor, x0: Tensor, a: Tensor, b: Tensor, scale: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    m = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inverse = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel():
        flat, flat0 = as_rows(x), as_rows(x0)
        rows, width = flat.shape
        launch, programs = choose_launch("mix_rms_norm", width, rows, x.device, persistent=False)
        with on_device(x.device):
            _mix_norm_forward_kernel[(programs,)](
                flat, flat0, as_vector(a), as_vector(b), m, y, inverse, rows, flat.stride(0), flat0.stride(0), scale, eps,
                WIDTH=width, **launch.kwargs(),
            )  # fmt: skip
    return m, y, inverse


@torch.library.custom_op(
    "parbank::mix_rms_norm_backward",
    mutates_args=(),
    schema="(Tensor dm, Tensor dy, Tensor x, Tensor x0, Tensor a, Tensor b, Tensor inverse, float scale) "
    "-> (Tensor, Tensor, Tensor)",
)
def _mix_rms_norm_backward(
    dm: Tensor, dy: Tensor, x: Tensor, x0: Tensor, a: Tensor, b: Tensor, inverse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dx0, and (2, width) float32: da over db."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dx0 = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    if not x.numel():
        return dx, dx0, torch.zeros(2, width, dtype=torch.float32, device=x.device)
    flat, flat0, straight, grad = as_rows(x), as_rows(x0), as_rows(dm), as_rows(dy)
    rows = flat.shape[0]
    launch, programs = choose_launch("mix_rms_norm_backward", width, rows, x.device, persistent=True)
    partial = torch.empty((2, programs, width), dtype=torch.float32, device=x.device)
    with on_device(x.device):
        _mix_norm_backward_kernel[(programs,)](
            straight, grad, flat, flat0, as_vector(a), as_vector(b), inverse, dx, dx0, partial[0], partial[1],
            rows, straight.stride(0), grad.stride(0), flat.stride(0), flat0.stride(0), scale,
            WIDTH=width, **launch.kwargs(),
        )  # fmt: skip
    return dx, dx0, partial.sum(1)


@_mix_rms_norm.register_fake
def _(x: Tensor, x0: Tensor, a: Tensor, b: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@_mix_rms_norm_backward.register_fake
def _(
    dm: Tensor, dy: Tensor, x: Tensor, x0: Tensor, a: Tensor, b: Tensor, inverse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty((2, x.shape[-1]), dtype=torch.float32)


def _save_mix(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, x0, a, b, ctx.scale, _ = inputs
    ctx.save_for_backward(x, x0, a, b, output[2])


def _differentiate_mix(ctx: Any, dm: Tensor, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, x0, a, b, inverse = ctx.saved_tensors
    dx, dx0, gains = _mix_rms_norm_backward(dm, dy, x, x0, a, b, inverse, ctx.scale)
    return dx, dx0, gains[0].to(a.dtype), gains[1].to(b.dtype), None, None


_mix_rms_norm.register_autograd(_differentiate_mix, setup_context=_save_mix)
_mix_rms_norm_backward.register_autograd(refuse_double_backward("mix_rms_norm"))


def mix_rms_norm(
    x: Tensor, x0: Tensor, a: Tensor, b: Tensor, scale: float = 1.0, eps: float = NORM_EPS
) -> tuple[Tensor, Tensor]:
    """The residual mix m = a*x + b*x0 (a, b per channel) and rms_norm(m, scale=scale), in one pass each way."""
    check_channels("mix_rms_norm", x, a=a, b=b)
    check_like("mix_rms_norm", x, x0=x0)
    if not takes_kernel(x, x0, a, b) or x.shape[-1] > MAX_WIDTH:
        return reference.mix_rms_norm(x, x0, a, b, scale, eps)
    m, y, _ = _mix_rms_norm(x, x0, a, b, scale, eps)
    return m, y
