"""The two halves of a block around their products, with as few passes over the residual stream as possible.

A block of a pre-norm transformer reads its stream, norms it, multiplies, and adds the output to the stream:

    m = a s + b x0                       the stream of the block (a, b per channel; s itself without a mix)
    q, k, v from norm(m);  y = attention(q, k, v);  x = m + y W_out
    s' = x + f(norm(x) W_up) W_down

Written op by op, each norm, mix and sum is a pass over (tokens, width). Here most of them disappear:

- Norms are never written. The product of a normed row is the row's product times a factor (norm.py). The rotation,
  and the activation in the epilogue, apply the factor.
- The product that makes an addend also adds it (product.py): it reads the stream and writes the next one.
- Backward, one pass adds the stream's own gradient, the gradient through the norm, and that of a skip.
- Attention returns the gradients of keys and values in parts. The rotation's backward adds them as it reads them.

Each half is an autograd.Function over several ops, not one op, so that it can return its input: an op must not return
its input, and a copy would be a pass.
"""

from typing import Any

import torch
from torch import Tensor

from parbank.errors import ParbankError
from parbank.ops import flash, reference
from parbank.ops.checks import as_rows, differentiate_once, same_device, takes_kernel
from parbank.ops.flash import causal_attention
from parbank.ops.mix import MAX_WIDTH, _mix_rms_norm, _mix_rms_norm_backward
from parbank.ops.mlp import _mlp_down_backward, _mlp_up, check_mlp, outer, takes_mlp
from parbank.ops.norm import _row_norms, _row_norms_backward, check_channels, check_like
from parbank.ops.product import _product as product
from parbank.ops.qkv import _split_qkv, _split_qkv_backward, check_projections
from parbank.ops.reference import NORM_EPS, PLAIN, BlockInput
from parbank.ops.rope import check_rotation, fits


def _times(x: Tensor, w: Tensor, c: Tensor | None = None) -> Tensor:
    """x w [+ c] over the last dimension of x (..., K) and w (K, N)."""
    rows = product(as_rows(x), w, None if c is None else as_rows(c))
    return rows.view(*x.shape[:-1], w.shape[1])


def _without_repeats(*tensors: Tensor | None) -> list[Tensor | None]:
    """A compiler accepts no tensor twice, but the first block's x is x0 itself and may be the skip. So repeated tensors
    become views."""
    distinct: list[Tensor | None] = []
    for x in tensors:
        again = x is not None and torch.compiler.is_compiling() and any(x is y for y in distinct)
        distinct.append(x.view_as(x) if again and x is not None else x)
    return distinct


# --- into attention ---------------------------------------------------------------------------------------------------


