# mypy: disable-error-code="no-untyped-def"
"""Matrix products of the Newton-Schulz iteration: symmetric results from half of the tiles, sums in the epilogue. (Idea:
modded-nanogpt #109.)

`xxt`, `ba_plus_caa` and `symmetric_product` have symmetric results. The kernel computes only tiles on and above the
diagonal and stores each twice, the second time transposed. `ax_plus_bx` is the one dense product of the iteration.
All four share one kernel, because a symmetric second factor is its own transpose: out = alpha * A B^T + beta * C with
A (batch, m, k) and B (batch, n, k), each stored by rows or by columns.

Wave quantisation decides the tile shapes. 22 matrices of 512 x 512 are 352 tiles of 128 x 128: 3 waves on the 132 SMs
of an H200. Symmetry leaves 220 tiles, still 2 waves. With tiles of 128 x 256 the triangle has 6 tiles a matrix, 22 *
6 = 132: one wave, with fewer reads of L2. 22 matrices of 256 x 256 are 132 tiles of 64 x 128. So the launch tables go
by the number of 128 x 128 tiles in the whole batch, not by the side.

Results are exactly symmetric: each element below the diagonal is a copy of its mirror image. Accumulation is in
float32 (plain float32 products for float32 inputs) in a fixed order: the same input gives the same bits.
"""

from typing import Any

import torch
from torch import Tensor

from parbank.errors import ParbankError
from parbank.gpu import on_device
from parbank.ops import configs, reference
from parbank.ops.backend import TensorDescriptor, gdc_launch_dependents, gdc_wait, tl, triton
from parbank.ops.checks import TILE_SIDE, check_floating, fake, is_near, near, takes_kernel
from parbank.ops.configs import ANY, Launch
from parbank.ops.register import operator

# --- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def _read(
    src, batch, row, k, rows, depth, stride_b, stride_r, stride_k,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, K_MAJOR: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The (ROWS, DEPTH) tile at (row, k) of one matrix; zeros outside it.

    It is read as it is stored and then transposed, because Triton does not pipeline a tile that is transposed twice.
    Scalars hold the large offsets in 64 bits; within a tile the launcher ensures that 32 bits are enough.
    """
    if TMA:
        if K_MAJOR:
            tile = src.load([batch, row, k]).reshape(ROWS, DEPTH)
        else:
            tile = tl.trans(src.load([batch, k, row]).reshape(DEPTH, ROWS))
    else:
        r, d = tl.arange(0, ROWS), tl.arange(0, DEPTH)
        base = src + tl.cast(batch, tl.int64) * stride_b
        base += tl.cast(row, tl.int64) * stride_r + tl.cast(k, tl.int64) * stride_k
        inside_r, inside_d = row + r < rows, k + d < depth
        if K_MAJOR:
            pointers = base + r[:, None] * stride_r + d[None, :] * stride_k
            mask = inside_r[:, None] & inside_d[None, :]
        else:
            pointers = base + d[:, None] * stride_k + r[None, :] * stride_r
            mask = inside_d[:, None] & inside_r[None, :]
        if EVEN:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=mask, other=0.0)
        if not K_MAJOR:
            tile = tl.trans(tile)
    return tile


@triton.jit
def _write(
    out, tile, batch, row, col, rows, cols,
    ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Stores a tile at (row, col) of a contiguous (batch, rows, cols) tensor."""
    if TMA:
        out.store([batch, row, col], tile.reshape(1, ROWS, COLS))
    else:
        r, c = tl.arange(0, ROWS), tl.arange(0, COLS)
        base = out + (tl.cast(batch, tl.int64) * rows + row) * cols + col
        pointers = base + r[:, None] * cols + c[None, :]
        if EVEN:
            tl.store(pointers, tile)
        else:
            tl.store(pointers, tile, mask=(row + r < rows)[:, None] & (col + c < cols)[None, :])


