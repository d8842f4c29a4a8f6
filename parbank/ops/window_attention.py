"""Attention over a running text, forward only: every query sees the last `window` keys, carried or new.

Keys and values come as two tensors, the carried ones and those of the segment, so that no copy joins them. A key's
position is that of its token in the segment; carried keys have negative positions. Query i has position i and sees
max(i - window + 1, low[i] - carried) .. i. Blocks of keys begin at multiples of BLOCK_N, so no block mixes both
kinds.

A program takes a tile of queries of one key head through the carried keys, which few tiles see, and then through the
segment's: the left edge of the window, the middle, which every query of the tile sees whole without a mask, and the
diagonal. The largest of the tile's lower ends decides where the middle begins. A document that starts inside the tile
moves it, and blocks before every query's lower end are never read.

The softmax is online (Milakov and Gimelshein 2018), in base 2: with t = scale * log2(e) and m the largest score so
far times t, p = 2^(t s - m) is one fused multiply-add and one exponential. Sums and the output are float32. p is
rounded to the values' type for its product, as in FlashAttention.

Heads that share a key head may be stacked in one tile (STACK). A tile with as many rows then spans fewer tokens, and
so fewer keys that only some of its rows see.
"""

import dataclasses
import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from parbank.errors import ParbankError
from parbank.gpu import on_device
from parbank.ops import backend, configs, reference
from parbank.ops.backend import TensorDescriptor, tl, triton
from parbank.ops.checks import check_floating, fake, near, same_device, takes_kernel, unit_channels
from parbank.ops.configs import ANY, Launch
from parbank.ops.register import operator

LOW_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
WIDTHS = (16, 32, 64, 128)
"""Head widths that the kernel takes: sizes of a tensor core product. Other widths take the reference."""


def launch_config(
    m: int, n: int, warps: int, stages: int, *, stack: bool = False, tma: bool = False, **options: int
) -> Launch:
    """m rows of queries by n keys; stack: see above; tma: keys and values through descriptors; options: further ones of the
    launch, such as maxnreg."""
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "STACK": stack, "TMA": tma}
    return Launch(blocks, num_warps=warps, num_stages=stages, options=options)


# The size of these tables is the width of a head.
configs.register(
    "window_attention",
    sm80=[(64, launch_config(128, 64, 4, 3)), (ANY, launch_config(128, 32, 8, 2))],
    # 168 registers a thread let three programs of four warps share a multiprocessor: one takes exponentials while another
    # multiplies
    sm90=[
        (64, launch_config(64, 128, 4, 2, stack=True, tma=True, maxnreg=168)),
        (ANY, launch_config(128, 128, 8, 3, stack=True, tma=True)),
    ],
    # not timed; compiled for 10.0 the rows above spill and these do not
    sm100=[
        (64, launch_config(128, 64, 8, 3, stack=True, tma=True)),
        (ANY, launch_config(128, 128, 8, 2, stack=True, tma=True)),
    ],
)
configs.register("window_attention_float32", sm80=[(ANY, launch_config(16, 16, 4, 1))])


