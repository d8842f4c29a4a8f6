"""The MLP y = a W_down^T, a = LeakyReLU(u)^2, u = x W_up^T, with the activation in the epilogues of the products around
it. (Fused linear and squared ReLU: modded-nanogpt #197, parameter-golf #1105.)

Forward, the epilogue of the up product applies the activation, and u is never written. Backward, the epilogue of dA =
dY W_down multiplies by the derivative, and dA is never written:

    dU = dA * f'(u),   f'(u) = 2 sqrt(a) where u >= 0, -2 |slope| sqrt(a) elsewhere

So besides x and the weights only a and the sign of u are kept. a is never negative, so its sign bit could hold the
sign of u. But the down product and dW_down = dY^T a, both by cuBLAS, could not read such an a, and a copy with the
bit cleared costs as much as keeping two tensors. One bit per element beside a adds 1/16 in bfloat16. At (98304, 512
-> 1536) that is 302 + 19 MB, against 604 for u and a; the fused epilogues save elementwise passes of 604 MB forward
and 906 MB backward. sqrt(a) has half the relative error of a, so the derivative is more exact than one from a rounded
u.

The other four products are plain. In this op's backward they are torch ops that the compiler sees; in residual.py
they come from product.py, except the gradients of weights. For the two fused products Hopper has a second kernel, in
mlp_hopper.py. Float32 products run outside the tensor cores and hide elementwise passes, so there cuBLAS is faster
and `auto` takes the reference.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from parbank.errors import ParbankError
from parbank.gpu import on_device
from parbank.ops import backend, configs, mlp_hopper, reference
from parbank.ops.backend import TensorDescriptor, tl, triton
from parbank.ops.checks import (
    TILE_SIDE,
    as_rows,
    differentiate_once,
    fake,
    is_near,
    near,
    persistent_programs,
    refuse_double_backward,
    same_device,
    takes_kernel,
)
from parbank.ops.configs import ANY, Launch
from parbank.ops.register import operator
from parbank.precision import as_they_are

GROUP = 64  # columns whose signs share 8 bytes: bit i of byte c is column 8*i + c, which one thread of a product holds


def launch_config(
    m: int,
    n: int,
    k: int,
    warps: int,
    stages: int,
    *,
    tma: bool = False,
    split: int = 1,
    per_sm: int = 0,
    early: bool = False,
    registers: int = 0,
) -> Launch:
    """Tile sides. tma: loads and stores through descriptors. split: parts of the epilogue. per_sm 0: one program per
    tile. early: operands of the derivative are loaded before the product and wait in registers. registers: the most
    per thread, so that more programs fit on a multiprocessor."""
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "TMA": tma, "SPLIT": split, "PER_SM": per_sm, "EARLY": early}
    return Launch(blocks, num_warps=warps, num_stages=stages, options={"maxnreg": registers} if registers else {})


# Hopper's tables also have rows for the kernel of mlp_hopper.py. The first row is taken. That kernel needs whole tiles; other
# shapes go to the Triton kernel.
_FIRST = ANY - 1  # limits rise
_PLAIN = [(ANY, launch_config(128, 128, 32, 8, 3))]
configs.register(
    "mlp_up",
    sm80=_PLAIN,
    sm90=[
        (_FIRST, mlp_hopper.launch_config(64, 12, 1, turn=8, lag=2)),
        (ANY, launch_config(128, 256, 64, 8, 4, tma=True, split=2, per_sm=1)),
    ],
    # a persistent kernel with a factor for each row spills there
    sm100=[(ANY, launch_config(128, 128, 64, 8, 3, tma=True, split=2))],
)
# Its epilogue waits for its operands, so it loads them early, and two programs share a multiprocessor: four warps with all the
# registers a thread can have fit twice. Compiled for 10.0 that spills, and eight warps do not.
configs.register(
    "mlp_down_backward",
    sm80=_PLAIN,
    sm90=[
        (_FIRST, mlp_hopper.launch_config(64, 10, 2, turn=8, lag=2)),
        (ANY, launch_config(128, 128, 64, 4, 3, tma=True, split=2, early=True)),
    ],
    sm100=[(ANY, launch_config(128, 128, 64, 8, 3, tma=True, split=2))],
)
for _op in ("mlp_up_float32", "mlp_down_backward_float32"):
    configs.register(_op, sm80=[(ANY, launch_config(32, 64, 32, 4, 2))])


@triton.jit
def _read(
    source, row, col, rows, cols, stride_r, stride_c,
    ROWS: tl.constexpr, COLS: tl.constexpr, ROW_MAJOR: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The (ROWS, COLS) tile at (row, col) of a matrix stored either way round; zeros outside it."""
    if TMA:
        if ROW_MAJOR:
            tile = source.load([row, col])
        else:
            tile = tl.trans(source.load([col, row]))
    else:
        r, c = tl.arange(0, ROWS), tl.arange(0, COLS)
        start = source + tl.cast(row, tl.int64) * stride_r + tl.cast(col, tl.int64) * stride_c
        if EVEN:
            tile = tl.load(start + r[:, None] * stride_r + c[None, :] * stride_c)
        else:
            inside = (row + r < rows)[:, None] & (col + c < cols)[None, :]
            tile = tl.load(start + r[:, None] * stride_r + c[None, :] * stride_c, mask=inside, other=0.0)
    return tile