@triton.jit
def _finish(
    result, out, batch, row, col, rows, cols,
    ROWS: tl.constexpr, COLS: tl.constexpr, SYMMETRIC: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Stores one block of the result. In the symmetric case it stores a square block twice, and nothing below the
    diagonal."""
    if not SYMMETRIC:
        _write(out, result, batch, row, col, rows, cols, ROWS, COLS, TMA, EVEN)
    elif col > row:
        _write(out, result, batch, row, col, rows, cols, ROWS, COLS, TMA, EVEN)
        _write(out, tl.trans(result), batch, col, row, cols, rows, COLS, ROWS, TMA, EVEN)
    elif col == row:
        # For A other than B, A B and its transpose round differently: copy the upper half to the lower.
        index = tl.arange(0, ROWS)
        whole = tl.where(index[:, None] <= index[None, :], result, tl.trans(result))
        _write(out, whole, batch, row, col, rows, cols, ROWS, COLS, TMA, EVEN)


@triton.jit
def _symmetric_product_kernel(
    a, b, c, out, alpha, beta, m, n, depth, tiles,
    a_b, a_r, a_k, b_b, b_r, b_k, c_b, c_r, c_c,
    A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr, HAS_C: tl.constexpr, SYMMETRIC: tl.constexpr,
    PRECISION: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
    EARLY_C: tl.constexpr,
):  # fmt: skip
    """One BLOCK_M x BLOCK_N tile of out = alpha A B^T + beta C, and in the symmetric case its mirror image.

    BLOCK_N is BLOCK_M or twice it. Tiles of one column follow one another, so that they share B's panel in L2. C can be
    read before the loop (EARLY_C), which hides its latency and costs registers.
    """
    if PDL:
        # Programmatic dependent launch: the next kernel is set up while this one runs, and waits here for all earlier work.
        gdc_wait()
        gdc_launch_dependents()
    RATIO: tl.constexpr = BLOCK_N // BLOCK_M
    batch = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    if SYMMETRIC:
        # Column j of tiles has RATIO * (j + 1) of them on or above the diagonal; RATIO * j (j + 1) / 2 come before it.
        # The root is taken in float32 and corrected by one where it is off.
        j = ((tl.sqrt(8.0 * (tile // RATIO) + 1.0) - 1.0) * 0.5).to(tl.int32)
        j = tl.where(RATIO * (j * (j + 1) // 2) > tile, j - 1, j)
        j = tl.where(RATIO * ((j + 1) * (j + 2) // 2) <= tile, j + 1, j)
        i = tile - RATIO * (j * (j + 1) // 2)
    else:
        rows_of_tiles = tl.cdiv(m, BLOCK_M)
        i = tile % rows_of_tiles
        j = tile // rows_of_tiles
    row = i * BLOCK_M
    col = j * BLOCK_N

    if HAS_C and EARLY_C:
        addend = _read(c, batch, row, col, m, n, c_b, c_r, c_c, BLOCK_M, BLOCK_N, True, False, EVEN)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, depth, BLOCK_K):
        left = _read(a, batch, row, k, m, depth, a_b, a_r, a_k, BLOCK_M, BLOCK_K, A_K_MAJOR, TMA, EVEN)
        right = _read(b, batch, col, k, n, depth, b_b, b_r, b_k, BLOCK_N, BLOCK_K, B_K_MAJOR, TMA, EVEN)
        acc = tl.dot(left, tl.trans(right), acc, input_precision=PRECISION)

    acc *= alpha
    if HAS_C:
        if not EARLY_C:
            addend = _read(c, batch, row, col, m, n, c_b, c_r, c_c, BLOCK_M, BLOCK_N, True, False, EVEN)
        acc += beta * addend.to(tl.float32)
    result = acc.to(out.dtype if TMA else out.dtype.element_ty)
    if RATIO == 1:
        _finish(result, out, batch, row, col, m, n, BLOCK_M, BLOCK_M, SYMMETRIC, TMA, EVEN)
    else:
        first, second = result.reshape(BLOCK_M, 2, BLOCK_M).permute(0, 2, 1).split()
        _finish(first, out, batch, row, col, m, n, BLOCK_M, BLOCK_M, SYMMETRIC, TMA, EVEN)
        _finish(second, out, batch, row, col + BLOCK_M, m, n, BLOCK_M, BLOCK_M, SYMMETRIC, TMA, EVEN)


# --- launcher --------------------------------------------------------------------------------------------------------


def _launch_config(m: int, n: int, k: int, warps: int, stages: int, *options: str) -> Launch:
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
    flags = {name.upper(): name in options for name in ("tma", "pdl", "early_c")}
    return Launch({**blocks, **flags}, warps, stages, {"launch_pdl": True} if flags["PDL"] else {})


# Limits are numbers of 128 x 128 tiles in the whole batch. The launch of sm90's rows for each of the 20 cases in
# the log (docs/log/step.md, tune_symmetric_h200) is the fastest of its candidates or within 7% of it; those of sm80 and
# sm100 have not been timed.
configs.register(
    "symmetric",
    sm80=[(ANY, _launch_config(64, 64, 32, 4, 3))],
    sm90=[  # small and large tiles alternate where they fill whole waves
        (100, _launch_config(64, 128, 64, 4, 4, "tma", "pdl")),
        (180, _launch_config(64, 128, 64, 4, 3, "tma", "pdl")),
        (300, _launch_config(128, 256, 64, 8, 4, "tma", "pdl")),
        (1000, _launch_config(64, 128, 64, 4, 3, "tma", "pdl")),
        (ANY, _launch_config(128, 256, 64, 8, 4, "tma", "pdl")),
    ],
    sm100=[(ANY, _launch_config(128, 128, 64, 8, 4, "tma"))],
)
configs.register(
    "product",
    sm80=[(ANY, _launch_config(64, 128, 32, 4, 3))],
    sm90=[
        (100, _launch_config(64, 128, 64, 4, 4, "tma", "pdl")),
        (200, _launch_config(64, 128, 64, 4, 3, "tma", "pdl")),
        (2000, _launch_config(128, 128, 64, 8, 3, "tma", "pdl")),
        (ANY, _launch_config(128, 256, 64, 8, 4, "tma", "pdl")),
    ],
    sm100=[(ANY, _launch_config(128, 128, 64, 8, 4, "tma"))],
)
# float32, which has no tensor cores here, and odd sizes, whose masks and narrow loads take registers: small tiles.
configs.register("symmetric_plain", sm80=[(ANY, _launch_config(64, 128, 16, 4, 3))])
configs.register("product_plain", sm80=[(ANY, _launch_config(64, 64, 32, 4, 2))])


def count_tiles(m: int, n: int, block_m: int, block_n: int, symmetric: bool) -> int:
    """The tiles of one result that are computed: all, or only tiles that touch the diagonal or lie above it."""
    rows, cols = -(-m // block_m), -(-n // block_n)
    return (block_n // block_m) * (cols - 1) * cols // 2 + rows if symmetric else rows * cols


def _product(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, symmetric: bool) -> Tensor:
    """alpha A B^T + beta C over a (batch, m, k), b (batch, n, k) and c (batch, m, n): the kernel's launch."""
    batch, m, depth = a.shape
    n = b.shape[1]
    out = torch.empty((batch, m, n), dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    tile = {1: TILE_SIDE, 2: TILE_SIDE}
    a, b, c = near(_dense(a), tile), near(_dense(b), tile), None if c is None else near(c, tile)
    aligned = not (m % 16 or n % 16) and all(map(_is_aligned, (a, b, out)))
    op = ("symmetric" if symmetric else "product") + ("" if aligned and a.dtype != torch.float32 else "_plain")
    kwargs = configs.choose(op, batch * count_tiles(m, n, 128, 128, symmetric), a.device).kwargs()
    block_m, block_n, block_k = (kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    tiles = count_tiles(m, n, block_m, block_n, symmetric)
    kwargs["TMA"] = kwargs["TMA"] and aligned
    a_k_major, b_k_major = a.stride(2) == 1, b.stride(2) == 1
    sources: tuple[Any, Any, Any] = a, b, out
    if kwargs["TMA"]:
        sources = (
            _descriptor(a, a_k_major, block_m, block_k),
            _descriptor(b, b_k_major, block_n, block_k),
            _descriptor(out, True, block_m, block_m),
        )
    strides = c.stride() if c is not None else (0, 0, 0)
    with on_device(a.device):
        _symmetric_product_kernel[(tiles * batch,)](
            *sources[:2], c, sources[2], float(alpha), float(beta), m, n, depth, tiles,
            *a.stride(), *b.stride(), *strides,
            A_K_MAJOR=a_k_major, B_K_MAJOR=b_k_major, HAS_C=c is not None, SYMMETRIC=symmetric,
            PRECISION="ieee", EVEN=not (m % block_m or n % block_n or depth % block_k), **kwargs,
        )  # fmt: skip
    return out


def _dense(x: Tensor) -> Tensor:
    """The tensor itself where its rows or columns are contiguous, since the kernel reads both; else a copy."""
    return x if 1 in x.stride()[1:] else x.contiguous()


def _upright(x: Tensor) -> Tensor:
    """A symmetric matrix with contiguous rows: a transposed view is transposed back at no cost."""
    return x if x.stride(2) == 1 else x.mT if x.stride(1) == 1 else x.contiguous()


def _is_aligned(x: Tensor) -> bool:
    """Whether each row starts on 16 bytes, as TMA and full-width loads require."""
    steps = [stride for stride in x.stride() if stride != 1]
    return len(steps) == 2 and x.data_ptr() % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in steps)


def _descriptor(x: Tensor, k_major: bool, rows: int, depth: int) -> Any:
    view, block = (x, [1, rows, depth]) if k_major else (x.mT, [1, depth, rows])
    return TensorDescriptor(view, list(view.shape), list(view.stride()), block)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-2].numel(), *x.shape[-2:]) if x.dim() != 3 else x


