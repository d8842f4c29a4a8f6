# mypy: disable-error-code="no-untyped-def"
"""`parbank.optim.update` in Triton, with few passes over memory: one launch updates all parameters of a batch.

Before Newton-Schulz, one pass updates the momentum and writes the squared norm of every tile of the update. A second
pass forms the update again from gradient and momentum, which is cheaper than writing it in float32 and reading it
twice, and writes it normalised, in 16 bits, and transposed where the batch needs it. In units of the float32 weights'
bytes that is 5.5 of traffic. After Newton-Schulz, one pass over the weights takes 2.5. Plain PyTorch needs about 16.

A batch's parameters lie anywhere in memory, so a launch reads a table with one row of integers per piece: two
addresses, the shape, and the slots of its blocks. Programs are tiles of TILE x TILE; a second array maps a program to
its piece. A table is sent again only when an address changed: with gradients in place, never.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parbank.ops.backend import tl, triton, use_triton
from parbank.optim.hyper import DECAY, LR, MOMENTUM, WIDTH, send
from parbank.optim.layout import Batch, Member, Piece
from parbank.optim.newton_schulz import NORM_EPS, working_dtype
from parbank.optim.update import Control

TILE = 64  # 4096 elements a program, 32 a thread; rows of 256 bytes read, and of 128 bytes written when transposed

# Columns of a table's row.
FIRST, SECOND, ROWS, COLS, SLOT, FLIPPED, GROUP, INDEX, FIRST_TILE = range(9)
FIELDS = 9


class Tables:
    """The launch tables of a layout, kept on the device until an address changes."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[list[int], Tensor, Tensor, bool]] = {}
        self.sent = 0
        """How many tables were sent: a graph reads those of its capture, which are freed when others take their place."""

    def get(
        self,
        key: Any,
        entries: Sequence[tuple[Member, int, int]],
        firsts: Sequence[Tensor],
        seconds: Sequence[Tensor | None],
    ) -> tuple[Tensor, Tensor, bool]:
        """(table, piece of each program, all aligned) for entries (member, slot, blocks) with two tensors each."""
        pointers = [t.data_ptr() if t is not None else 0 for t in (*firsts, *seconds)]
        kept = self._kept.get(key)
        if kept is None or kept[0] != pointers:
            rows, owners, sides, tiles = [], [], [], 0
            for number, (member, slot, blocks) in enumerate(entries):
                addresses = (pointers[number], pointers[number + len(entries)])
                shape = (member.rows, member.cols, slot, int(member.flipped), member.group, member.index, tiles)
                rows.append([*addresses, *shape])
                sides += [member.rows, member.cols]
                count = blocks * count_tiles(member.rows, member.cols)
                owners += [number] * count
                tiles += count
            device = firsts[0].device
            owner = kept[2] if kept is not None else send(owners, torch.int32, device)
            aligned = not any(value % 16 for value in (*pointers, *sides))
            kept = self._kept[key] = (pointers, send(rows, torch.int64, device), owner, aligned)
            self.sent += 1
        return kept[1:]

    def clear(self) -> None:
        self._kept.clear()


def use_kernels(batch: Batch, control: Control) -> bool:
    """Whether the kernels here take a batch: they have no float64."""
    return batch.dtype != torch.float64 and use_triton(control.values)