@triton.jit
def _write(
    target, tile, row, col, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr
):
    if TMA:
        target.store([row, col], tile.to(target.dtype))
    else:
        tile = tile.to(target.dtype.element_ty)
        r, c = tl.arange(0, ROWS), tl.arange(0, COLS)
        to = target + tl.cast(row, tl.int64) * cols + col + r[:, None] * cols + c[None, :]
        if EVEN:
            tl.store(to, tile)
        else:
            tl.store(to, tile, mask=(row + r < rows)[:, None] & (col + c < cols)[None, :])


@triton.jit
def _sign_bytes(signs, row, col, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Pointers to the sign bytes of a tile, and which of them exist."""
    line = tl.cdiv(cols, 64) * 8
    r, c = tl.arange(0, ROWS), col // 8 + tl.arange(0, COLS // 8)
    return signs + (row + r).to(tl.int64)[:, None] * line + c[None, :], (row + r < rows)[:, None] & (c < line)[None, :]


@triton.jit
def _activate(
    u, out, signs, row, col, rows, cols, slope,
    ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    bit = tl.arange(0, 8)[None, None, :, None]
    negative = (u < 0).to(tl.int32).reshape(ROWS, COLS // 64, 8, 8)
    packed = tl.sum(negative << bit, 2).reshape(ROWS, COLS // 8)
    pointers, exists = _sign_bytes(signs, row, col, rows, cols, ROWS, COLS)
    tl.store(pointers, packed.to(tl.uint8), mask=exists)
    value = tl.where(u < 0, u * slope, u)
    _write(out, value * value, row, col, rows, cols, ROWS, COLS, TMA, EVEN)


@triton.jit
def _kept(
    a, signs, row, col, rows, cols,
    ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The tensors that forward kept for a tile: the activation, and the signs of its input."""
    pointers, exists = _sign_bytes(signs, row, col, rows, cols, ROWS, COLS)
    packed = tl.load(pointers, mask=exists, other=0)
    return _read(a, row, col, rows, cols, cols, 1, ROWS, COLS, True, TMA, EVEN), packed


@triton.jit
def _factor(inverse, scale, row, rows, ROWS: tl.constexpr):
    own = row + tl.arange(0, ROWS)
    return tl.load(inverse + own, mask=own < rows, other=0.0) * scale


@triton.jit
def _derive(
    da, value, packed, out, inverse, row, col, rows, cols, slope, scale,
    ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, FACTORED: tl.constexpr,
):  # fmt: skip
    packed = packed.to(tl.int32).reshape(ROWS, COLS // 64, 1, 8)
    negative = ((packed >> tl.arange(0, 8)[None, None, :, None]) & 1).reshape(ROWS, COLS)
    back = da * tl.sqrt(value.to(tl.float32)) * tl.where(negative == 1, -2.0 * tl.abs(slope), 2.0)
    if FACTORED:
        back *= _factor(inverse, scale, row, rows, ROWS)[:, None]
    _write(out, back, row, col, rows, cols, ROWS, COLS, TMA, EVEN)


@triton.jit
def _mlp_product_kernel(
    left, right, a, out, signs, inverse, rows, cols, depth, stride_l, stride_n, stride_k, slope, scale,
    K_MAJOR: tl.constexpr, BACKWARD: tl.constexpr, EVEN: tl.constexpr, FACTORED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr, SPLIT: tl.constexpr, PER_SM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """left (rows, depth) times right^T, right (cols, depth), with the activation or its derivative as the epilogue.

    Tiles of one block of rows follow each other, so the rows are read from memory once and then from the cache, as
    the weight is. Flattening the two loops lets the next tile's loads start before this tile's epilogue.
    """
    PART: tl.constexpr = BLOCK_N // SPLIT
    across = tl.cdiv(cols, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_M) * across, tl.num_programs(0), flatten=PER_SM > 0):
        row, col = (tile // across) * BLOCK_M, (tile % across) * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if FACTORED and not BACKWARD:  # loaded before the product; backward has no registers left for that
            factor = _factor(inverse, scale, row, rows, BLOCK_M)
        if BACKWARD and EARLY:
            a_low, signs_low = _kept(a, signs, row, col, rows, cols, BLOCK_M, PART, False, EVEN)
            if SPLIT == 2:
                a_high, signs_high = _kept(a, signs, row, col + PART, rows, cols, BLOCK_M, PART, False, EVEN)
        for k in range(0, depth, BLOCK_K):
            first = _read(left, row, k, rows, depth, stride_l, 1, BLOCK_M, BLOCK_K, True, TMA, EVEN)
            second = _read(right, col, k, cols, depth, stride_n, stride_k, BLOCK_N, BLOCK_K, K_MAJOR, TMA, EVEN)
            acc = tl.dot(first, second.T, acc, input_precision="ieee")
        if FACTORED and not BACKWARD:
            acc *= factor[:, None]
        if SPLIT == 1:
            low = acc
        else:  # in halves: transposing through shared memory then takes half as much of it
            low, high = tl.split(acc.reshape(BLOCK_M, 2, PART).permute(0, 2, 1))
        if BACKWARD:
            if not EARLY:
                a_low, signs_low = _kept(a, signs, row, col, rows, cols, BLOCK_M, PART, TMA, EVEN)
            _derive(
                low,
                a_low,
                signs_low,
                out,
                inverse,
                row,
                col,
                rows,
                cols,
                slope,
                scale,
                BLOCK_M,
                PART,
                TMA,
                EVEN,
                FACTORED,
            )
            if SPLIT == 2:
                if not EARLY:
                    a_high, signs_high = _kept(a, signs, row, col + PART, rows, cols, BLOCK_M, PART, TMA, EVEN)
                _derive(
                    high, a_high, signs_high, out, inverse, row, col + PART, rows, cols, slope, scale,
                    BLOCK_M, PART, TMA, EVEN, FACTORED,
                )  # fmt: skip
        else:
            _activate(low, out, signs, row, col, rows, cols, slope, BLOCK_M, PART, TMA, EVEN)
            if SPLIT == 2:
                _activate(high, out, signs, row, col + PART, rows, cols, slope, BLOCK_M, PART, TMA, EVEN)


def _takes_tma(*tensors: Tensor) -> bool:
    """Whether TMA can address them: a 16-byte aligned start, and rows a multiple of 16 bytes apart."""
    return all(
        x.data_ptr() % 16 == 0 and max(x.stride()) * x.element_size() % 16 == 0 and 1 in x.stride() for x in tensors
    )


def without_early(launch: Launch) -> Launch:
    """For column counts that are not multiples of 16. Early loads are then plain and narrow, and their addresses do not
    fit into registers."""
    return dataclasses.replace(launch, blocks={**launch.blocks, "EARLY": False}, num_warps=8)


def _product(
    left: Tensor,
    right: Tensor,
    a: Tensor | None,
    out: Tensor,
    signs: Tensor,
    slope: float,
    inverse: Tensor | None = None,
    scale: float = 1.0,
) -> None:
    """Launches the product of left (rows, depth) and right (cols, depth), each stored by rows or columns. scale *
    `inverse` multiplies its rows."""
    rows, depth = left.shape
    cols = right.shape[0]
    right = right if 1 in right.stride() else right.contiguous()
    left, right = (near(x, {0: TILE_SIDE, 1: TILE_SIDE}) for x in (left, right))
    op = ("mlp_up" if a is None else "mlp_down_backward") + ("_float32" if left.dtype == torch.float32 else "")
    launch = configs.choose(op, rows, left.device)
    if "PINGPONG" in launch.blocks:
        if mlp_hopper.takes(left, right) and _takes_tma(left, right, out, *([] if a is None else [a])):
            return mlp_hopper.multiply(launch, left, right, a, out, signs, slope, inverse, scale)
        table = configs.tables()[op][configs.architecture(left.device)]
        launch = next(other for _, other in table if "PINGPONG" not in other.blocks)
    tma = launch.blocks["TMA"] and _takes_tma(left, right, out)
    if launch.blocks["EARLY"] and cols % 16:
        launch = without_early(launch)
    if launch.blocks["TMA"] and not tma:
        launch = configs.tables()[op]["sm80"][-1][1]  # made for plain loads
    m, n, k = (launch.blocks[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    k_major = right.stride(1) == 1
    even = rows % m == 0 and cols % n == 0 and depth % k == 0
    tiles = -(-rows // m) * -(-cols // n)
    per_sm = launch.blocks["PER_SM"]
    operands: list[Any] = [left, right, a, out]
    if tma:
        part = n // launch.blocks["SPLIT"]
        operands = [
            _describe(left, [m, k]),
            _describe(right, [n, k]) if k_major else _describe(right.t(), [k, n]),
            a if a is None or launch.blocks["EARLY"] else _describe(a, [m, part]),
            _describe(out, [m, part]),
        ]
    with on_device(left.device):
        _mlp_product_kernel[(persistent_programs(left.device, per_sm, tiles) if per_sm else tiles,)](
            *operands, signs, inverse, rows, cols, depth, left.stride(0), right.stride(0), right.stride(1), slope, scale,
            K_MAJOR=k_major, BACKWARD=a is not None, EVEN=even, FACTORED=inverse is not None,
            **launch.kwargs(),
        )  # fmt: skip


def _describe(x: Tensor, block: list[int]) -> Any:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


def _sign_shape(rows: Any, hidden: Any) -> tuple[Any, Any]:
    return rows, (hidden + GROUP - 1) // GROUP * (GROUP // 8)


@operator(
    "mlp_up",
    "(Tensor x, Tensor w_up, Tensor? inverse, float scale, float slope) -> (Tensor, Tensor)",
)
def _mlp_up(x: Tensor, w_up: Tensor, inverse: Tensor | None, scale: float, slope: float) -> tuple[Tensor, Tensor]:
    """The activation (rows, hidden) and the packed signs of its input: all that backward needs.

    scale * `inverse`, where given, multiplies the rows of x: the norm that was not applied before (norm.py).
    """
    flat = as_rows(x)
    rows, hidden = flat.shape[0], w_up.shape[0]
    a = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    signs = torch.empty(_sign_shape(rows, hidden), dtype=torch.uint8, device=x.device)
    if not flat.numel():
        a.zero_(), signs.zero_()
    elif a.numel():
        _product(flat, w_up, None, a, signs, slope, inverse, scale)
    return a, signs


@operator(
    "mlp",
    "(Tensor x, Tensor w_up, Tensor w_down, float slope) -> (Tensor, Tensor, Tensor)",
)
def _mlp(x: Tensor, w_up: Tensor, w_down: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    """y, and the tensors that backward needs."""
    a, signs = _mlp_up(x, w_up, None, 1.0, slope)
    with as_they_are(x.device):
        return torch.mm(a, w_down.t()).view(*x.shape[:-1], w_down.shape[0]), a, signs


@operator(
    "mlp_down_backward",
    "(Tensor dy, Tensor w_down, Tensor a, Tensor signs, Tensor? inverse, float scale, float slope) -> Tensor",
)
def _mlp_down_backward(
    dy: Tensor, w_down: Tensor, a: Tensor, signs: Tensor, inverse: Tensor | None, scale: float, slope: float
) -> Tensor:
    """dU (rows, hidden) from dy (rows, width). scale * `inverse`, where given, multiplies its rows."""
    du = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    if not dy.numel():
        du.zero_()
    elif du.numel():
        _product(as_rows(dy), w_down.t(), a, du, signs, slope, inverse, scale)
    return du


@fake(_mlp_up)
def _(x: Tensor, w_up: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows, hidden = x.shape[:-1].numel(), w_up.shape[0]
    return x.new_empty((rows, hidden)), x.new_empty(_sign_shape(rows, hidden), dtype=torch.uint8)


@fake(_mlp)
def _(x: Tensor, w_up: Tensor, w_down: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    rows, hidden = x.shape[:-1].numel(), w_up.shape[0]
    signs = x.new_empty(_sign_shape(rows, hidden), dtype=torch.uint8)
    return x.new_empty((*x.shape[:-1], w_down.shape[0])), x.new_empty((rows, hidden)), signs


@fake(_mlp_down_backward)
def _(dy: Tensor, w_down: Tensor, a: Tensor, *rest: Any) -> Tensor:
    return a.new_empty(a.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w_up, w_down, ctx.slope = inputs
    ctx.save_for_backward(x, w_up, w_down, *output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return differentiate_once("mlp", _backward, ctx, *grads)


def _backward(ctx: Any, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None, None
    x, w_up, w_down, a, signs = ctx.saved_tensors
    of_x, of_up, of_down, _slope = ctx.needs_input_grad
    grad, flat = dy.reshape(a.shape[0], dy.shape[-1]), x.reshape(a.shape[0], x.shape[-1])
    dx = dw_up = dw_down = None
    if of_down:
        dw_down = outer(grad, a, w_down)
    if of_x or of_up:
        du = _mlp_down_backward(grad, w_down, a, signs, None, 1.0, ctx.slope)
        dx = torch.mm(du, w_up).view(x.shape) if of_x else None
        dw_up = outer(du, flat, w_up) if of_up else None
    return dx, dw_up, dw_down, None


def outer(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """grad^T x, stored as the weight is: a bank may store its matrices transposed."""
    if weight.stride(0) == 1 and weight.stride(1) != 1:
        return torch.mm(x.t(), grad).t()
    return torch.mm(grad.t(), x)


torch.library.register_autograd(_mlp, _differentiate, setup_context=_save)
torch.library.register_autograd(_mlp_up, refuse_double_backward("a block's half (residual.py)"))
torch.library.register_autograd(_mlp_down_backward, refuse_double_backward("mlp"))


def mlp(x: Tensor, w_up: Tensor, w_down: Tensor, slope: float) -> Tensor:
    """leaky_relu_squared(x W_up^T) W_down^T with w_up (hidden, width) and w_down (width, hidden); no biases.

    Either weight may be a transposed view: nothing is copied. See the top of this file for what is kept for backward.
    """
    check_mlp("mlp", x, w_up, w_down)
    if not takes_mlp(x, w_up, w_down):
        return reference.mlp(x, w_up, w_down, slope)
    return _mlp(x, w_up, w_down, slope)[0]


def takes_mlp(x: Tensor, w_up: Tensor, w_down: Tensor) -> bool:
    """Whether the fused products can run a call, and are faster than the reference."""
    if not takes_kernel(x, w_up, w_down) or not is_near(*w_up.shape, *w_down.shape):
        return False
    return x.dtype != torch.float32 or backend._state.strict


def check_mlp(op: str, x: Tensor, w_up: Tensor, w_down: Tensor) -> None:
    shapes = f"x {tuple(x.shape)}, w_up {tuple(w_up.shape)}, w_down {tuple(w_down.shape)}"
    if x.dim() == 0 or w_up.dim() != 2 or w_down.dim() != 2:
        raise ParbankError(f"{op}: {shapes}; they must be (..., width), (hidden, width) and (width, hidden)")
    if w_up.shape[1] != x.shape[-1] or w_down.shape[1] != w_up.shape[0]:
        raise ParbankError(f"{op}: {shapes} do not fit; they must be (..., width), (hidden, width) and (width, hidden)")
    if not x.dtype == w_up.dtype == w_down.dtype or not x.dtype.is_floating_point:
        raise ParbankError(
            f"{op}: x is {x.dtype}, w_up {w_up.dtype} and w_down {w_down.dtype}; cast them to one floating type first"
        )
    same_device(op, x, w_up, w_down)
