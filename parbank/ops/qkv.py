"""Queries, keys and values of a layer: one product for all three, then norm and rotation in place, and one gradient.

Three products read their input three times, and the two narrow ones leave half of the tensor cores idle. Backward,
three gradients of that input must be added. Here the three weights are concatenated (a copy of a megabyte). One
product makes all heads of a token in one row, and the kernels of `rope.py` read queries and keys from that row.
Backward, they write into one row next to the gradient of the values, and one product continues from there.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parbank.errors import ParbankError
from parbank.ops import reference
from parbank.ops.checks import fake, refuse_double_backward, same_device, takes_kernel
from parbank.ops.reference import NORM_EPS
from parbank.ops.register import operator
from parbank.ops.rope import HeadFactors, check_rotation, fits, rotate_one, rotate_one_back

_SCHEMA = (
    "Tensor row, SymInt heads, SymInt kv_heads, Tensor? gain, Tensor cos, Tensor sin, Tensor? inverse, Tensor? extra, "
    "float scale, float eps"
)


def _parts(row: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Views (B, T, heads, D) of the queries, and of keys and values side by side, in (B, T, (heads + 2 kv_heads) D)."""
    batch, time, width = row.shape
    every = heads + 2 * kv_heads
    queries, rest = row.view(batch, time, every, width // every).split([heads, 2 * kv_heads], dim=2)
    return queries, rest


def _factors(inverse: Tensor | None, scale: float) -> HeadFactors | None:
    return None if inverse is None else HeadFactors(inverse.contiguous(), scale)


@operator("split_qkv_norm_rope", f"({_SCHEMA}) -> (Tensor, Tensor, Tensor)")
def _split_qkv(
    row: Tensor, heads: int, kv_heads: int, gain: Tensor | None, cos: Tensor, sin: Tensor, inverse: Tensor | None,
    extra: Tensor | None, scale: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`inverse` (B, T), times scale, multiplies each token's row: the norm that was not applied before. `extra` is added
    to the values."""
    queries, rest = _parts(row.contiguous(), heads, kv_heads)
    cos, sin = cos.contiguous(), sin.contiguous()
    factors = _factors(inverse, scale)
    # Values are copied, because an op must not return a view of its input.
    k, v = rotate_one(rest, None, cos, sin, eps, kv_heads, factors, extra)
    return rotate_one(queries, gain, cos, sin, eps, 0, factors)[0], k, v


@operator(
    "split_qkv_norm_rope_backward",
    f"(Tensor dq, Tensor dk, Tensor dv, Tensor? more, {_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def _split_qkv_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, more: Tensor | None, row: Tensor, heads: int, kv_heads: int, gain: Tensor | None,
    cos: Tensor, sin: Tensor, inverse: Tensor | None, extra: Tensor | None, scale: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of the row, of the gain in float32 (empty without one) and of `extra` (likewise).

    dk and dv (parts, B, T, kv_heads, D) are summed over their parts; `more` is one more part of dv.
    """
    queries, rest = _parts(row.contiguous(), heads, kv_heads)
    back = torch.empty(row.shape, dtype=row.dtype, device=row.device)
    back_queries, back_rest = _parts(back, heads, kv_heads)
    cos, sin = cos.contiguous(), sin.contiguous()
    dextra = None if extra is None else torch.empty(extra.shape, dtype=extra.dtype, device=extra.device)
    factors = _factors(inverse, scale)
    dgain = rotate_one_back(dq[None], queries, back_queries, gain, cos, sin, eps, factors=factors)
    rotate_one_back(dk, rest, back_rest, None, cos, sin, eps, dv, more, factors, dextra)
    return back, dgain, row.new_empty(0) if dextra is None else dextra


@fake(_split_qkv)
def _(row: Tensor, heads: int, kv_heads: int, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, time, width = row.shape
    width //= heads + 2 * kv_heads
    q, k, v = (row.new_empty((batch, time, n, width)) for n in (heads, kv_heads, kv_heads))
    return q, k, v


@fake(_split_qkv_backward)
def _(
    dq: Tensor, dk: Tensor, dv: Tensor, more: Tensor | None, row: Tensor, heads: int, kv_heads: int, gain: Tensor | None,
    cos: Tensor, sin: Tensor, inverse: Tensor | None, extra: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dextra = row.new_empty(0) if extra is None else extra.new_empty(extra.shape)
    return row.new_empty(row.shape), row.new_empty(0 if gain is None else heads, dtype=torch.float32), dextra


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    row, ctx.heads, ctx.kv_heads, gain, cos, sin, _, _, _, ctx.eps = inputs
    ctx.save_for_backward(row, gain, cos, sin)


def _differentiate(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    """For a row whose norm is applied already. residual.py covers the other case, with the norm's gradient."""
    row, gain, cos, sin = ctx.saved_tensors
    rest = (row, ctx.heads, ctx.kv_heads, gain, cos, sin, None, None, 1.0, ctx.eps)
    back, dgain, _ = _split_qkv_backward(dq, dk[None], dv[None], None, *rest)
    return back, None, None, None if gain is None else dgain.to(gain.dtype), *[None] * 6


torch.library.register_autograd(_split_qkv, _differentiate, setup_context=_save)
torch.library.register_autograd(_split_qkv_backward, refuse_double_backward("qkv_norm_rope"))


def qkv_norm_rope(
    x: Tensor,
    w_query: Tensor,
    w_key: Tensor,
    w_value: Tensor,
    heads: int,
    gain: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float = NORM_EPS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, T, heads, D), keys and values (B, T, KV, D) of x (B, T, width): three products, then `qk_norm_rope`.

    w_query (heads D, width), w_key and w_value (KV D, width); gain, cos and sin as in `qk_norm_rope`.
    """
    check_projections("qkv_norm_rope", x, w_query, w_key, w_value, heads)
    width = w_query.shape[0] // heads
    check_rotation("qkv_norm_rope", x.shape[1], heads, width, gain, cos, sin)
    same_device("qkv_norm_rope", x, w_query, w_key, w_value, gain, cos, sin)
    if not takes_kernel(x, w_query, w_key, w_value, gain, cos, sin) or not fits(
        max(heads, 2 * w_key.shape[0] // width), width, cos, sin
    ):
        return reference.qkv_norm_rope(x, w_query, w_key, w_value, heads, gain, cos, sin, eps)
    row = F.linear(x, torch.cat([w_query, w_key, w_value]))
    return _split_qkv(row, heads, w_key.shape[0] // width, gain, cos, sin, None, None, 1.0, eps)


def check_projections(op: str, x: Tensor, w_query: Tensor, w_key: Tensor, w_value: Tensor, heads: int) -> None:
    weights = (w_query, w_key, w_value)
    sound = x.dim() == 3 and all(w.dim() == 2 and w.shape[1] == x.shape[2] for w in weights)
    sound = sound and heads >= 1 and w_query.shape[0] >= heads and w_query.shape[0] % heads == 0
    sound = sound and w_key.shape == w_value.shape and w_key.shape[0] % (w_query.shape[0] // heads) == 0
    if not sound:
        raise ParbankError(
            f"{op}: x is {tuple(x.shape)}, the weights {', '.join(str(tuple(w.shape)) for w in weights)}, with {heads} "
            "query heads; x must be (B, T, width), the weights (heads D, width), (KV D, width) and (KV D, width)"
        )
    if any(w.dtype != x.dtype for w in weights) or not x.dtype.is_floating_point:
        raise ParbankError(
            f"{op}: x is {x.dtype} and the weights {', '.join(str(w.dtype) for w in weights)}; cast them to one "
            "floating type first"
        )