class _StreamQKV(torch.autograd.Function):
    """The stream and its queries, keys and values; or, with FlashAttention 3, the output of attention.

    A compiler writes and reads zeros for the gradients of unused outputs. So only requested outputs are returned: x
    (`return_x`), and the values beside attention's output (`with_values`).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, skip: Tensor | None, x0: Tensor | None, skip_gain: Tensor | None, a: Tensor | None,
        b: Tensor | None, w: Tensor, gain: Tensor | None, cos: Tensor, sin: Tensor, extra: Tensor | None,
        lengths: Tensor | None, window: int, heads: int, kv_heads: int, scale: float, eps: float, attends: bool,
        return_x: bool, with_values: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        if a is None or b is None or x0 is None:
            m, inverse = x, _row_norms(x, eps)
        else:
            _, m, _, inverse = _mix_rms_norm(x, None, skip, x0, skip_gain, a, b, scale, eps, True)
        row = _times(m, w.t())
        q, k, v = _split_qkv(row, heads, kv_heads, gain, cos, sin, inverse, extra, scale, eps)
        kept: tuple[Tensor | None, ...] = ()
        outputs: tuple[Tensor, ...] = (q, k, v)
        if attends:
            y, lse = flash._attention(q, k, v, lengths, window)
            kept, outputs = (q, k, v, y, lse, lengths), (y, v) if with_values else (y,)
        ctx.save_for_backward(x, m, skip, x0, skip_gain, a, b, w, gain, cos, sin, extra, inverse, row, *kept)
        ctx.sizes, ctx.mixed, ctx.return_x = (heads, kv_heads, scale, eps), a is not None, return_x
        ctx.attends, ctx.with_values, ctx.window = attends, with_values, window
        stream = m if ctx.mixed else x.view_as(x)
        return (*((x.view_as(x),) if return_x else ()), stream, *outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return differentiate_once("stream_qkv (or stream_attention)", _stream_qkv_backward, ctx, *grads)


def _stream_qkv_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    x, m, skip, x0, skip_gain, a, b, w, gain, cos, sin, extra, inverse, row, *kept = ctx.saved_tensors
    heads, kv_heads, scale, eps = ctx.sizes
    dtotal, (dm, *rest) = (grads[0], grads[1:]) if ctx.return_x else (None, grads)
    more = None
    if ctx.attends:
        dq, dk, dv = flash._backward(rest[0], *kept, ctx.window)
        more = rest[1] if ctx.with_values else None
    else:
        dq, dk, dv = rest[0], rest[1][None], rest[2][None]
    sizes = (heads, kv_heads, gain, cos, sin, inverse, extra, scale, eps)
    drow, dgain, dextra = _split_qkv_backward(dq, dk, dv, more, row, *sizes)
    dw = torch.mm(drow.flatten(0, 1).t(), m.flatten(0, 1)) if ctx.needs_input_grad[6] else None
    g = _times(drow, w)
    dskip = dx0 = da = db = dskip_gain = None
    if not ctx.mixed:
        dx = _row_norms_backward(dm, g, x, inverse)
    else:
        dx, dskip, dx0, sums = _mix_rms_norm_backward(dtotal, dm, g, x, skip, x0, skip_gain, a, b, inverse, scale, True)
        da, db = sums[0].to(a.dtype), sums[1].to(b.dtype)
        dskip, dskip_gain = (None, None) if skip is None else (dskip, sums[2].to(skip_gain.dtype))
    of_gain = None if gain is None else dgain.to(gain.dtype)
    of_extra = None if extra is None else dextra
    return dx, dskip, dx0, dskip_gain, da, db, dw, of_gain, None, None, of_extra, *[None] * 9


def _run_stream_qkv(
    op: str, x: Tensor, weights: tuple[Tensor, Tensor, Tensor], heads: int, gain: Tensor | None, cos: Tensor, sin: Tensor,
    block_input: BlockInput, to_attention: bool, with_values: bool, lengths: Tensor | None = None, window: int = 0,
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """Checks the arguments and calls `_StreamQKV`, always with x as the first result; None where the kernels do not apply.

    With `to_attention` it may still return queries, keys and values, where the attention library is missing or has no
    kernel for them.
    """
    (x0, a, b), (old, old_gain) = block_input.mix or (None, None, None), block_input.skip or (None, None)
    check_channels(op, x, a=a, b=b, gain=old_gain)
    check_like(op, x, **{name: y for name, y in (("x0", x0), ("skip", old)) if y is not None})
    check_projections(op, x, *weights, heads)
    width = weights[0].shape[0] // heads
    kv_heads = weights[1].shape[0] // width
    if to_attention and (kv_heads == 0 or heads % kv_heads):
        raise ParbankError(
            f"{op}: w_query {tuple(weights[0].shape)} makes {heads} heads and w_key {tuple(weights[1].shape)} a number that "
            "they cannot be shared out to; query heads must be a multiple of kv heads"
        )
    check_rotation(op, x.shape[1], heads, width, gain, cos, sin)
    everything = (x, x0, old, a, b, old_gain, *weights, gain, cos, sin, block_input.extra)
    same_device(op, *everything)
    _check_extra(op, x, block_input.extra, (*x.shape[:2], kv_heads, width))
    flash.check_limits(op, x, lengths, window)
    if not takes_kernel(*everything) or not fits(max(heads, 2 * kv_heads), width, cos, sin) or x.shape[-1] > MAX_WIDTH:
        return None
    return_x, total = block_input.return_x and a is not None, x
    if old is not None and old_gain is not None and a is None:
        x, old, old_gain = (x.float() + old_gain * old.float()).to(x.dtype), None, None
    attends = to_attention and flash.AVAILABLE and flash.fits(x.dtype, width) and x.numel() > 0
    tensors = _without_repeats(
        x, old, x0, old_gain, a, b, torch.cat(weights), gain, cos, sin, block_input.extra, lengths
    )
    outputs = _StreamQKV.apply(
        *tensors, window, heads, kv_heads, block_input.scale, block_input.eps, attends, return_x, with_values
    )
    if return_x:
        return outputs
    # Without a mix the stream is x: later readers read that, and its gradient is summed as well.
    return (outputs[0] if a is None and block_input.skip is None else total, *outputs)


def _check_extra(op: str, x: Tensor, extra: Tensor | None, shape: tuple[int, ...]) -> None:
    if extra is not None and (extra.shape != shape or extra.dtype != x.dtype):
        raise ParbankError(
            f"{op}: extra is {extra.dtype} {tuple(extra.shape)}; it is added to the values, {x.dtype} {shape}"
        )


def stream_qkv(
    x: Tensor,
    w_query: Tensor,
    w_key: Tensor,
    w_value: Tensor,
    heads: int,
    gain: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    block_input: BlockInput = PLAIN,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A block's way into attention: (x, m, q, k, v). m is the stream that `block_input` makes of x (B, T, width). Queries,
    keys and values are those of `qkv_norm_rope` on m's norm; the other arguments are those of `qkv_norm_rope`."""
    arguments = (x, (w_query, w_key, w_value), heads, gain, cos, sin, block_input)
    outputs = _run_stream_qkv("stream_qkv", *arguments, False, True)
    if outputs is None:
        return reference.stream_qkv(x, w_query, w_key, w_value, heads, gain, cos, sin, block_input)
    total, m, q, k, v = outputs
    return total, m, q, k, v


