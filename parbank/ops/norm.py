"""RMS norm (Zhang and Sennrich 2019), alone or after the residual sum: one pass over memory each way.

With r = 1/sqrt(mean(x^2) + eps) and g = scale * weight * dy the gradients are

    y  = scale * weight * x * r
    dx = r * (g - x * r^2 * mean(g * x))
    dweight = sum over rows of scale * dy * x * r

After the sum s = x + y, both x and y get the norm's dx at s plus the gradient that reached s itself.

A product does not need a normed input: (scale r x) W = scale r (x W), one factor per row of the output. `row_norms`
writes only that factor. The product then returns the gradient e = scale r dy W^T, from which dx = e - x * r^2 *
mean(e * x). The kernels call this case LATE.

A program holds whole rows in registers, so each row is read once. For sums over rows, a fixed number of programs walk
the rows, keep the sums of their own rows in registers, and write one line each to a small float32 buffer. A second
pass adds the lines. There are no atomics, so the result has the same bits every time.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parbank.errors import ParbankError
from parbank.gpu import on_device
from parbank.ops import configs, reference
from parbank.ops.backend import tl, triton
from parbank.ops.checks import (
    as_rows,
    as_vector,
    check_floating,
    fake,
    persistent_programs,
    refuse_double_backward,
    same_device,
    takes_kernel,
)
from parbank.ops.configs import Launch
from parbank.ops.reference import NORM_EPS
from parbank.ops.register import operator
from parbank.ops.sums import sum_lines

MAX_WIDTH = 8192  # the longest row the tables below keep in registers; wider ones take the reference
SCRATCH = 16 * 1024  # bytes of shared memory besides rows: sums over a row, and of rows at the end, took up to 8.3 KB


def forward_rows(tiles: dict[int, tuple[int, int]]) -> configs.Rows:
    """Row length -> (rows a program holds, warps)."""
    return [
        (width, Launch({"BLOCK_ROWS": rows, "BLOCK": width}, num_warps=warps, num_stages=1))
        for width, (rows, warps) in tiles.items()
    ]


def backward_rows(tiles: dict[int, tuple[int, int, int]], stages: int) -> configs.Rows:
    """Row length -> (rows a program holds, warps, programs per multiprocessor), with `stages` rows in flight.

    All programs of a multiprocessor must be resident by their registers, or the last ones run alone.
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


# Bytes in flight decide: 16 to 64 elements a thread forward; 8 to 16 backward, where more operands share the registers.
configs.register(
    "rms_norm",
    sm80=forward_rows({512: (4, 1), 1024: (4, 4), 2048: (2, 4), 8192: (1, 8)}),
)
configs.register(
    "rms_norm_backward",
    sm80=backward_rows({512: (4, 4, 4), 1024: (2, 4, 4), 2048: (1, 4, 4), 8192: (1, 16, 1)}, stages=3),
)
configs.register(
    "add_rms_norm",
    sm80=forward_rows({512: (4, 4), 1024: (2, 4), 2048: (1, 4), 8192: (1, 8)}),
)
configs.register(
    "add_rms_norm_backward",
    sm80=backward_rows({512: (4, 4, 4), 1024: (2, 4, 4), 2048: (1, 4, 4), 8192: (1, 16, 1)}, stages=1),
)


