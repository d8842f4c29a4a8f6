"""Per-head RMS norm of queries and keys, partial rotation (RoPE, Su et al. 2021), and a gain per query head: one pass
each way.

With n = x * r (r the reciprocal norm of a head's channels) and R the rotation, y = gain * R n. R is orthogonal, so
with e = R^T dy

    dx = r * gain * (e - n * mean(e * n)),     dgain[h] = sum over batch and time of e . n

and both need one sum per row, e . n. The kernel reads its row a second time through each channel's partner in the
rotation. The second read hits the cache, and no data moves between threads. Inputs are read in place: q and k may be
views of one product, and gradients may come transposed from attention. Only the channels of a head must be
contiguous.

A tile is BLOCK_T tokens by all heads (padded to a power of two). So a row of the tile is the same head in every
iteration, and the gain's gradient stays in registers. Each program writes one float32 line, and a second pass adds
the lines in a fixed order.

The last PASSED heads of a tile are copied to their own tensor: values that lie beside their keys, with `extra` added.

A row may still lack its norm (residual.py). Then each head is multiplied by the token's factor when it is read, and
its gradient when it is written. Gradients may come in parts, as attention makes them; they are summed when they are
read.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parbank.errors import ParbankError
from parbank.gpu import on_device
from parbank.ops import configs, reference
from parbank.ops.backend import tl, triton
from parbank.ops.checks import (
    as_vector,
    check_floating,
    fake,
    next_power_of_2,
    persistent_programs,
    refuse_double_backward,
    same_device,
    takes_kernel,
    unit_channels,
)
from parbank.ops.configs import Launch
from parbank.ops.reference import NORM_EPS
from parbank.ops.register import operator
from parbank.ops.sums import sum_lines

MAX_TILE = 4096  # heads times channels (both rounded up) that one tile holds, at least one token of them


# The size of these tables is the padded row of one token, heads times channels; a tile is TILE elements or one token.
# Backward, 8 to 16 elements a thread keep registers low enough for 36 to 48 resident warps a multiprocessor. Forward, one warp with
# 32 elements a thread is faster: it sums a head without other warps.
configs.register(
    "qk_norm_rope",
    sm80=[
        (1024, Launch({"TILE": 1024}, num_warps=1, num_stages=1)),
        (MAX_TILE, Launch({"TILE": 4096}, num_warps=8, num_stages=1)),
    ],
)
configs.register(
    "qk_norm_rope_backward",
    sm80=[
        (512, Launch({"TILE": 512, "PER_SM": 24}, num_warps=2, num_stages=1)),
        (MAX_TILE, Launch({"TILE": 2048, "PER_SM": 5}, num_warps=8, num_stages=1)),
    ],
)
# Keys and values with gradients in parts: more registers, so fewer programs fit.
configs.register(
    "qk_norm_rope_parts_backward",
    sm80=[
        (512, Launch({"TILE": 512, "PER_SM": 18}, num_warps=2, num_stages=1)),
        (MAX_TILE, Launch({"TILE": 2048, "PER_SM": 4}, num_warps=8, num_stages=1)),
    ],
)


@triton.jit
def _offset(token, time, head, stride_b, stride_t, stride_h):
    """Where a head starts: a 64-bit offset from a 32-bit division. There are never 2^31 tokens, and 64-bit division is
    slow."""
    return (
        (token // time).to(tl.int64) * stride_b + (token % time).to(tl.int64) * stride_t + head.to(tl.int64) * stride_h
    )


@triton.jit
def _rotation(cos, sin, time, col, live, HALF: tl.constexpr):
    """Factors of a channel and of its partner: y[c] = x[c] * own + x[partner(c)] * across."""
    turned = live[:, None] & (col < 2 * HALF)[None, :]
    at = time[:, None] * HALF + (col % HALF)[None, :]
    own = tl.load(cos + at, mask=turned, other=1.0).to(tl.float32)
    across = tl.load(sin + at, mask=turned, other=0.0).to(tl.float32)
    return own, tl.where((col < HALF)[None, :], across, -across)


@triton.jit
def _partner(col, HALF: tl.constexpr, VECTOR: tl.constexpr):
    """The partner of each channel in the rotation. Runs of VECTOR channels stay contiguous, which the compiler cannot
    infer."""
    return tl.max_contiguous(tl.multiple_of(tl.where(col < HALF, col + HALF, col - HALF), VECTOR), VECTOR)


@triton.jit
def _rope_forward_kernel(
    x, gain, cos, sin, inverse, extra, y, passed, tokens, time, stride_b, stride_t, stride_h, scale, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, HAS_GAIN: tl.constexpr, PASSED: tl.constexpr,
    FACTORED: tl.constexpr, HAS_EXTRA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    head = row % BLOCK_H
    token = tl.program_id(0) * BLOCK_T + row // BLOCK_H
    col = tl.arange(0, BLOCK_D)
    live = (token < tokens) & (head < HEADS)
    inside = live[:, None] & (col < WIDTH)[None, :]
    start = x + _offset(token, time, head, stride_b, stride_t, stride_h)
    value = tl.load(start[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
    if FACTORED:
        factor = tl.load(inverse + token, mask=live, other=0.0) * scale
        value *= factor[:, None]
    r = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
    out = value
    if HALF > 0:
        other = tl.load(
            start[:, None] + _partner(col, HALF, VECTOR)[None, :], mask=inside & (col < 2 * HALF)[None, :], other=0.0
        ).to(tl.float32)
        if FACTORED:
            other *= factor[:, None]
        own, across = _rotation(cos, sin, token % time, col, live, HALF)
        out = value * own + other * across
    if HAS_GAIN:
        r *= tl.load(gain + head, mask=live, other=0.0).to(tl.float32)
    kept = head < HEADS - PASSED
    at = (token.to(tl.int64) * (HEADS - PASSED) + head)[:, None] * WIDTH + col[None, :]
    tl.store(y + at, (out * r[:, None]).to(y.dtype.element_ty), mask=inside & kept[:, None])
    if PASSED > 0:
        at = (token.to(tl.int64) * PASSED + (head - (HEADS - PASSED)))[:, None] * WIDTH + col[None, :]
        if HAS_EXTRA:
            value += tl.load(extra + at, mask=inside & ~kept[:, None], other=0.0).to(tl.float32)
        tl.store(passed + at, value.to(passed.dtype.element_ty), mask=inside & ~kept[:, None])


@triton.jit
def _add_up(start, at, mask, step, PARTS: tl.constexpr):
    """The sum of PARTS tensors, `step` apart."""
    total = tl.load(start + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(start + part * tl.cast(step, tl.int64) + at, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _rope_backward_kernel(
    dy, dpassed, more, x, gain, cos, sin, inverse, dx, dextra, partial, tokens, time,
    dy_p, dy_b, dy_t, dy_h, dp_p, dp_b, dp_t, dp_h, more_b, more_t, more_h, x_b, x_t, x_h, dx_b, dx_t, dx_h, scale, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, HAS_GAIN: tl.constexpr, PASSED: tl.constexpr,
    FACTORED: tl.constexpr, PARTS: tl.constexpr, HAS_MORE: tl.constexpr, HAS_EXTRA: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    head = row % BLOCK_H
    col = tl.arange(0, BLOCK_D)
    of_gain = tl.full((BLOCK_T * BLOCK_H,), 1.0, tl.float32)
    if HAS_GAIN:
        of_gain = tl.load(gain + head, mask=head < HEADS, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_T * BLOCK_H,), tl.float32)
    kept = head < HEADS - PASSED
    for tile in range(tl.program_id(0), tl.cdiv(tokens, BLOCK_T), tl.num_programs(0)):
        token = tile * BLOCK_T + row // BLOCK_H
        live = (token < tokens) & (head < HEADS)
        known = live[:, None] & (col < WIDTH)[None, :]
        inside = known & kept[:, None]
        from_x = x + _offset(token, time, head, x_b, x_t, x_h)
        from_dy = (dy + _offset(token, time, head, dy_b, dy_t, dy_h))[:, None]
        value = tl.load(from_x[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
        if FACTORED:
            factor = tl.load(inverse + token, mask=live, other=0.0) * scale
            value *= factor[:, None]
        back = _add_up(from_dy, col[None, :], inside, dy_p, PARTS)
        if HALF > 0:
            turned = inside & (col < 2 * HALF)[None, :]
            other = _add_up(from_dy, _partner(col, HALF, VECTOR)[None, :], turned, dy_p, PARTS)
            own, across = _rotation(cos, sin, token % time, col, live, HALF)
            back = back * own - other * across  # R^T: the other way round
        r = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
        unit = value * r[:, None]
        along = tl.sum(back * unit, 1)
        total += along
        out = (r * of_gain)[:, None] * (back - unit * (along / WIDTH)[:, None])
        if PASSED > 0:
            own_head = head - (HEADS - PASSED)
            beside = known & ~kept[:, None]
            from_passed = (dpassed + _offset(token, time, own_head, dp_b, dp_t, dp_h))[:, None]
            straight = _add_up(from_passed, col[None, :], beside, dp_p, PARTS)
            if HAS_MORE:
                from_more = more + _offset(token, time, own_head, more_b, more_t, more_h)
                straight += tl.load(from_more[:, None] + col[None, :], mask=beside, other=0.0).to(tl.float32)
            if HAS_EXTRA:
                at = (token.to(tl.int64) * PASSED + own_head)[:, None] * WIDTH + col[None, :]
                tl.store(dextra + at, straight.to(dextra.dtype.element_ty), mask=beside)
            out = tl.where(kept[:, None], out, straight)
        if FACTORED:
            out *= factor[:, None]
        to_dx = dx + _offset(token, time, head, dx_b, dx_t, dx_h)
        tl.store(to_dx[:, None] + col[None, :], out.to(dx.dtype.element_ty), mask=known)
    if HAS_GAIN:
        tl.store(partial + tl.program_id(0) * BLOCK_T * BLOCK_H + row, total)


def _tile(launch: Launch, x: Tensor, half: int) -> dict[str, Any]:
    """The constexprs of a tile: as many tokens as make up the config's TILE elements, at least one."""
    heads, width = x.shape[2:]
    block_h, block_d = next_power_of_2(heads), next_power_of_2(width)
    return {
        "HEADS": heads,
        "WIDTH": width,
        "HALF": half,
        "BLOCK_T": max(1, launch.blocks["TILE"] // (block_h * block_d)),
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
        "VECTOR": min(half & -half, 16) or 1,  # the power of two in the half: runs of that many channels move together
    }


@dataclass(frozen=True)
class HeadFactors:
    """The factors that multiply the heads of each token: scale * inverse, inverse (tokens,) in float32."""

    inverse: Tensor
    scale: float


def rotate_one(
    x: Tensor,
    gain: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    passed: int = 0,
    factors: HeadFactors | None = None,
    extra: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The normed and rotated heads of x (B, T, H, D), and its last `passed` heads unchanged, plus `extra`."""
    batch, time, heads, width = x.shape
    y, rest = (torch.empty((batch, time, n, width), dtype=x.dtype, device=x.device) for n in (heads - passed, passed))
    if not x.numel():
        return y, rest
    x = unit_channels(x)
    inverse, scale = (None, 1.0) if factors is None else (factors.inverse, factors.scale)
    launch = configs.choose("qk_norm_rope", next_power_of_2(heads) * next_power_of_2(width), x.device)
    tile = _tile(launch, x, cos.shape[-1])
    with on_device(x.device):
        _rope_forward_kernel[(triton.cdiv(batch * time, tile["BLOCK_T"]),)](
            x, as_vector(gain), cos, sin, inverse, as_vector(extra), y, rest, batch * time, time, *x.stride()[:3], scale, eps,
            HAS_GAIN=gain is not None, PASSED=passed, FACTORED=factors is not None, HAS_EXTRA=extra is not None,
            **tile, num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip
    return y, rest


def rotate_one_back(
    dy: Tensor,
    x: Tensor,
    dx: Tensor,
    gain: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    dpassed: Tensor | None = None,
    more: Tensor | None = None,
    factors: HeadFactors | None = None,
    dextra: Tensor | None = None,
) -> Tensor:
    """Writes dx, which may be a view with contiguous channels. Returns the gain's gradient (empty without one).

    dy (parts, B, T, H, D) is summed over its parts. `dpassed` is likewise the gradient of the last heads of x, where
    some were passed on, and `more` (B, T, H, D) one more part of it. Their sum is written to `dextra` where one is
    given.
    """
    heads = x.shape[2] if gain is not None else 0
    if not x.numel():
        return torch.zeros(heads, dtype=torch.float32, device=x.device)
    x, dy = unit_channels(x), unit_channels(dy)
    rest = dy if dpassed is None else unit_channels(dpassed)
    last = x if more is None else unit_channels(more)
    batch, time = x.shape[:2]
    size = next_power_of_2(x.shape[2]) * next_power_of_2(x.shape[3])
    op = "qk_norm_rope_backward" if len(dy) == 1 else "qk_norm_rope_parts_backward"
    launch = configs.choose(op, size, x.device)
    tile = _tile(launch, x, cos.shape[-1])
    tiles = -(-batch * time // tile["BLOCK_T"])
    programs = persistent_programs(x.device, launch.blocks["PER_SM"], tiles)
    lines = tile["BLOCK_T"] * tile["BLOCK_H"]
    partial = torch.empty((programs, lines) if heads else 0, dtype=torch.float32, device=x.device)
    inverse, scale = (None, 1.0) if factors is None else (factors.inverse, factors.scale)
    with on_device(x.device):
        _rope_backward_kernel[(programs,)](
            dy, rest, last, x, as_vector(gain), cos, sin, inverse, dx, dextra, partial,
            batch * time, time,
            *dy.stride()[:4], *rest.stride()[:4], *last.stride()[:3], *x.stride()[:3], *dx.stride()[:3],
            scale, eps,
            HAS_GAIN=gain is not None, PASSED=0 if dpassed is None else dpassed.shape[3], FACTORED=factors is not None,
            PARTS=len(dy), HAS_MORE=more is not None, HAS_EXTRA=dextra is not None, **tile,
            num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip
    return sum_lines(partial.view(1, -1, tile["BLOCK_H"]))[0, :heads].clone() if heads else partial


_SCHEMA = "Tensor q, Tensor k, Tensor? gain, Tensor cos, Tensor sin, float eps"


@operator("qk_norm_rope", f"({_SCHEMA}) -> (Tensor, Tensor)")
def _qk_norm_rope(
    q: Tensor, k: Tensor, gain: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.contiguous(), sin.contiguous()
    return rotate_one(q, gain, cos, sin, eps)[0], rotate_one(k, None, cos, sin, eps)[0]


@operator(
    "qk_norm_rope_backward",
    f"(Tensor dq, Tensor dk, {_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def _qk_norm_rope_backward(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, gain: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q and k, and of the gain in float32 (empty without one)."""
    cos, sin = cos.contiguous(), sin.contiguous()
    back_q, back_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    dgain = rotate_one_back(dq[None], q, back_q, gain, cos, sin, eps)
    rotate_one_back(dk[None], k, back_k, None, cos, sin, eps)
    return back_q, back_k, dgain


@fake(_qk_norm_rope)
def _(q: Tensor, k: Tensor, gain: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@fake(_qk_norm_rope_backward)
def _(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, gain: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    heads = 0 if gain is None else q.shape[2]
    return q.new_empty(q.shape), k.new_empty(k.shape), q.new_empty(heads, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, gain, cos, sin, ctx.eps = inputs
    ctx.save_for_backward(q, k, gain, cos, sin)


def _differentiate(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    q, k, gain, cos, sin = ctx.saved_tensors
    back_q, back_k, dgain = _qk_norm_rope_backward(dq, dk, q, k, gain, cos, sin, ctx.eps)
    return back_q, back_k, None if gain is None else dgain.to(gain.dtype), None, None, None


torch.library.register_autograd(_qk_norm_rope, _differentiate, setup_context=_save)
torch.library.register_autograd(_qk_norm_rope_backward, refuse_double_backward("qk_norm_rope"))


def qk_norm_rope(
    q: Tensor, k: Tensor, gain: Tensor | None, cos: Tensor, sin: Tensor, eps: float = NORM_EPS
) -> tuple[Tensor, Tensor]:
    """RMS norm over each head's channels, partial rotation, and a gain per query head, in one pass each way.

    q (B, T, H, D), k (B, T, KV, D), gain (H,), cos and sin (T, rope_dims / 2), which get no gradient from the kernel.
    """
    _check(q, k, gain, cos, sin)
    if not takes_kernel(q, k, gain, cos, sin) or not fits(q.shape[2], q.shape[3], cos, sin):
        return reference.qk_norm_rope(q, k, gain, cos, sin, eps)
    return _qk_norm_rope(q, k, gain, cos, sin, eps)


def fits(heads: int, width: int, cos: Tensor, sin: Tensor) -> bool:
    """Whether a token's heads fit into a tile, and the tables need no gradients."""
    needs_table_grad = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    return next_power_of_2(heads) * next_power_of_2(width) <= MAX_TILE and not needs_table_grad


def _check(q: Tensor, k: Tensor, gain: Tensor | None, cos: Tensor, sin: Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or q.dtype != k.dtype:
        raise ParbankError(
            f"qk_norm_rope: q is {q.dtype} {tuple(q.shape)} and k {k.dtype} {tuple(k.shape)}; they must be (B, T, H, D) and "
            "(B, T, KV, D) of one dtype"
        )
    check_floating("qk_norm_rope", q=q, k=k)
    check_rotation("qk_norm_rope", q.shape[1], q.shape[2], q.shape[3], gain, cos, sin)
    same_device("qk_norm_rope", q, k, gain, cos, sin)


def check_rotation(op: str, time: int, heads: int, width: int, gain: Tensor | None, cos: Tensor, sin: Tensor) -> None:
    """Checks gain and tables for `heads` query heads of `width` channels; the kernel reads as many values as these
    shapes give."""
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] != time or 2 * cos.shape[1] > width:
        raise ParbankError(
            f"{op}: cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}; both must be (T, rope_dims / 2), here "
            f"({time}, at most {width // 2})"
        )
    if gain is not None and (gain.dim() != 1 or gain.shape[0] != heads):
        raise ParbankError(f"{op}: gain is {tuple(gain.shape)}; it must have one value per query head, ({heads},)")
    check_floating(op, gain=gain, cos=cos, sin=sin)
