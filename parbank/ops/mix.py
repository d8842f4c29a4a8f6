"""The residual mix and the RMS norm after it, alone or after the residual sum: one pass over memory each way.

With s the stream, m = a*s + b*x0, y the norm of m (norm.py), and dM the norm's dx at m plus the gradient that reached
m itself,

    ds = a * dM,  dx0 = b * dM,  da = sum over rows of dM * s,  db = sum over rows of dM * x0.

After the sum s = x + addend + gain*skip, with the gradient that reached s from elsewhere added to ds,

    dx = daddend = ds,  dskip = gain * ds,  dgain = sum over rows of ds * skip.

With an addend the sum is written once: backward needs it for da and to recompute m. Without an addend but with a skip
(residual.py) it is recomputed as well, and the gradient that reached x from elsewhere is added to dx alone. Sums over
rows work as in norm.py.
"""

from typing import Any

import torch
from torch import Tensor

from parbank.errors import ParbankError
from parbank.gpu import on_device
from parbank.ops import configs, reference
from parbank.ops.backend import tl, triton
from parbank.ops.checks import as_rows, as_vector, fake, refuse_double_backward, takes_kernel
from parbank.ops.norm import backward_rows, check_channels, check_like, choose_launch, forward_rows
from parbank.ops.reference import NORM_EPS
from parbank.ops.register import operator
from parbank.ops.sums import sum_lines

MAX_WIDTH = 4096  # the longest row the tables below keep in registers; wider ones take the reference

configs.register(
    "mix_rms_norm",
    sm80=forward_rows({512: (4, 4), 1024: (2, 4), 2048: (1, 4), 4096: (1, 8)}),
)
configs.register(
    "add_mix_rms_norm",
    sm80=forward_rows({512: (4, 4), 1024: (2, 4), 2048: (1, 4), 4096: (1, 8)}),
)
configs.register(
    "mix_rms_norm_backward",
    sm80=backward_rows({512: (2, 4, 3), 1024: (1, 4, 4), 2048: (1, 8, 2), 4096: (1, 16, 1)}, stages=3),
)
# Two operands and one sum over rows more: fewer rows a program.
configs.register(
    "skip_mix_rms_norm_backward",
    sm80=backward_rows({512: (1, 4, 4), 1024: (1, 4, 4), 2048: (1, 8, 2), 4096: (1, 16, 1)}, stages=3),
)