# --- registration ----------------------------------------------------------------------------------------------------
# Not triton_op: opcheck passes for these also in the interpreter, and they hide nothing that Inductor could use,
# because nothing fuses with a product of this kind. The ops are functional, so Inductor may drop, reorder and plan memory
# around them. Backwards are plain PyTorch, so second derivatives follow.


@operator("xxt")
def _xxt(x: Tensor) -> Tensor:
    flat = _flat(x)
    return _product(flat, flat, None, 1.0, 0.0, True).view(*x.shape[:-1], x.shape[-2])


@operator("ba_plus_caa")
def _ba_plus_caa(a: Tensor, b: float, c: float) -> Tensor:
    flat = _upright(_flat(a))
    return _product(flat, flat, flat, c, b, True).view(a.shape)


@operator("symmetric_product")
def _symmetric_product(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> Tensor:
    addend = None if c is None else _upright(_flat(c))
    return _product(_upright(_flat(a)), _upright(_flat(b)), addend, alpha, beta, True).view(a.shape)


@operator("ax_plus_bx")
def _ax_plus_bx(x: Tensor, b: Tensor, a: float) -> Tensor:
    flat = _flat(x)
    addend = flat if flat.stride(2) == 1 else flat.contiguous()
    return _product(_flat(b), addend.mT, addend, 1.0, a, False).view(x.shape)


@fake(_xxt)
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-2])


