"""Each position mixed with the position before it, channel by channel: one pass over memory each way. (Smear:
modded-nanogpt #130.)

    y[t] = (1 - g) * x[t] + g * p[t],   p[t] = x[t - 1], or 0 where t starts a window or a document

    dx[t] = (1 - g) * dy[t] + g * dy[t + 1] (0 where t + 1 starts one),   dg = sum over positions of dy * (p - x)

The neighbour's row comes from the cache, since it is read for its own position too. Sums over rows work as in
norm.py.
"""

from typing import Any

import torch
from torch import Tensor

from parbank.errors import ParbankError
from parbank.gpu import on_device
from parbank.ops import configs, reference
from parbank.ops.backend import tl, triton
from parbank.ops.checks import as_rows, as_vector, fake, refuse_double_backward, takes_kernel
from parbank.ops.norm import backward_rows, check_channels, choose_launch, forward_rows
from parbank.ops.register import operator
from parbank.ops.sums import sum_lines

MAX_WIDTH = 4096  # the longest row the tables below keep in registers; wider ones take the reference

configs.register("smear", sm80=forward_rows({512: (4, 4), 1024: (2, 4), 2048: (1, 4), 4096: (1, 8)}))
configs.register(
    "smear_backward",
    sm80=backward_rows({512: (2, 4, 8), 1024: (2, 4, 4), 2048: (1, 4, 4), 4096: (1, 8, 2)}, stages=3),
)


@triton.jit
def _smear_forward_kernel(
    x, gate, starts, y, rows, time, stride_x,
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # divide in 32 bits: 64-bit division is slow
    row = place.to(tl.int64)
    col = tl.arange(0, BLOCK)
    known = col < WIDTH
    live = row < rows
    led = live & (place % time != 0) & (tl.load(starts + row, mask=live, other=1) == 0)
    at = x + row[:, None] * stride_x + col[None, :]
    value = tl.load(at, mask=live[:, None] & known[None, :], other=0.0).to(tl.float32)
    previous = tl.load(at - stride_x, mask=led[:, None] & known[None, :], other=0.0).to(tl.float32)
    g = tl.load(gate + col, mask=known, other=0.0).to(tl.float32)[None, :]
    out = (1 - g) * value + g * previous
    tl.store(y + row[:, None] * WIDTH + col[None, :], out.to(y.dtype.element_ty), mask=live[:, None] & known[None, :])


@triton.jit
def _smear_backward_kernel(
    dy, x, gate, starts, dx, partial, rows, time, stride_dy, stride_x,
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PER_SM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    known = col < WIDTH
    g = tl.load(gate + col, mask=known, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        place = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row = place.to(tl.int64)
        live = row < rows
        inside = live[:, None] & known[None, :]
        led = live & (place % time != 0) & (tl.load(starts + row, mask=live, other=1) == 0)
        leads = (place + 1 < rows) & ((place + 1) % time != 0)
        leads = leads & (tl.load(starts + row + 1, mask=leads, other=1) == 0)
        from_x = x + row[:, None] * stride_x + col[None, :]
        from_dy = dy + row[:, None] * stride_dy + col[None, :]
        value = tl.load(from_x, mask=inside, other=0.0).to(tl.float32)
        previous = tl.load(from_x - stride_x, mask=led[:, None] & known[None, :], other=0.0).to(tl.float32)
        back = tl.load(from_dy, mask=inside, other=0.0).to(tl.float32)
        following = tl.load(from_dy + stride_dy, mask=leads[:, None] & known[None, :], other=0.0).to(tl.float32)
        total += back * (previous - value)
        out = (1 - g) * back + g * following
        tl.store(dx + row[:, None] * WIDTH + col[None, :], out.to(dx.dtype.element_ty), mask=inside)
    tl.store(partial + program * WIDTH + col, tl.sum(total, 0), mask=known)


def _bytes(starts: Tensor) -> Tensor:
    return starts.contiguous().view(torch.uint8)


@operator("smear", "(Tensor x, Tensor gate, Tensor starts) -> Tensor")
def _smear(x: Tensor, gate: Tensor, starts: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        flat = as_rows(x)
        rows, width = flat.shape
        launch, programs = choose_launch("smear", width, rows, x.device, persistent=False)
        with on_device(x.device):
            _smear_forward_kernel[(programs,)](
                flat, as_vector(gate), _bytes(starts), y, rows, x.shape[1], flat.stride(0), WIDTH=width, **launch.kwargs()
            )  # fmt: skip
    return y


@operator(
    "smear_backward",
    "(Tensor dy, Tensor x, Tensor gate, Tensor starts) -> (Tensor, Tensor)",
)
def _smear_backward(dy: Tensor, x: Tensor, gate: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """dx, and dgate in float32."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return dx, torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device)
    flat, grad = as_rows(x), as_rows(dy)
    rows, width = flat.shape
    read = (grad, grad, flat, flat)  # each row, and the row after or before it
    launch, programs = choose_launch("smear_backward", width, rows, x.device, persistent=True, read=read)
    partial = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    with on_device(x.device):
        _smear_backward_kernel[(programs,)](
            grad, flat, as_vector(gate), _bytes(starts), dx, partial, rows, x.shape[1], grad.stride(0), flat.stride(0),
            WIDTH=width, **launch.kwargs(),
        )  # fmt: skip
    return dx, sum_lines(partial[None])[0]


@fake(_smear)
def _(x: Tensor, gate: Tensor, starts: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@fake(_smear_backward)
def _(dy: Tensor, x: Tensor, gate: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, gate, starts = ctx.saved_tensors
    dx, dgate = _smear_backward(dy, x, gate, starts)
    return dx, dgate.to(gate.dtype), None


torch.library.register_autograd(_smear, _differentiate, setup_context=_save)
torch.library.register_autograd(_smear_backward, refuse_double_backward("smear"))


def smear(x: Tensor, gate: Tensor, starts: Tensor) -> Tensor:
    """(1 - gate) * x + gate * (x one position earlier), gate per channel, in one pass each way.

    x (B, T, width); starts (B, T), bool, marks positions without a predecessor. The first position of a row never has
    one.
    """
    check_channels("smear", x, gate=gate)
    if x.dim() != 3 or starts.shape != x.shape[:2] or starts.dtype != torch.bool or starts.device != x.device:
        raise ParbankError(
            f"smear: x is {tuple(x.shape)} on {x.device} and starts {starts.dtype} {tuple(starts.shape)} on {starts.device}; "
            "they must be (B, T, width) and bool (B, T), on one device"
        )
    if not takes_kernel(x, gate) or x.shape[-1] > MAX_WIDTH:
        return reference.smear(x, gate, starts)
    return _smear(x, gate, starts)