@triton.jit
def _mix_norm_forward_kernel(
    x, addend, skip, x0, gain, a, b, total, m, y, inverse, rows, stride_x, stride_addend, stride_skip, stride_x0, scale, eps,
    WIDTH: tl.constexpr, ADDED: tl.constexpr, SKIPPED: tl.constexpr, LATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK)
    known = col < WIDTH
    live = row < rows
    inside = live[:, None] & known[None, :]
    at = row[:, None] * WIDTH + col[None, :]
    first = tl.load(x + row[:, None] * stride_x + col[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x0 + row[:, None] * stride_x0 + col[None, :], mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        first += tl.load(addend + row[:, None] * stride_addend + col[None, :], mask=inside, other=0.0).to(tl.float32)
    if SKIPPED:
        old = tl.load(skip + row[:, None] * stride_skip + col[None, :], mask=inside, other=0.0).to(tl.float32)
        first += tl.load(gain + col, mask=known, other=0.0).to(tl.float32)[None, :] * old
    if ADDED:
        rounded = first.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        first = rounded.to(tl.float32)
    of_x = tl.load(a + col, mask=known, other=0.0).to(tl.float32)[None, :]
    of_x0 = tl.load(b + col, mask=known, other=0.0).to(tl.float32)[None, :]
    mixed = (of_x * first + of_x0 * other).to(m.dtype.element_ty)
    value = mixed.to(tl.float32)
    r = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
    tl.store(m + at, mixed, mask=inside)
    if not LATE:
        tl.store(y + at, (value * (r * scale)[:, None]).to(y.dtype.element_ty), mask=inside)
    tl.store(inverse + row, r, mask=live)


@triton.jit
def _mix_norm_backward_kernel(
    dtotal, dm, dy, total, skip, x0, gain, a, b, inverse, dx, dskip, dx0, partial, rows,
    stride_dtotal, stride_dm, stride_dy, stride_total, stride_skip, stride_x0, scale,
    WIDTH: tl.constexpr, REACHED: tl.constexpr, SKIPPED: tl.constexpr, LATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, PER_SM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    col = tl.arange(0, BLOCK)
    known = col < WIDTH
    of_x = tl.load(a + col, mask=known, other=0.0).to(tl.float32)[None, :]
    of_x0 = tl.load(b + col, mask=known, other=0.0).to(tl.float32)[None, :]
    total_a = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    total_b = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    if SKIPPED:
        of_skip = tl.load(gain + col, mask=known, other=0.0).to(tl.float32)[None, :]
        total_gain = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, BLOCK_ROWS), programs, num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = row < rows
        inside = live[:, None] & known[None, :]
        at = row[:, None] * WIDTH + col[None, :]
        first = tl.load(total + row[:, None] * stride_total + col[None, :], mask=inside, other=0.0)
        other = tl.load(x0 + row[:, None] * stride_x0 + col[None, :], mask=inside, other=0.0)
        g = tl.load(dy + row[:, None] * stride_dy + col[None, :], mask=inside, other=0.0)
        straight = tl.load(dm + row[:, None] * stride_dm + col[None, :], mask=inside, other=0.0)
        if REACHED:
            past = tl.load(dtotal + row[:, None] * stride_dtotal + col[None, :], mask=inside, other=0.0)
        if SKIPPED:
            old = tl.load(skip + row[:, None] * stride_skip + col[None, :], mask=inside, other=0.0)
        r = tl.load(inverse + row, mask=live, other=0.0)
        first, other = first.to(tl.float32), other.to(tl.float32)
        if SKIPPED and LATE:  # that sum was not written
            first += of_skip * old.to(tl.float32)
        # Recompute the mix, rounded as in forward: cheaper than reading it, and it need not be kept.
        mixed = (of_x * first + of_x0 * other).to(total.dtype.element_ty).to(tl.float32)
        unit = mixed * r[:, None]
        g = g.to(tl.float32)
        if not LATE:
            g *= scale
        back = g - unit * (tl.sum(g * unit, 1) / WIDTH)[:, None]
        if not LATE:
            back *= r[:, None]
        back += straight.to(tl.float32)
        total_a += back * first
        total_b += back * other
        tl.store(dx0 + at, (of_x0 * back).to(dx0.dtype.element_ty), mask=inside)
        back *= of_x
        if REACHED and not LATE:
            back += past.to(tl.float32)
        if SKIPPED:
            total_gain += back * old.to(tl.float32)
            tl.store(dskip + at, (of_skip * back).to(dskip.dtype.element_ty), mask=inside)
        if REACHED and LATE:  # it reached x, and not its sum with the skip
            back += past.to(tl.float32)
        tl.store(dx + at, back.to(dx.dtype.element_ty), mask=inside)
    tl.store(partial + program * WIDTH + col, tl.sum(total_a, 0), mask=known)
    tl.store(partial + (programs + program) * WIDTH + col, tl.sum(total_b, 0), mask=known)
    if SKIPPED:
        tl.store(partial + (2 * programs + program) * WIDTH + col, tl.sum(total_gain, 0), mask=known)


def _rows(x: Tensor | None) -> tuple[Tensor | None, int]:
    """A tensor as rows, and how far apart they are."""
    flat = None if x is None else as_rows(x)
    return flat, 0 if flat is None else flat.stride(0)


@operator(
    "mix_rms_norm",
    "(Tensor x, Tensor? addend, Tensor? skip, Tensor x0, Tensor? gain, Tensor a, Tensor b, float scale, float eps, "
    "bool late) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _mix_rms_norm(
    x: Tensor, addend: Tensor | None, skip: Tensor | None, x0: Tensor, gain: Tensor | None, a: Tensor, b: Tensor,
    scale: float, eps: float, late: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The sum (empty without an addend), the mix, its norm (empty if a later op applies it), and the reciprocal norms."""
    total = torch.empty(0 if addend is None else x.shape, dtype=x.dtype, device=x.device)
    m, y = (torch.empty(shape, dtype=x.dtype, device=x.device) for shape in (x.shape, (0,) if late else x.shape))
    inverse = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel():
        (flat, *others), strides = zip(*map(_rows, (x, addend, skip, x0)), strict=True)
        rows, width = flat.shape
        op = "mix_rms_norm" if addend is None and skip is None else "add_mix_rms_norm"
        launch, programs = choose_launch(op, width, rows, x.device, persistent=False)
        with on_device(x.device):
            _mix_norm_forward_kernel[(programs,)](
                flat, *others, *map(as_vector, (gain, a, b)), total, m, y, inverse, rows, *strides, scale, eps,
                WIDTH=width, ADDED=addend is not None, SKIPPED=skip is not None, LATE=late, **launch.kwargs(),
            )  # fmt: skip
    return total, m, y, inverse


@operator(
    "mix_rms_norm_backward",
    "(Tensor? dtotal, Tensor dm, Tensor dy, Tensor total, Tensor? skip, Tensor x0, Tensor? gain, Tensor a, Tensor b, "
    "Tensor inverse, float scale, bool late) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _mix_rms_norm_backward(
    dtotal: Tensor | None, dm: Tensor, dy: Tensor, total: Tensor, skip: Tensor | None, x0: Tensor, gain: Tensor | None,
    a: Tensor, b: Tensor, inverse: Tensor, scale: float, late: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of the sum, of the skip (empty without one) and of x0, and in float32 those of a, b and the gain.

    `late`: dy came back through a product whose rows were multiplied by the norm's factor (norm.py), and `total` does
    not include the skip.
    """
    dx, dx0 = (torch.empty(total.shape, dtype=total.dtype, device=total.device) for _ in range(2))
    dskip = torch.empty(0 if skip is None else total.shape, dtype=total.dtype, device=total.device)
    width, sums = total.shape[-1], 2 if skip is None else 3
    if not total.numel():
        return dx, dskip, dx0, torch.zeros(sums, width, dtype=torch.float32, device=total.device)
    flat, strides = zip(*map(_rows, (dtotal, dm, dy, total, skip, x0)), strict=True)
    rows = total.numel() // width
    op = "mix_rms_norm_backward" if skip is None else "skip_mix_rms_norm_backward"
    launch, programs = choose_launch(op, width, rows, total.device, persistent=True, read=flat)
    partial = torch.empty((sums, programs, width), dtype=torch.float32, device=total.device)
    with on_device(total.device):
        _mix_norm_backward_kernel[(programs,)](
            *flat, *map(as_vector, (gain, a, b)), inverse, dx, dskip, dx0, partial, rows, *strides, scale,
            WIDTH=width, REACHED=dtotal is not None, SKIPPED=skip is not None, LATE=late, **launch.kwargs(),
        )  # fmt: skip
    return dx, dskip, dx0, sum_lines(partial)


@fake(_mix_rms_norm)
def _(x: Tensor, addend: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, y = x.new_empty(0 if addend is None else x.shape), x.new_empty(0 if rest[-1] else x.shape)
    return total, x.new_empty(x.shape), y, x.new_empty(x.shape[:-1], dtype=torch.float32)


@fake(_mix_rms_norm_backward)
def _(
    dtotal: Tensor | None, dm: Tensor, dy: Tensor, total: Tensor, skip: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dskip = total.new_empty(0 if skip is None else total.shape)
    sums = total.new_empty((2 if skip is None else 3, total.shape[-1]), dtype=torch.float32)
    return total.new_empty(total.shape), dskip, total.new_empty(total.shape), sums


def _save_mix(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, addend, skip, x0, gain, a, b, ctx.scale, _, ctx.late = inputs
    ctx.added = addend is not None
    ctx.save_for_backward(output[0] if ctx.added else x, skip, x0, gain, a, b, output[3])
    ctx.set_materialize_grads(False)  # most sums have no other reader: write no zeros for their gradient


def _differentiate_mix(
    ctx: Any, dtotal: Tensor | None, dm: Tensor | None, dy: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    assert not ctx.late  # residual.py has the derivative of that, and of the product in between
    total, skip, x0, gain, a, b, inverse = ctx.saved_tensors
    dm, dy = (torch.zeros_like(total) if d is None else d for d in (dm, dy))
    dtotal = dtotal if ctx.added else None
    dx, dskip, dx0, sums = _mix_rms_norm_backward(
        dtotal, dm, dy, total, skip, x0, gain, a, b, inverse, ctx.scale, False
    )
    dgain = None if gain is None else sums[2].to(gain.dtype)
    return (
        dx, dx if ctx.added else None, None if skip is None else dskip, dx0,
        dgain, sums[0].to(a.dtype), sums[1].to(b.dtype), None, None, None,
    )  # fmt: skip


torch.library.register_autograd(_mix_rms_norm, _differentiate_mix, setup_context=_save_mix)
torch.library.register_autograd(_mix_rms_norm_backward, refuse_double_backward("mix_rms_norm"))


def mix_rms_norm(
    x: Tensor, x0: Tensor, a: Tensor, b: Tensor, scale: float = 1.0, eps: float = NORM_EPS
) -> tuple[Tensor, Tensor]:
    """The residual mix m = a*x + b*x0 (a, b per channel) and rms_norm(m, scale=scale), in one pass each way."""
    check_channels("mix_rms_norm", x, a=a, b=b)
    check_like("mix_rms_norm", x, x0=x0)
    if not takes_kernel(x, x0, a, b) or x.shape[-1] > MAX_WIDTH:
        return reference.mix_rms_norm(x, x0, a, b, scale, eps)
    _, m, y, _ = _mix_rms_norm(x, None, None, x0, None, a, b, scale, eps, False)
    return m, y


def add_mix_rms_norm(
    x: Tensor,
    y: Tensor,
    x0: Tensor,
    a: Tensor,
    b: Tensor,
    skip: Tensor | None = None,
    gain: Tensor | None = None,
    scale: float = 1.0,
    eps: float = NORM_EPS,
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual sum s = x + y + gain*skip (gain per channel; skip may be left out), then `mix_rms_norm` of it with x0:
    the sum, its mix and its norm, in one pass each way."""
    check_channels("add_mix_rms_norm", x, a=a, b=b, gain=gain)
    check_like("add_mix_rms_norm", x, y=y, x0=x0, **({} if skip is None else {"skip": skip}))
    if (skip is None) != (gain is None):
        given, missing = ("gain", "skip") if skip is None else ("skip", "gain")
        raise ParbankError(f"add_mix_rms_norm: {given} was given without {missing}; give both, or neither")
    if not takes_kernel(x, y, x0, a, b, skip, gain) or x.shape[-1] > MAX_WIDTH:
        return reference.add_mix_rms_norm(x, y, x0, a, b, skip, gain, scale, eps)
    total, m, normed, _ = _mix_rms_norm(x, y, skip, x0, gain, a, b, scale, eps, False)
    return total, m, normed