def count_tiles(rows: int, cols: int) -> int:
    """Tiles of one block: the same for a block and its transpose."""
    return -(-rows // TILE) * -(-cols // TILE)


# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _find_tile(row, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """The work of a program: block, tile within the block, rows and columns of the tile, and the block's shape."""
    rows = tl.load(row + 2)
    cols = tl.load(row + 3)
    if ALIGNED:
        rows = tl.multiple_of(rows, 16)
        cols = tl.multiple_of(cols, 16)
    tile = tl.program_id(0) - tl.load(row + 8)
    across = tl.cdiv(cols, BLOCK)
    per_block = across * tl.cdiv(rows, BLOCK)
    block = tile // per_block
    inner = tile % per_block
    r = (inner // across) * BLOCK + tl.arange(0, BLOCK)
    c = (inner % across) * BLOCK + tl.arange(0, BLOCK)
    return block, inner, per_block, r, c, rows, cols


@triton.jit
def _read_pointer(address, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(address).to(tl.pointer_type(KIND))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _is_taken(row, active, control):
    return tl.load(control) * tl.load(active + tl.load(row + 7)) > 0


@triton.jit
def _muon_momentum_kernel(table, owner, hyper, active, control, squares, WIDTH: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, GRAD: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip  # noqa: E501
    """buffer <- momentum * buffer + factor * grad; squares[slot, tile] <- the update's sum of squares."""
    row = table + tl.load(owner + tl.program_id(0)) * 9
    block, inner, per_block, r, c, rows, cols = _find_tile(row, BLOCK, ALIGNED)
    grad = _read_pointer(row, GRAD, ALIGNED)
    buffer = _read_pointer(row + 1, tl.float32, ALIGNED)
    taken = _is_taken(row, active, control)
    momentum = tl.load(hyper + tl.load(row + 6) * WIDTH + MOMENTUM)
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    offsets = block * rows * cols + r[:, None] * cols + c[None, :]
    g = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32) * tl.load(control + 1)
    g = tl.where(taken, g, 0.0)
    old = tl.load(buffer + offsets, mask=mask, other=0.0)
    new = tl.where(taken, old * momentum, old) + g
    tl.store(buffer + offsets, new, mask=mask)
    if NESTEROV:
        new = g + momentum * new
    tl.store(squares + (tl.load(row + 4) + block) * per_block + inner, tl.sum(tl.sum(new * new, axis=1), axis=0))


@triton.jit
def _muon_inverse_norm_kernel(squares, inverse, per_block, EPS: tl.constexpr, BLOCK: tl.constexpr):
    """inverse[slot] <- 1 / (sqrt(sum of squares[slot]) + EPS), in a fixed order."""
    slot = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, per_block, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(squares + slot * per_block + at, mask=at < per_block, other=0.0)
    tl.store(inverse + slot, 1.0 / (tl.sqrt(tl.sum(total, axis=0)) + EPS))


@triton.jit
def _muon_normalize_kernel(table, owner, hyper, active, control, inverse, out, WIDTH: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, GRAD: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip  # noqa: E501
    """out[slot] <- the update, formed again from gradient and momentum, over its norm."""
    row = table + tl.load(owner + tl.program_id(0)) * 9
    block, _inner, _per_block, r, c, rows, cols = _find_tile(row, BLOCK, ALIGNED)
    buffer = _read_pointer(row + 1, tl.float32, ALIGNED)
    slot = tl.load(row + 4) + block
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    offsets = block * rows * cols + r[:, None] * cols + c[None, :]
    u = tl.load(buffer + offsets, mask=mask, other=0.0)
    if NESTEROV:
        grad = _read_pointer(row, GRAD, ALIGNED)
        momentum = tl.load(hyper + tl.load(row + 6) * WIDTH + MOMENTUM)
        g = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32) * tl.load(control + 1)
        u = tl.where(_is_taken(row, active, control), g, 0.0) + momentum * u
    x = (u * tl.load(inverse + slot)).to(out.dtype.element_ty)
    base = out + slot * rows * cols
    if tl.load(row + 5) > 0:
        tl.store(base + c[:, None] * rows + r[None, :], tl.trans(x), mask=(c < cols)[:, None] & (r < rows)[None, :])
    else:
        tl.store(base + r[:, None] * cols + c[None, :], x, mask=mask)


@triton.jit
def _muon_apply_kernel(table, owner, hyper, active, control, scales, updates, WIDTH: tl.constexpr, LR: tl.constexpr, DECAY: tl.constexpr, CAUTIOUS: tl.constexpr, LOW_BITS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip  # noqa: E501
    """weight <- weight (1 - lr decay) - lr scale update; a bfloat16 weight with its low bits (see `master`)."""
    row = table + tl.load(owner + tl.program_id(0)) * 9
    block, _inner, _per_block, r, c, rows, cols = _find_tile(row, BLOCK, ALIGNED)
    slot = tl.load(row + 4) + block
    mask = (r < rows)[:, None] & (c < cols)[None, :]
    offsets = block * rows * cols + r[:, None] * cols + c[None, :]
    base = updates + slot * rows * cols
    if tl.load(row + 5) > 0:
        flipped = tl.load(
            base + c[:, None] * rows + r[None, :], mask=(c < cols)[:, None] & (r < rows)[None, :], other=0.0
        )
        u = tl.trans(flipped).to(tl.float32)
    else:
        u = tl.load(base + r[:, None] * cols + c[None, :], mask=mask, other=0.0).to(tl.float32)
    settings = hyper + tl.load(row + 6) * WIDTH
    lr = tl.where(_is_taken(row, active, control), tl.load(settings + LR), 0.0)
    rate = lr * tl.load(settings + DECAY)
    if LOW_BITS:
        weight = _read_pointer(row, tl.int16, ALIGNED)
        low = _read_pointer(row + 1, tl.int16, ALIGNED)
        high = tl.load(weight + offsets, mask=mask, other=0).to(tl.int32)
        bits = (high << 16) + tl.load(low + offsets, mask=mask, other=0).to(tl.int32)
        w = bits.to(tl.float32, bitcast=True)
    else:
        weight = _read_pointer(row, tl.float32, ALIGNED)
        w = tl.load(weight + offsets, mask=mask, other=0.0)
    if CAUTIOUS:
        w = w - tl.where(u * w > 0, w * rate, 0.0)
    else:
        w = w * (1 - rate)
    w = w - u * (lr * tl.load(scales + slot))
    if LOW_BITS:
        bits = w.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        tl.store(weight + offsets, high.to(tl.int16), mask=mask)
        tl.store(low + offsets, (bits - (high << 16)).to(tl.int16), mask=mask)
    else:
        tl.store(weight + offsets, w, mask=mask)


# --- launches --------------------------------------------------------------------------------------------------------


def prepare(
    batch: Batch,
    pieces: Sequence[Piece],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    control: Control,
    tables: Tables,
) -> Tensor:
    """`update.prepare` in Triton."""
    local = sum(piece.count for piece in pieces)
    device = control.values.device
    X = torch.empty(local, batch.rows, batch.cols, dtype=working_dtype(control.values), device=device)
    if not local:
        return X
    shared, options, squares = _move(batch, pieces, grads, buffers, control, tables, "prepare")
    inverse = torch.empty(local, dtype=torch.float32, device=device)
    _muon_inverse_norm_kernel[(local,)](squares, inverse, squares.shape[1], EPS=NORM_EPS, BLOCK=256)
    _muon_normalize_kernel[(shared[1].numel(),)](*shared, inverse, X, **options)
    return X


def follow(
    batch: Batch,
    pieces: Sequence[Piece],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    control: Control,
    tables: Tables,
) -> None:
    """`update.follow` by the kernel of `prepare`, with the same bits."""
    if pieces:
        _move(batch, pieces, grads, buffers, control, tables, "follow")


def _move(
    batch: Batch,
    pieces: Sequence[Piece],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    control: Control,
    tables: Tables,
    name: str,
) -> tuple[tuple[Tensor, ...], dict[str, Any], Tensor]:
    """Updates the momentum. Returns arguments and options of the next kernels, and the tiles' squared norms."""
    entries = [(piece.member, piece.local, piece.count) for piece in pieces]
    table, owner, aligned = tables.get((id(batch), name), entries, grads, buffers)
    per_block = count_tiles(batch.rows, batch.cols)
    squares = torch.empty(sum(p.count for p in pieces), per_block, dtype=torch.float32, device=control.values.device)
    shared = (table, owner, control.hyper, control.active, control.values)
    options = {
        "WIDTH": WIDTH, "MOMENTUM": MOMENTUM, "NESTEROV": batch.options.nesterov, "BLOCK": TILE, "ALIGNED": aligned,
        "GRAD": tl.bfloat16 if batch.grad_dtype == torch.bfloat16 else tl.float32,
    }  # fmt: skip
    _muon_momentum_kernel[(owner.numel(),)](*shared, squares, **options)
    return shared, options, squares


def apply(
    batch: Batch,
    updates: Tensor,
    params: Sequence[Tensor],
    low_bits: Sequence[Tensor | None],
    scales: Tensor,
    control: Control,
    tables: Tables,
) -> None:
    """`update.apply` in Triton."""
    entries = [(member, member.first, member.count) for member in batch.members]
    table, owner, aligned = tables.get((id(batch), "apply"), entries, params, low_bits)
    _muon_apply_kernel[(owner.numel(),)](
        table, owner, control.hyper, control.active, control.values, scales, updates,
        WIDTH=WIDTH, LR=LR, DECAY=DECAY, CAUTIOUS=batch.cautious, LOW_BITS=low_bits[0] is not None,
        BLOCK=TILE, ALIGNED=aligned,
    )  # fmt: skip