@triton.jit
def _read(source, batch, head, at, count, stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    """Rows at .. at + BLOCK of one head, with zeros outside of 0 .. count; TMA pads by itself."""
    if TMA:
        tile = source.load([batch, at, head, 0]).reshape(BLOCK, WIDTH)
    else:
        row, col = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
        where = source + tl.cast(at, tl.int64) * stride + row[:, None] * stride + col[None, :]
        tile = tl.load(where, mask=((at + row >= 0) & (at + row < count))[:, None], other=0.0)
    return tile


@triton.jit
def _over_keys(
    out, top, total, q, k, v, batch, head, stride_k, stride_v, first, last, offset, count, left, right, lowest, place, scale,
    TMA: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Processes the blocks of keys from `first` up to `last`: returns the output, the largest score and the sum so far.

    Of the `count` keys in k, the key at position 0 has the index `offset`. Each query sees keys from its `lowest` up
    to its own `place`; all queries see keys from `left` up to `right`.
    """
    for block in range(first, last, BLOCK_N):
        at = tl.multiple_of(block, BLOCK_N)
        keys = _read(k, batch, head, at + offset, count, stride_k, BLOCK_N, WIDTH, TMA)
        score = tl.dot(q, keys.T, input_precision="ieee")
        if (at < left) | (at >= right):
            key = at + tl.arange(0, BLOCK_N)
            seen = (key[None, :] >= lowest[:, None]) & (key[None, :] <= place[:, None])
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1) * scale)
        shrink = tl.exp2(top - higher)
        p = tl.exp2(score * scale - higher[:, None])
        total = total * shrink + tl.sum(p, 1)
        out *= shrink[:, None]
        top = higher
        values = _read(v, batch, head, at + offset, count, stride_v, BLOCK_N, WIDTH, TMA)
        out = tl.dot(p.to(values.dtype), values, out, input_precision="ieee")
    return out, top, total


@triton.jit
def _window_attention_kernel(
    q, past_k, past_v, k, v, low, y, time, carried, window, scale,
    q_b, q_t, q_h, pk_b, pk_t, pk_h, pv_b, pv_t, pv_h, k_b, k_t, k_h, v_b, v_t, v_h,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STACK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_M queries: BLOCK_M / STACK tokens of STACK neighbouring heads.

    Programs of all heads of a tile follow each other, so that concurrent programs read few keys, which stay in the
    cache.
    """
    TOKENS: tl.constexpr = BLOCK_M // STACK
    across: tl.constexpr = HEADS // STACK
    program = tl.program_id(0)
    first_head = (program % across) * STACK
    tiles = tl.cdiv(time, TOKENS)
    start = ((program // across) % tiles) * TOKENS
    batch = program // across // tiles
    b, kv_head = batch.to(tl.int64), first_head // GROUP

    row, col = tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
    token, head = start + row // STACK, first_head + row % STACK
    live = (token < time)[:, None]
    place = tl.minimum(token, time - 1)  # rows after the last query repeat it and are not stored
    lowest = tl.maximum(tl.load(low + place).to(tl.int32) - carried, place - window + 1)
    lowest = tl.minimum(tl.maximum(lowest, -carried), place)
    where = q + b * q_b + start.to(tl.int64) * q_t + (row // STACK)[:, None] * q_t + head[:, None] * q_h + col[None, :]
    query = tl.load(where, mask=live, other=0.0)

    # x & -BLOCK_N rounds down to a block's beginning, below zero too
    end = tl.minimum(start + TOKENS, time)
    begin = tl.min(lowest, 0) & -BLOCK_N
    right = (start + 1) & -BLOCK_N  # the first block with a key that the first query does not see
    left = (tl.max(lowest, 0) + BLOCK_N - 1) & -BLOCK_N  # the first block that no query's lower end cuts
    if not TMA:
        past_k += b * pk_b + kv_head * pk_h
        past_v += b * pv_b + kv_head * pv_h
        k += b * k_b + kv_head * k_h
        v += b * v_b + kv_head * v_h
    out = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    top = tl.full((BLOCK_M,), -1e38, tl.float32)  # finite: a row without keys so far must not subtract two infinities
    total = tl.zeros((BLOCK_M,), tl.float32)
    out, top, total = _over_keys(
        out, top, total, query, past_k, past_v, batch, kv_head, pk_t, pv_t, begin, 0, carried, carried,
        0, 0, lowest, place, scale, TMA, BLOCK_N, WIDTH,
    )  # fmt: skip
    out, top, total = _over_keys(
        out, top, total, query, k, v, batch, kv_head, k_t, v_t, tl.maximum(begin, 0), end, 0, time,
        left, right, lowest, place, scale, TMA, BLOCK_N, WIDTH,
    )  # fmt: skip
    to = y + (b * time + start) * HEADS * WIDTH + ((row // STACK) * HEADS + head)[:, None] * WIDTH + col[None, :]
    tl.store(to, (out * (1.0 / total)[:, None]).to(y.dtype.element_ty), mask=live)


def _takes_tma(x: Tensor) -> bool:
    """Whether TMA can address it: a 16-byte aligned start, and rows a multiple of 16 bytes apart."""
    return x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])


def without_tma(launch: Launch) -> Launch:
    """The same with plain loads. Their addresses take registers, so registers are not limited."""
    options = {name: value for name, value in launch.options.items() if name != "maxnreg"}
    return dataclasses.replace(launch, blocks={**launch.blocks, "TMA": False}, options=options)


@operator(
    "window_attention",
    "(Tensor q, Tensor past_k, Tensor past_v, Tensor k, Tensor v, Tensor low, SymInt window) -> Tensor",
)
def _window_attention(
    q: Tensor, past_k: Tensor, past_v: Tensor, k: Tensor, v: Tensor, low: Tensor, window: int
) -> Tensor:
    batch, time, heads, width = q.shape
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not y.numel():
        return y
    q, past_k, past_v, k, v = (unit_channels(x) for x in (q, past_k, past_v, k, v))
    op = "window_attention" + ("_float32" if q.dtype == torch.float32 else "")
    launch = configs.choose(op, width, q.device)
    blocks = dict(launch.blocks)
    group = heads // k.shape[2]
    # the heads of a group that fill a tile evenly: the power of two in their number
    blocks["STACK"] = stack = min(group & -group, blocks["BLOCK_M"]) if blocks["STACK"] else 1
    q = near(q, {1: blocks["BLOCK_M"] // stack, 2: heads})
    past_k, past_v, k, v = (near(x, {1: blocks["BLOCK_N"], 2: x.shape[2]}) for x in (past_k, past_v, k, v))
    keys: list[Any] = [past_k, past_v, k, v]
    launch = launch if all(_takes_tma(x) for x in keys) else without_tma(launch)
    blocks["TMA"] = launch.blocks["TMA"]
    if blocks["TMA"]:  # an empty tensor has no descriptor, and is not read
        keys = [_describe(x if x.numel() else k, blocks["BLOCK_N"]) for x in keys]
    tiles = -(-time // (blocks["BLOCK_M"] // stack))
    with on_device(q.device):
        _window_attention_kernel[(batch * tiles * (heads // stack),)](
            q, *keys, low.contiguous(), y, time, past_k.shape[1], window,
            math.log2(math.e) / math.sqrt(width),
            *(stride for x in (q, past_k, past_v, k, v) for stride in x.stride()[:3]),
            HEADS=heads, GROUP=group, WIDTH=width, **blocks,
            num_warps=launch.num_warps, num_stages=launch.num_stages, **launch.options,
        )  # fmt: skip
    return y


def _describe(x: Tensor, rows: int) -> Any:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, 1, x.shape[3]])


@fake(_window_attention)
def _(q: Tensor, past_k: Tensor, past_v: Tensor, k: Tensor, v: Tensor, low: Tensor, window: int) -> Tensor:
    return q.new_empty(q.shape)


def _refuse(ctx: Any, grad: Tensor) -> NoReturn:
    raise ParbankError(
        "window_attention has no backward in its Triton kernel: it scores and samples; to differentiate, run it under "
        "parbank.ops.backend.use_backend('reference')"
    )


torch.library.register_autograd(_window_attention, _refuse)


def window_attention(
    q: Tensor, past_k: Tensor, past_v: Tensor, k: Tensor, v: Tensor, low: Tensor, window: int
) -> Tensor:
    """Softmax attention of q (B, T, heads, D), each query over the `window` keys up to its own, forward only.

    The keys are past_k (B, P, kv_heads, D) followed by k (B, T, kv_heads, D), the values likewise; query i stands at key
    P + i. low (T,) holds the first key each query may see, counted from the first carried; its own it always sees.
    """
    _check(q, past_k, past_v, k, v, low, window)
    if not takes(q, past_k, past_v, k, v):
        return reference.window_attention(q, past_k, past_v, k, v, low, window)
    return _window_attention(q, past_k, past_v, k, v, low, window)


def takes(q: Tensor, *others: Tensor) -> bool:
    """Whether the kernel is taken. Float32 products run outside the tensor cores, so there only where it is asked for."""
    if not takes_kernel(q, *others) or q.shape[-1] not in WIDTHS:
        return False
    return q.dtype != torch.float32 or backend._state.strict


def _check(q: Tensor, past_k: Tensor, past_v: Tensor, k: Tensor, v: Tensor, low: Tensor, window: int) -> None:
    shapes = f"q {tuple(q.shape)}, past {tuple(past_k.shape)} and {tuple(past_v.shape)}, own {tuple(k.shape)} and {tuple(v.shape)}"
    fits = all(x.dim() == 4 for x in (q, past_k, past_v, k, v)) and k.shape == v.shape and past_k.shape == past_v.shape
    fits = fits and k.shape[:2] == q.shape[:2] and k.shape[3] == q.shape[3] and k.shape[2] > 0
    fits = fits and past_k.shape[0] == k.shape[0] and past_k.shape[2:] == k.shape[2:] and q.shape[2] % k.shape[2] == 0
    if not fits:
        raise ParbankError(
            f"window_attention: {shapes} do not fit; they must be (B, T, heads, D), (B, P, kv_heads, D) and (B, T, kv_heads, D) "
            "with heads a multiple of kv_heads"
        )
    if low.dim() != 1 or low.shape[0] != q.shape[1] or low.dtype not in LOW_DTYPES:
        raise ParbankError(
            f"window_attention: low is {low.dtype} {tuple(low.shape)}; it must be whole numbers, one a query, ({q.shape[1]},)"
        )
    check_floating("window_attention", q=q, past_k=past_k, past_v=past_v, k=k, v=v)
    if any(x.dtype != q.dtype for x in (past_k, past_v, k, v)):
        types = ", ".join(str(x.dtype) for x in (q, past_k, past_v, k, v))
        raise ParbankError(f"window_attention: queries, keys and values are {types}; cast them to one type first")
    if window < 1:
        raise ParbankError(f"window_attention: a window has at least 1 key, got {window}")
    same_device("window_attention", q, past_k, past_v, k, v, low)