@triton.jit
def _norm_forward_kernel(
    x, addend, weight, total, y, inverse, rows, stride_x, stride_addend, scale, eps,
    WIDTH: tl.constexpr, WEIGHTED: tl.constexpr, ADDED: tl.constexpr, LATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK)
    live = row < rows
    inside = live[:, None] & (col < WIDTH)[None, :]
    value = tl.load(x + row[:, None] * stride_x + col[None, :], mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        value += tl.load(addend + row[:, None] * stride_addend + col[None, :], mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row[:, None] * WIDTH + col[None, :], rounded, mask=inside)
        value = rounded.to(tl.float32)
    r = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
    if not LATE:
        out = value * (r * scale)[:, None]
        if WEIGHTED:
            out *= tl.load(weight + col, mask=col < WIDTH, other=0.0).to(tl.float32)[None, :]
        tl.store(y + row[:, None] * WIDTH + col[None, :], out.to(y.dtype.element_ty), mask=inside)
    tl.store(inverse + row, r, mask=live)


@triton.jit
def _norm_backward_kernel(
    dy, straight, x, weight, inverse, dx, partial, rows, stride_dy, stride_straight, stride_x, scale,
    WIDTH: tl.constexpr, WEIGHTED: tl.constexpr, ADDED: tl.constexpr, LATE: tl.constexpr,
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
        back = g - unit * (tl.sum(g * unit, 1) / WIDTH)[:, None]
        if not LATE:
            back *= r[:, None]
        if ADDED:
            past = tl.load(straight + row[:, None] * stride_straight + col[None, :], mask=inside, other=0.0)
            back += past.to(tl.float32)
        tl.store(dx + row[:, None] * WIDTH + col[None, :], back.to(dx.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(partial + program * WIDTH + col, tl.sum(total, 0), mask=known)


def fit_stages(launch: Launch, element_bytes: int, architecture: str) -> Launch:
    """The most stages that fit: all but one are in shared memory, `element_bytes` for a channel of all operands."""
    tile = launch.blocks["BLOCK_ROWS"] * launch.blocks["BLOCK"] * element_bytes
    most = 1 + (configs.SHARED_LIMIT[architecture] - SCRATCH) // tile
    return dataclasses.replace(launch, blocks={**launch.blocks, "STAGES": min(launch.blocks["STAGES"], most)})


def choose_launch(
    op: str, width: int, rows: int, device: torch.device, *, persistent: bool, read: Sequence[Tensor | None] = ()
) -> tuple[Launch, int]:
    """The config for a row length, and how many programs to start. `read` are the tensors whose rows a loop prefetches."""
    launch = configs.choose(op, width, device)
    if read:
        element_bytes = sum(x.element_size() for x in read if x is not None)
        launch = fit_stages(launch, element_bytes, configs.architecture(device))
    tiles = -(-rows // launch.blocks["BLOCK_ROWS"])
    return launch, persistent_programs(device, launch.blocks["PER_SM"], tiles) if persistent else tiles


def _launch_forward(
    op: str, x: Tensor, addend: Tensor | None, weight: Tensor | None, total: Tensor | None, y: Tensor | None, inverse: Tensor,
    scale: float, eps: float,
) -> None:  # fmt: skip
    """Writes the reciprocal norms, the sum if there is an addend, and the norm if there is an output for it."""
    if not x.numel():
        return
    flat, other = as_rows(x), None if addend is None else as_rows(addend)
    rows, width = flat.shape
    launch, programs = choose_launch(op, width, rows, x.device, persistent=False)
    with on_device(x.device):
        _norm_forward_kernel[(programs,)](
            flat, other, as_vector(weight), total, y, inverse, rows, flat.stride(0), 0 if other is None else other.stride(0),
            scale, eps, WIDTH=width, WEIGHTED=weight is not None, ADDED=addend is not None, LATE=y is None, **launch.kwargs(),
        )  # fmt: skip


def _launch_sum_backward(
    straight: Tensor | None, g: Tensor, x: Tensor, inverse: Tensor, scale: float, *, late: bool
) -> Tensor:
    """The gradient of x from that of its norm, plus `straight`, the gradient that reached x elsewhere."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return dx
    flat, grad = as_rows(x), as_rows(g)
    past = grad if straight is None else as_rows(straight)
    rows, width = flat.shape
    launch, programs = choose_launch("add_rms_norm_backward", width, rows, x.device, persistent=False)
    with on_device(x.device):
        _norm_backward_kernel[(programs,)](
            grad, past, flat, None, inverse, dx, None, rows, grad.stride(0), past.stride(0), flat.stride(0), scale,
            WIDTH=width, WEIGHTED=False, ADDED=straight is not None, LATE=late, **launch.kwargs(),
        )  # fmt: skip
    return dx


@operator(
    "rms_norm",
    "(Tensor x, Tensor? weight, float scale, float eps) -> (Tensor, Tensor)",
)
def _rms_norm(x: Tensor, weight: Tensor | None, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inverse = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    _launch_forward("rms_norm", x, None, weight, None, y, inverse, scale, eps)
    return y, inverse


@operator(
    "rms_norm_backward",
    "(Tensor dy, Tensor x, Tensor? weight, Tensor inverse, float scale) -> (Tensor, Tensor)",
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
    launch, programs = choose_launch("rms_norm_backward", width, rows, x.device, persistent=weighted, read=(grad, flat))
    partial = torch.empty((programs, width) if weighted else 0, dtype=torch.float32, device=x.device)
    with on_device(x.device):
        _norm_backward_kernel[(programs,)](
            grad, None, flat, as_vector(weight), inverse, dx, partial, rows, grad.stride(0), 0, flat.stride(0), scale,
            WIDTH=width, WEIGHTED=weighted, ADDED=False, LATE=False, **launch.kwargs(),
        )  # fmt: skip
    return dx, sum_lines(partial[None])[0] if weighted else partial


@operator(
    "add_rms_norm",
    "(Tensor x, Tensor y, float scale, float eps) -> (Tensor, Tensor, Tensor)",
)
def _add_rms_norm(x: Tensor, y: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inverse = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    _launch_forward("add_rms_norm", x, y, None, total, normed, inverse, scale, eps)
    return total, normed, inverse


@operator(
    "add_rms_norm_backward",
    "(Tensor? dtotal, Tensor dnormed, Tensor total, Tensor inverse, float scale) -> Tensor",
)
def _add_rms_norm_backward(
    dtotal: Tensor | None, dnormed: Tensor, total: Tensor, inverse: Tensor, scale: float
) -> Tensor:
    """The gradient of the sum, and so of both addends. `dtotal` is None where only the norm was used."""
    return _launch_sum_backward(dtotal, dnormed, total, inverse, scale, late=False)


@operator("row_norms", "(Tensor x, float eps) -> Tensor")
def _row_norms(x: Tensor, eps: float) -> Tensor:
    """1/sqrt(mean(x^2) + eps) of every row, in float32."""
    inverse = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    _launch_forward("rms_norm", x, None, None, None, None, inverse, 1.0, eps)
    return inverse


@operator(
    "row_norms_backward",
    "(Tensor straight, Tensor g, Tensor x, Tensor inverse) -> Tensor",
)
def _row_norms_backward(straight: Tensor, g: Tensor, x: Tensor, inverse: Tensor) -> Tensor:
    """The gradient of x: `straight`, which reached x elsewhere, plus the norm's part of `g`. `g` came back through a
    product whose rows were multiplied by the norm's factor, and is already multiplied by it."""
    return _launch_sum_backward(straight, g, x, inverse, 1.0, late=True)


@fake(_row_norms)
def _(x: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


@fake(_row_norms_backward)
def _(straight: Tensor, g: Tensor, x: Tensor, inverse: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@fake(_rms_norm)
def _(x: Tensor, weight: Tensor | None, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@fake(_rms_norm_backward)
def _(dy: Tensor, x: Tensor, weight: Tensor | None, inverse: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0 if weight is None else x.shape[-1], dtype=torch.float32)


@fake(_add_rms_norm)
def _(x: Tensor, y: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@fake(_add_rms_norm_backward)
def _(dtotal: Tensor | None, dnormed: Tensor, total: Tensor, inverse: Tensor, scale: float) -> Tensor:
    return total.new_empty(total.shape)


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, ctx.scale, _ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _differentiate_norm(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, inverse = ctx.saved_tensors
    dx, dweight = _rms_norm_backward(dy, x, weight, inverse, ctx.scale)
    return dx, None if weight is None else dweight.to(weight.dtype), None, None


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.scale = inputs[2]
    ctx.save_for_backward(output[0], output[2])
    ctx.set_materialize_grads(False)  # only its norm reads the last sum: write no zeros for its gradient


def _differentiate_sum(ctx: Any, dtotal: Tensor | None, dnormed: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    total, inverse = ctx.saved_tensors
    dnormed = torch.zeros_like(total) if dnormed is None else dnormed
    dx = _add_rms_norm_backward(dtotal, dnormed, total, inverse, ctx.scale)
    return dx, dx, None, None


torch.library.register_autograd(_rms_norm, _differentiate_norm, setup_context=_save_norm)
torch.library.register_autograd(_add_rms_norm, _differentiate_sum, setup_context=_save_sum)
torch.library.register_autograd(_add_rms_norm_backward, refuse_double_backward("add_rms_norm"))
torch.library.register_autograd(_rms_norm_backward, refuse_double_backward("rms_norm"))
torch.library.register_autograd(_row_norms, refuse_double_backward("a block's half (residual.py)"))
torch.library.register_autograd(_row_norms_backward, refuse_double_backward("a block's half (residual.py)"))


def rms_norm(x: Tensor, weight: Tensor | None = None, scale: float = 1.0, eps: float = NORM_EPS) -> Tensor:
    """scale * weight * x / sqrt(mean(x^2) + eps) over the last dimension, in one pass each way."""
    check_channels("rms_norm", x, weight=weight)
    if not takes_kernel(x, weight) or x.shape[-1] > MAX_WIDTH:
        return reference.rms_norm(x, weight, scale, eps)
    return _rms_norm(x, weight, scale, eps)[0]


def add_rms_norm(x: Tensor, y: Tensor, scale: float = 1.0, eps: float = NORM_EPS) -> tuple[Tensor, Tensor]:
    """The residual sum s = x + y and rms_norm(s, scale=scale), in one pass each way."""
    check_channels("add_rms_norm", x)
    check_like("add_rms_norm", x, y=y)
    if not takes_kernel(x, y) or x.shape[-1] > MAX_WIDTH:
        return reference.add_rms_norm(x, y, scale, eps)
    total, normed, _ = _add_rms_norm(x, y, scale, eps)
    return total, normed


def check_like(op: str, x: Tensor, **others: Tensor) -> None:
    for name, other in others.items():
        if other.shape != x.shape or other.dtype != x.dtype or other.device != x.device:
            raise ParbankError(
                f"{op}: {name} is {other.dtype} {tuple(other.shape)} on {other.device} and x is {x.dtype} "
                f"{tuple(x.shape)} on {x.device}; they must agree"
            )


def check_channels(op: str, x: Tensor, **channels: Tensor | None) -> None:
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
    check_floating(op, **channels)
    same_device(op, x, *channels.values())
