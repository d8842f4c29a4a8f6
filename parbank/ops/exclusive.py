"""The projection of exclusive self-attention (Zhai 2026): removes from each head's output its component along the
token's own value.

With n = max(v.v, floor), c = y.v / n and f = dz.v / n, for the heads of one group (the heads that share v):

    z = y - c v,     dy = dz - f v,     dv = sum over the heads of  2 c f v - c dz - f y

The term with v comes from n and is absent where the floor holds. Forward and backward are one pass each. A program
takes some rows, each a token and a kv head, keeps v in registers, and loops over the heads of the group; so it has
the whole sum for dv. The loads of the next head are issued before a head's results are stored, because the compiler
moves no load over a store. Tensors are read in place; only the channels of a head must be contiguous.
"""

from typing import Any

import torch
from torch import Tensor

from parbank.errors import ParbankError
from parbank.gpu import on_device
from parbank.ops import configs, reference
from parbank.ops.backend import tl, triton
from parbank.ops.checks import (
    check_floating,
    fake,
    next_power_of_2,
    refuse_double_backward,
    same_device,
    takes_kernel,
    unit_channels,
)
from parbank.ops.configs import Launch
from parbank.ops.reference import VALUE_FLOOR
from parbank.ops.register import operator

MAX_WIDTH = 4096  # the most channels of a head that the tables below keep in registers; wider ones take the reference

# The size of these tables is a head's padded width; a tile is TILE elements of each operand, or one row. 8 to 16 elements a thread
# are 16-byte loads of each, and few enough registers that many programs wait on memory at once.
configs.register(
    "remove_own_value",
    sm80=[
        (512, Launch({"TILE": 1024}, num_warps=4, num_stages=1)),
        (MAX_WIDTH, Launch({"TILE": 4096}, num_warps=8, num_stages=1)),
    ],
)
configs.register(
    "remove_own_value_backward",
    sm80=[
        (512, Launch({"TILE": 1024}, num_warps=4, num_stages=1)),
        (MAX_WIDTH, Launch({"TILE": 4096}, num_warps=8, num_stages=1)),
    ],
)


