"""RMS norm, alone and behind the residual mix: one pass over memory each way.

With r = 1/sqrt(mean(x^2) + eps) and g = scale * weight * dy the gradients are

    y  = scale * weight * x * r
    dx = r * (g - x * r^2 * mean(g * x))
    dweight = sum over rows of scale * dy * x * r

and behind the mix m = a*x + b*x0, with dM the norm's dx at m plus the gradient that reached m itself,

    dx = a * dM,  dx0 = b * dM,  da = sum over rows of dM * x,  db = sum over rows of dM * x0.

A program holds whole rows in registers, so the row is read once. Sums over rows are what compilers do badly: here a fixed
number of programs walk the rows, keep the sums of their own rows in registers, and write one line each of a small float32
buffer that one more pass adds up. Nothing is added atomically, so the result is the same bits every time.
"""

from typing import Any

import torch
from torch import Tensor

from parbank.errors import ParbankError
from parbank.ops import configs, reference
from parbank.ops.backend import tl, triton
from parbank.ops.checks import (
    as_rows,
    as_vector,
    on_device,
    persistent_programs,
    refuse_double_backward,
    same_device,
    takes_kernel,
)
from parbank.ops.configs import Launch
from parbank.ops.reference import NORM_EPS

MAX_WIDTH = 8192  # the longest row the tables below keep in registers; wider ones take the reference
MAX_MIX_WIDTH = 4096


def _forward_rows(tiles: dict[int, tuple[int, int]]) -> configs.Rows:
    """Row length -> (rows a program holds, warps)."""
    return [
        (width, Launch({"BLOCK_ROWS": rows, "BLOCK": width}, num_warps=warps, num_stages=1))
        for width, (rows, warps) in tiles.items()
    ]


def _backward_rows(tiles: dict[int, tuple[int, int, int]], stages: int) -> configs.Rows:
    """Row length -> (rows a program holds, warps, programs per multiprocessor), `stages` rows deep.

    The programs per multiprocessor must all be resident by their registers, or the last ones run alone.
    """
    return [
        (
            width,
            Launch(
                {"BLOCK_ROWS": rows, "BLOCK": width, "PER_SM": per_sm, "STAGES": stages},
                num_warps=warps,
                num_stages=1,
            ),
        )
        for width, (rows, warps, per_sm) in tiles.items()
    ]


# Bytes in flight decide: 16 to 32 elements a thread forward, 8 to 16 backward where more operands share the registers.
configs.register(
    "rms_norm",
    sm80=_forward_rows({512: (8, 4), 1024: (4, 4), 2048: (2, 4), 8192: (1, 8)}),
)
configs.register(
    "rms_norm_backward",
    sm80=_backward_rows({512: (4, 4, 4), 1024: (2, 4, 4), 2048: (1, 4, 4), 8192: (1, 16, 1)}, stages=3),
)
configs.register(
    "mix_rms_norm",
    sm80=_forward_rows({512: (4, 4), 1024: (2, 4), 2048: (1, 4), 4096: (1, 8)}),
)
configs.register(
    "mix_rms_norm_backward",
    sm80=_backward_rows({512: (4, 4, 2), 1024: (1, 4, 4), 2048: (1, 8, 2), 4096: (1, 16, 1)}, stages=3),
)