@fake(_ba_plus_caa)
def _(a: Tensor, b: float, c: float) -> Tensor:
    return a.new_empty(a.shape)


@fake(_symmetric_product)
def _(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> Tensor:
    return a.new_empty(a.shape)


@fake(_ax_plus_bx)
def _(x: Tensor, b: Tensor, a: float) -> Tensor:
    return x.new_empty(x.shape)


# --- backward --------------------------------------------------------------------------------------------------------


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
    ctx.scalars = [value for value in inputs if isinstance(value, float)]
    ctx.has_c = len(inputs) == 5 and inputs[2] is not None


def _xxt_backward(ctx: Any, grad: Tensor) -> Tensor:
    """d(X X^T) = dX X^T + X dX^T, so the gradient is (G + G^T) X."""
    (x,) = ctx.saved_tensors
    return (grad + grad.mT) @ x


def _ba_plus_caa_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    """b G + c (G A^T + A^T G), each product added up in its epilogue: two roundings, where autograd of b A + c A A has six."""
    (a,) = ctx.saved_tensors
    b, c = ctx.scalars
    g, turned = _flat(grad), _flat(a).mT
    half = torch.baddbmm(g, g, turned, beta=b, alpha=c)
    return torch.baddbmm(half, turned, g, alpha=c).view(a.shape), None, None


def _symmetric_product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
    """alpha G B^T, alpha A^T G, beta G."""
    a, b = ctx.saved_tensors[:2]
    alpha, beta = ctx.scalars
    return alpha * (grad @ b.mT), alpha * (a.mT @ grad), beta * grad if ctx.has_c else None, None, None


def _ax_plus_bx_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    """a G + B^T G, G X^T."""
    x, b = ctx.saved_tensors
    return ctx.scalars[0] * grad + b.mT @ grad, grad @ x.mT, None


torch.library.register_autograd(_xxt, _xxt_backward, setup_context=_save_inputs)
torch.library.register_autograd(_ba_plus_caa, _ba_plus_caa_backward, setup_context=_save_inputs)
torch.library.register_autograd(_symmetric_product, _symmetric_product_backward, setup_context=_save_inputs)
torch.library.register_autograd(_ax_plus_bx, _ax_plus_bx_backward, setup_context=_save_inputs)


# --- public ----------------------------------------------------------------------------------------------------------


def xxt(x: Tensor) -> Tensor:
    """X X^T over (..., m, k), from the tiles on and above the diagonal. X may be a transposed view."""
    if x.dim() < 2:
        raise ParbankError(f"xxt takes (..., m, k), got shape {tuple(x.shape)}")
    check_floating("xxt", X=x)
    return _xxt(x) if takes_kernel(x) and is_near(*x.shape[-2:]) else reference.xxt(x)


def ba_plus_caa(a: Tensor, b: float, c: float) -> Tensor:
    """b A + c A A over (..., m, m) for symmetric A. An A that is not symmetric gives a wrong result, not an error."""
    _check_square("ba_plus_caa", a)
    return _ba_plus_caa(a, b, c) if takes_kernel(a) else reference.ba_plus_caa(a, b, c)


def symmetric_product(a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """alpha A B + beta C over (..., m, m) for symmetric A, B and C where A and B commute (polynomials of one matrix)."""
    _check_square("symmetric_product", a)
    for other in (b, c):
        if other is not None and (other.shape != a.shape or other.dtype != a.dtype or other.device != a.device):
            raise ParbankError(
                "symmetric_product takes matrices of one shape, dtype and device, got "
                f"{tuple(a.shape)} {a.dtype} {a.device} and {tuple(other.shape)} {other.dtype} {other.device}"
            )
    if takes_kernel(a, b, c):
        return _symmetric_product(a, b, c, alpha, beta)
    return reference.symmetric_product(a, b, c, alpha, beta)


def ax_plus_bx(x: Tensor, b: Tensor, a: float) -> Tensor:
    """a X + B X over X (..., m, n) and B (..., m, m): the sum costs nothing in the product's epilogue."""
    _check_square("ax_plus_bx", b)
    if x.dim() < 2 or x.shape[:-1] != b.shape[:-1] or x.dtype != b.dtype or x.device != b.device:
        raise ParbankError(
            "ax_plus_bx takes X (..., m, n) and B (..., m, m) of one dtype and device, got "
            f"{tuple(x.shape)} {x.dtype} {x.device} and {tuple(b.shape)} {b.dtype} {b.device}"
        )
    return _ax_plus_bx(x, b, a) if takes_kernel(x, b) and is_near(*x.shape[-2:]) else reference.ax_plus_bx(x, b, a)


def _check_square(op: str, a: Tensor) -> None:
    if a.dim() < 2 or a.shape[-1] != a.shape[-2]:
        raise ParbankError(f"{op} takes square matrices (..., m, m), got shape {tuple(a.shape)}")
    check_floating(op, **{"B" if op == "ax_plus_bx" else "A": a})