@triton.jit
def _place(KV_HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Token and kv head of each row of this program's tile. There may be 2^31 rows, but never as many tokens."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = (first % KV_HEADS).to(tl.int32) + tl.arange(0, ROWS)
    return (first // KV_HEADS).to(tl.int32) + row // KV_HEADS, row % KV_HEADS


@triton.jit
def _start(token, head, time, stride_b, stride_t, stride_h):
    """Where a head of each token starts: a 64-bit offset, from a 32-bit division, since 64-bit division is slow."""
    within = (token % time).to(tl.int64) * stride_t + head.to(tl.int64) * stride_h
    return ((token // time).to(tl.int64) * stride_b + within)[:, None]


@triton.jit
def _remove_own_value_kernel(
    y, v, z, tokens, time, y_b, y_t, y_h, v_b, v_t, v_h, floor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token, kv_head = _place(KV_HEADS, ROWS)
    col = tl.arange(0, BLOCK_D)[None, :]
    inside = (token < tokens)[:, None] & (col < WIDTH)
    own = tl.load(v + _start(token, kv_head, time, v_b, v_t, v_h) + col, mask=inside, other=0.0).to(tl.float32)
    from_y = y + _start(token, kv_head * GROUP, time, y_b, y_t, y_h) + col
    to_z = z + ((token.to(tl.int64) * KV_HEADS + kv_head) * (GROUP * WIDTH))[:, None] + col
    following = tl.load(from_y, mask=inside, other=0.0)
    share = 1 / tl.maximum(tl.sum(own * own, 1), floor)
    for head in tl.static_range(GROUP):
        value = following.to(tl.float32)
        if head + 1 < GROUP:
            from_y += y_h
            following = tl.load(from_y, mask=inside, other=0.0)
        along = tl.sum(value * own, 1) * share
        tl.store(to_z, (value - along[:, None] * own).to(z.dtype.element_ty), mask=inside)
        to_z += WIDTH


@triton.jit
def _remove_own_value_backward_kernel(
    dz, y, v, dy, dv, tokens, time, dz_b, dz_t, dz_h, y_b, y_t, y_h, v_b, v_t, v_h, floor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, FOR_Y: tl.constexpr, FOR_V: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token, kv_head = _place(KV_HEADS, ROWS)
    col = tl.arange(0, BLOCK_D)[None, :]
    inside = (token < tokens)[:, None] & (col < WIDTH)
    own = tl.load(v + _start(token, kv_head, time, v_b, v_t, v_h) + col, mask=inside, other=0.0).to(tl.float32)
    from_dz = dz + _start(token, kv_head * GROUP, time, dz_b, dz_t, dz_h) + col
    from_y = y + _start(token, kv_head * GROUP, time, y_b, y_t, y_h) + col
    row = token.to(tl.int64) * KV_HEADS + kv_head
    to_dy = dy + (row * (GROUP * WIDTH))[:, None] + col
    next_grad = tl.load(from_dz, mask=inside, other=0.0)
    if FOR_V:
        next_value = tl.load(from_y, mask=inside, other=0.0)
        crossed = tl.zeros((ROWS, BLOCK_D), tl.float32)
        twice = tl.zeros((ROWS,), tl.float32)
    square = tl.sum(own * own, 1)
    share = 1 / tl.maximum(square, floor)
    for head in tl.static_range(GROUP):
        grad = next_grad.to(tl.float32)
        if head + 1 < GROUP:
            from_dz += dz_h
            next_grad = tl.load(from_dz, mask=inside, other=0.0)
        along_grad = tl.sum(grad * own, 1) * share
        if FOR_V:
            value = next_value.to(tl.float32)
            if head + 1 < GROUP:
                from_y += y_h
                next_value = tl.load(from_y, mask=inside, other=0.0)
            along = tl.sum(value * own, 1) * share
            crossed += along[:, None] * grad + along_grad[:, None] * value
            twice += 2 * along * along_grad
        if FOR_Y:
            tl.store(to_dy, (grad - along_grad[:, None] * own).to(dy.dtype.element_ty), mask=inside)
            to_dy += WIDTH
    if FOR_V:
        twice = tl.where(square >= floor, twice, 0.0)  # as torch.clamp differentiates
        out = twice[:, None] * own - crossed
        tl.store(dv + (row * WIDTH)[:, None] + col, out.to(dv.dtype.element_ty), mask=inside)


def _choose(op: str, y: Tensor, v: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """The grid, and the launch arguments besides the kernel's tensors and strides."""
    batch, time, kv_heads, width = v.shape
    block = next_power_of_2(width)
    launch = configs.choose(op, block, y.device)
    rows = max(1, launch.blocks["TILE"] // block)
    shape = {"KV_HEADS": kv_heads, "GROUP": y.shape[2] // kv_heads, "WIDTH": width, "ROWS": rows, "BLOCK_D": block}
    grid = (triton.cdiv(batch * time * kv_heads, rows),)
    return grid, {**shape, "num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.options}


@operator("remove_own_value", "(Tensor y, Tensor v) -> Tensor")
def _remove_own_value(y: Tensor, v: Tensor) -> Tensor:
    z = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if y.numel():
        y, v = unit_channels(y), unit_channels(v)
        batch, time = y.shape[:2]
        grid, kwargs = _choose("remove_own_value", y, v)
        with on_device(y.device):
            _remove_own_value_kernel[grid](
                y, v, z, batch * time, time, *y.stride()[:3], *v.stride()[:3], VALUE_FLOOR, **kwargs
            )  # fmt: skip
    return z


@operator(
    "remove_own_value_backward",
    "(Tensor dz, Tensor y, Tensor v, bool for_y, bool for_v) -> (Tensor, Tensor)",
)
def _remove_own_value_backward(dz: Tensor, y: Tensor, v: Tensor, for_y: bool, for_v: bool) -> tuple[Tensor, Tensor]:
    """dy and dv. A gradient that is not requested is empty."""
    dy = torch.empty(y.shape if for_y else 0, dtype=y.dtype, device=y.device)
    if not y.numel():
        return dy, torch.zeros(v.shape if for_v else 0, dtype=v.dtype, device=v.device)
    dv = torch.empty(v.shape if for_v else 0, dtype=v.dtype, device=v.device)
    dz, y, v = unit_channels(dz), unit_channels(y), unit_channels(v)
    batch, time = y.shape[:2]
    grid, kwargs = _choose("remove_own_value_backward", y, v)
    with on_device(y.device):
        _remove_own_value_backward_kernel[grid](
            dz, y, v, dy, dv, batch * time, time, *dz.stride()[:3], *y.stride()[:3], *v.stride()[:3], VALUE_FLOOR,
            FOR_Y=for_y, FOR_V=for_v, **kwargs,
        )  # fmt: skip
    return dy, dv


@fake(_remove_own_value)
def _(y: Tensor, v: Tensor) -> Tensor:
    return y.new_empty(y.shape)


@fake(_remove_own_value_backward)
def _(dz: Tensor, y: Tensor, v: Tensor, for_y: bool, for_v: bool) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape if for_y else 0), v.new_empty(v.shape if for_v else 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dz: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    for_y, for_v = ctx.needs_input_grad
    if dz is None:
        return None, None
    dy, dv = _remove_own_value_backward(dz, *ctx.saved_tensors, for_y, for_v)
    return dy if for_y else None, dv if for_v else None


torch.library.register_autograd(_remove_own_value, _differentiate, setup_context=_save)
torch.library.register_autograd(_remove_own_value_backward, refuse_double_backward("remove_own_value"))


def remove_own_value(y: Tensor, v: Tensor) -> Tensor:
    """y - (y.v / v.v) v per token and head, in one pass each way: exclusive self-attention. A zero value removes
    nothing.

    y (B, T, heads, D) and v (B, T, kv_heads, D), heads grouped as in attention. Both may be views with gaps.
    """
    _check(y, v)
    if not takes_kernel(y, v) or y.shape[-1] > MAX_WIDTH:
        return reference.remove_own_value(y, v)
    return _remove_own_value(y, v)


def _check(y: Tensor, v: Tensor) -> None:
    agree = y.dim() == v.dim() == 4 and y.shape[:2] == v.shape[:2] and y.shape[3] == v.shape[3] and y.dtype == v.dtype
    if not agree or v.shape[2] == 0 or y.shape[2] % v.shape[2]:
        raise ParbankError(
            f"remove_own_value: y is {y.dtype} {tuple(y.shape)} and v {v.dtype} {tuple(v.shape)}; they must be (B, T, heads, D) "
            "and (B, T, kv_heads, D) of one dtype, heads a multiple of kv_heads"
        )
    check_floating("remove_own_value", y=y, v=v)
    same_device("remove_own_value", y, v)