@triton.jit
def _norm_forward_kernel(
    x, weight, y, inverse, rows, stride_x, scale, eps,
    WIDTH: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK)
    live = row < rows
    inside = live[:, None] & (col < WIDTH)[None, :]
    value = tl.load(x + row[:, None] * stride_x + col[None, :], mask=inside, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
    out = value * (r * scale)[:, None]
    if WEIGHTED:
        out *= tl.load(weight + col, mask=col < WIDTH, other=0.0).to(tl.float32)[None, :]
    tl.store(y + row[:, None] * WIDTH + col[None, :], out.to(y.dtype.element_ty), mask=inside)
    tl.store(inverse + row, r, mask=live)


@triton.jit
def _norm_backward_kernel(
    dy, x, weight, inverse, dx, partial, rows, stride_dy, stride_x, scale,
    WIDTH: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PER_SM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    known = col < WIDTH
    if WEIGHTED:
        gain = tl.load(weight + col, mask=known, other=0.0).to(tl.float32)[None, :]
        total = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES if WEIGHTED else 1):
        row = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = row < rows
        inside = live[:, None] & known[None, :]
        value = tl.load(x + row[:, None] * stride_x + col[None, :], mask=inside, other=0.0).to(tl.float32)
        g = tl.load(dy + row[:, None] * stride_dy + col[None, :], mask=inside, other=0.0).to(tl.float32) * scale
        r = tl.load(inverse + row, mask=live, other=0.0)
        unit = value * r[:, None]
        if WEIGHTED:
            total += g * unit
            g *= gain
        back = r[:, None] * (g - unit * (tl.sum(g * unit, 1) / WIDTH)[:, None])
        tl.store(dx + row[:, None] * WIDTH + col[None, :], back.to(dx.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(partial + program * WIDTH + col, tl.sum(total, 0), mask=known)


@triton.jit
def _norm_mix_forward_kernel(
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
def _norm_mix_backward_kernel(
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


def _launch(op: str, width: int, rows: int, device: torch.device, *, persistent: bool) -> tuple[Launch, int]:
    """The config for a row length, and how many programs to start."""
    launch = configs.choose(op, width, device)
    tiles = -(-rows // launch.blocks["BLOCK_ROWS"])
    return launch, persistent_programs(device, launch.blocks["PER_SM"], tiles) if persistent else tiles


@torch.library.custom_op(
    "parbank::rms_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor? weight, float scale, float eps) -> (Tensor, Tensor)",
)
def _rms_norm(x: Tensor, weight: Tensor | None, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inverse = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel():
        flat = as_rows(x)
        rows, width = flat.shape
        launch, programs = _launch("rms_norm", width, rows, x.device, persistent=False)
        with on_device(x.device):
            _norm_forward_kernel[(programs,)](
                flat, as_vector(weight), y, inverse, rows, flat.stride(0), scale, eps,
                WIDTH=width, WEIGHTED=weight is not None, **launch.kwargs(),
            )  # fmt: skip
    return y, inverse


@torch.library.custom_op(
    "parbank::rms_norm_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor? weight, Tensor inverse, float scale) -> (Tensor, Tensor)",
)
def _rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, inverse: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """dx, and dweight in float32 (empty without a weight)."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    weighted = weight is not None
    if not x.numel():
        return dx, torch.zeros(x.shape[-1] if weighted else 0, dtype=torch.float32, device=x.device)
    flat, grad = as_rows(x), as_rows(dy)
    rows, width = flat.shape
    launch, programs = _launch("rms_norm_backward", width, rows, x.device, persistent=weighted)
    partial = torch.empty((programs, width) if weighted else 0, dtype=torch.float32, device=x.device)
    with on_device(x.device):
        _norm_backward_kernel[(programs,)](
            grad, flat, as_vector(weight), inverse, dx, partial, rows, grad.stride(0), flat.stride(0), scale,
            WIDTH=width, WEIGHTED=weighted, **launch.kwargs(),
        )  # fmt: skip
    return dx, partial.sum(0) if weighted else partial


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
        launch, programs = _launch("mix_rms_norm", width, rows, x.device, persistent=False)
        with on_device(x.device):
            _norm_mix_forward_kernel[(programs,)](
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
    launch, programs = _launch("mix_rms_norm_backward", width, rows, x.device, persistent=True)
    partial = torch.empty((2, programs, width), dtype=torch.float32, device=x.device)
    with on_device(x.device):
        _norm_mix_backward_kernel[(programs,)](
            straight, grad, flat, flat0, as_vector(a), as_vector(b), inverse, dx, dx0, partial[0], partial[1],
            rows, straight.stride(0), grad.stride(0), flat.stride(0), flat0.stride(0), scale,
            WIDTH=width, **launch.kwargs(),
        )  # fmt: skip
    return dx, dx0, partial.sum(1)


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor | None, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@_rms_norm_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor | None, inverse: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0 if weight is None else x.shape[-1], dtype=torch.float32)


@_mix_rms_norm.register_fake
def _(x: Tensor, x0: Tensor, a: Tensor, b: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@_mix_rms_norm_backward.register_fake
def _(
    dm: Tensor, dy: Tensor, x: Tensor, x0: Tensor, a: Tensor, b: Tensor, inverse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty((2, x.shape[-1]), dtype=torch.float32)


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, ctx.scale, _ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _differentiate_norm(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, inverse = ctx.saved_tensors
    dx, dweight = _rms_norm_backward(dy, x, weight, inverse, ctx.scale)
    return dx, None if weight is None else dweight.to(weight.dtype), None, None


def _save_mix(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, x0, a, b, ctx.scale, _ = inputs
    ctx.save_for_backward(x, x0, a, b, output[2])


def _differentiate_mix(ctx: Any, dm: Tensor, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, x0, a, b, inverse = ctx.saved_tensors
    dx, dx0, gains = _mix_rms_norm_backward(dm, dy, x, x0, a, b, inverse, ctx.scale)
    return dx, dx0, gains[0].to(a.dtype), gains[1].to(b.dtype), None, None


_rms_norm.register_autograd(_differentiate_norm, setup_context=_save_norm)
_mix_rms_norm.register_autograd(_differentiate_mix, setup_context=_save_mix)
_rms_norm_backward.register_autograd(refuse_double_backward("rms_norm"))
_mix_rms_norm_backward.register_autograd(refuse_double_backward("mix_rms_norm"))


def rms_norm(x: Tensor, weight: Tensor | None = None, scale: float = 1.0, eps: float = NORM_EPS) -> Tensor:
    """scale * weight * x / sqrt(mean(x^2) + eps) over the last dimension, in one pass each way."""
    _check_channels("rms_norm", x, weight=weight)
    if not takes_kernel(x, weight) or x.shape[-1] > MAX_WIDTH:
        return reference.rms_norm(x, weight, scale, eps)
    return _rms_norm(x, weight, scale, eps)[0]


def mix_rms_norm(
    x: Tensor, x0: Tensor, a: Tensor, b: Tensor, scale: float = 1.0, eps: float = NORM_EPS
) -> tuple[Tensor, Tensor]:
    """The residual mix m = a*x + b*x0 (a, b per channel) and rms_norm(m, scale=scale), in one pass each way."""
    _check_channels("mix_rms_norm", x, a=a, b=b)
    if x0.shape != x.shape or x0.dtype != x.dtype or x0.device != x.device:
        raise ParbankError(
            f"mix_rms_norm: x0 is {x0.dtype} {tuple(x0.shape)} on {x0.device} and x is {x.dtype} {tuple(x.shape)} on "
            f"{x.device}; they must agree"
        )
    if not takes_kernel(x, x0, a, b) or x.shape[-1] > MAX_MIX_WIDTH:
        return reference.mix_rms_norm(x, x0, a, b, scale, eps)
    m, y, _ = _mix_rms_norm(x, x0, a, b, scale, eps)
    return m, y


def _check_channels(op: str, x: Tensor, **channels: Tensor | None) -> None:
    if x.dim() == 0 or not x.dtype.is_floating_point:
        raise ParbankError(
            f"{op}: x is {x.dtype} {tuple(x.shape)}; it must be floating point with at least one dimension"
        )
    for name, vector in channels.items():
        if vector is not None and (vector.dim() != 1 or vector.shape[0] != x.shape[-1]):
            raise ParbankError(
                f"{op}: {name} has shape {tuple(vector.shape)} and x {tuple(x.shape)}; {name} must have one value per "
                f"channel, shape ({x.shape[-1]},)"
            )
    same_device(op, x, *channels.values())