def stream_attention(
    x: Tensor,
    w_query: Tensor,
    w_key: Tensor,
    w_value: Tensor,
    heads: int,
    gain: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    block_input: BlockInput = PLAIN,
    with_values: bool = True,
    lengths: Tensor | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`stream_qkv`, then `causal_attention`, which explains `lengths` and `window`: (x, m, y, v) with y (B, T, heads, D).
    Without `with_values` v is None."""
    arguments = (x, (w_query, w_key, w_value), heads, gain, cos, sin, block_input)
    outputs = _run_stream_qkv("stream_attention", *arguments, True, with_values, lengths, window)
    if outputs is None:
        weights, limits = (w_query, w_key, w_value), (lengths, window)
        return reference.stream_attention(x, *weights, heads, gain, cos, sin, block_input, with_values, *limits)
    total, m, *rest = outputs
    if len(rest) == 3:
        q, k, v = rest
        return total, m, causal_attention(q, k, v, lengths, window), v if with_values else None
    return total, m, rest[0], rest[1] if with_values else None


# --- out of attention, and the MLP ------------------------------------------------------------------------------------


class _AddLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, c: Tensor, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return _times(x, w.t(), c)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        dw = outer(rows, x.reshape(rows.shape[0], x.shape[-1]), w) if ctx.needs_input_grad[2] else None
        return grad, _times(grad, w), dw


def add_linear(c: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """c + x W^T of c (..., outputs), x (..., inputs) and w (outputs, inputs). The product adds c and rounds once."""
    sound = w.dim() == 2 and x.dim() >= 1 and c.shape[:-1] == x.shape[:-1]
    if not sound or c.shape[-1] != w.shape[0] or x.shape[-1] != w.shape[1]:
        raise ParbankError(
            f"add_linear: c {tuple(c.shape)}, x {tuple(x.shape)} and w {tuple(w.shape)} do not fit; they must be "
            "(..., outputs), (..., inputs) and (outputs, inputs)"
        )
    if not c.dtype == x.dtype == w.dtype or not c.dtype.is_floating_point:
        raise ParbankError(
            f"add_linear: c is {c.dtype}, x {x.dtype} and w {w.dtype}; cast them to one floating type first"
        )
    same_device("add_linear", c, x, w)
    return _AddLinear.apply(*_without_repeats(c, x, w)) if takes_kernel(c, x, w) else reference.add_linear(c, x, w)


class _ResidualMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_up: Tensor, w_down: Tensor, slope: float, scale: float, eps: float) -> Tensor:
        inverse = _row_norms(x, eps)
        a, signs = _mlp_up(x, w_up, inverse, scale, slope)
        ctx.save_for_backward(x, w_up, w_down, inverse, a, signs)
        ctx.slope, ctx.scale = slope, scale
        return product(a, w_down.t(), as_rows(x)).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return differentiate_once("residual_mlp", _mlp_backward, ctx, grad)


def _mlp_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w_up, w_down, inverse, a, signs = ctx.saved_tensors
    rows, flat = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    du = _mlp_down_backward(rows, w_down, a, signs, inverse, ctx.scale, ctx.slope)
    dx = _row_norms_backward(grad, product(du, w_up, None).view(x.shape), x, inverse)
    dw_up = outer(du, flat, w_up) if ctx.needs_input_grad[1] else None
    dw_down = outer(rows, a, w_down) if ctx.needs_input_grad[2] else None
    return dx, dw_up, dw_down, None, None, None


def residual_mlp(
    x: Tensor, w_up: Tensor, w_down: Tensor, slope: float, scale: float = 1.0, eps: float = NORM_EPS
) -> Tensor:
    """x + mlp(scale * rms_norm(x)): a block's second half."""
    check_mlp("residual_mlp", x, w_up, w_down)
    if w_down.shape[0] != x.shape[-1]:
        raise ParbankError(
            f"residual_mlp: w_down {tuple(w_down.shape)} makes {w_down.shape[0]} channels, which are added to x's {x.shape[-1]}"
        )
    if not takes_mlp(x, w_up, w_down) or x.shape[-1] > MAX_WIDTH:
        return reference.residual_mlp(x, w_up, w_down, slope, scale, eps)
    return _ResidualMLP.apply(*_without_repeats(x, w_up, w_down), slope, scale, eps)
