"""The layout: which matrices are orthogonalised together, and which rank owns each.

A parameter is a stack of blocks, (count, rows, cols): a 2-D weight is one block, a bank as many as it has matrices, a
convolution one flattened block, a weight with `num_heads` one block per head. Blocks of one shape, or of one shape up
to transposition, with the same options form a batch, whatever their parameters and groups. Each block has a slot in
its batch; a parameter's slots are consecutive. A weight with `split_sizes` may have blocks of several heights (a joint
query, key and value with fewer keys than queries): it is a member of several batches, with a part in each.

Ownership of B blocks over W ranks: rank k owns the B // W slots from k * (B // W) on, and at most one of the B mod W
remaining blocks at the end. So shares differ by at most one, the even part is one reduce-scatter and one all-gather
in place, and only the few remaining blocks are sent one by one. Remaining blocks are dealt to successive ranks across
batches, so that no rank gets all of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from parbank.errors import ConfigError
from parbank.optim.algorithm import MatrixAlgorithm, find_algorithm
from parbank.optim.dtensor import is_sharded
from parbank.optim.master import check_dtype, wide_dtype

LAYOUT_OPTIONS = ("cautious", "num_heads", "split_sizes", "transposed", "flatten", "lr_scale")
"""Options of a group that a layout depends on, besides those of its algorithm."""


@dataclass(frozen=True, eq=False)
class MatrixParam:
    """A parameter of a group whose algorithm works on matrices."""

    param: Tensor
    name: str
    group: int
    """The number of the parameter group: the row of the hyperparameters."""
    index: int
    """The number of the parameter: the row of the flags that say whether any rank has a gradient for it."""
    algorithm: MatrixAlgorithm


def find_matrices(groups: Sequence[dict[str, Any]]) -> list[MatrixParam]:
    """All parameters of matrix algorithms, in the order of the groups."""
    found: list[MatrixParam] = []
    for number, group in enumerate(groups):
        algorithm = find_algorithm(group)
        if isinstance(algorithm, MatrixAlgorithm):
            for position, param in enumerate(group["params"]):
                found.append(MatrixParam(param, name_of(group, position), number, len(found), algorithm))
    return found


@dataclass(frozen=True, eq=False)
class Member:
    """One parameter's part of a batch: neighbouring blocks of one height."""

    param: Tensor
    group: int
    """See `MatrixParam`."""
    index: int
    """See `MatrixParam`."""
    first: int
    """Its first slot in the batch."""
    count: int
    rows: int
    cols: int
    flipped: bool
    """Stored with rows > cols, so transposed when it enters the batch."""
    order: tuple[int, ...]
    """The parameter's dimensions from the outermost to the innermost in memory."""
    transposed: tuple[bool, ...]
    """Per block: whether the logical matrix is the transpose of the stored one."""
    lr_scale: str | None
    part: int = 0
    """The number of the parameter's member, counted over all batches."""
    offset: int = 0
    """The elements of the parameter that lie before this part."""
    shape: tuple[int, ...] = ()
    """The parameter's shape when the layout was planned."""

    def blocks(self, tensor: Tensor) -> Tensor:
        """This part of a tensor of the parameter's shape as (count, rows, cols); a view, if it lies in memory as the
        parameter does."""
        if self.covers(tensor):  # the usual case, in one call: a step makes a hundred of them
            return tensor.view(self.count, self.rows, self.cols)
        flat = tensor.permute(self.order).contiguous().view(-1)
        size = self.count * self.rows * self.cols
        return flat[self.offset : self.offset + size].view(self.count, self.rows, self.cols)

    def covers(self, tensor: Tensor) -> bool:
        """Whether this part is the whole of a tensor of the parameter's shape, whose numbers lie in the order of the blocks."""
        return self._is_plain and tensor.is_contiguous()

    @cached_property
    def _is_plain(self) -> bool:
        """The whole parameter, its dimensions in order."""
        whole = self.count * self.rows * self.cols == self.param.numel()
        return whole and self.order == tuple(range(self.param.ndim))

    @property
    def scales(self) -> list[float]:
        """The learning-rate factor of each block: that of the logical matrix, however it is stored."""
        return [logical_scale(self.lr_scale, self.rows, self.cols, flag) for flag in self.transposed]


@dataclass(frozen=True, eq=False)
class Piece:
    """Neighbouring blocks of one member that this rank owns."""

    member: Member
    block: int
    """The first one, counted within the member."""
    count: int
    local: int
    """Its slot among the blocks of the batch that this rank owns."""
    offset: int
    """Its place in the state that this rank holds for the member."""

    @property
    def slot(self) -> int:
        return self.member.first + self.block

    def take(self, blocks: Tensor) -> Tensor:
        """Its part of the member's blocks."""
        return blocks if self.count == self.member.count else blocks[self.block : self.block + self.count]


@dataclass(eq=False)
class Batch:
    """Blocks (count, rows, cols) with rows <= cols that an algorithm works on together."""

    rows: int
    cols: int
    algorithm: MatrixAlgorithm
    options: Any
    """The result of `algorithm.batch_options` for a group: the same for all blocks."""
    cautious: bool
    dtype: torch.dtype
    """The dtype of the weights."""
    world: int
    whole: bool
    """Every rank holds the state of all blocks, not only of those it owns."""
    first_owner: int
    """The rank that owns the first remaining block; the next blocks go to the following ranks."""
    members: list[Member] = field(default_factory=list)
    _pieces: dict[int, list[Piece]] = field(default_factory=dict)
    """By rank, like the next: found once, since every step asks for them."""
    _others: dict[int, list[Piece]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(member.count for member in self.members)

    @property
    def even(self) -> int:
        """Blocks that every rank owns."""
        return self.count // self.world

    @property
    def leftover(self) -> list[tuple[int, int]]:
        """(slot, owner) of each block beyond the even part."""
        start = self.even * self.world
        return [(slot, (self.first_owner + slot - start) % self.world) for slot in range(start, self.count)]

    def owner(self, slot: int) -> int:
        """The rank that owns a block."""
        start = self.even * self.world
        return slot // self.even if slot < start else (self.first_owner + slot - start) % self.world

    def owned(self, rank: int) -> list[tuple[int, int]]:
        """The ranges of slots that a rank owns, as (first, count); local slots follow this order."""
        ranges = [(rank * self.even, self.even)] + [(slot, 1) for slot, owner in self.leftover if owner == rank]
        return [(first, count) for first, count in ranges if count]

    def pieces(self, rank: int) -> list[Piece]:
        """The blocks that a rank owns, cut at the borders between members."""
        if rank not in self._pieces:
            self._pieces[rank] = self._find_pieces(rank)
        return self._pieces[rank]

    def _find_pieces(self, rank: int) -> list[Piece]:
        found: list[Piece] = []
        held = dict.fromkeys(range(len(self.members)), 0)
        local = 0
        for first, count in self.owned(rank):
            for number, member in enumerate(self.members):
                start, stop = max(first, member.first), min(first + count, member.first + member.count)
                if start < stop:
                    piece = Piece(member, start - member.first, stop - start, local + start - first, held[number])
                    held[number] += piece.count
                    found.append(piece)
            local += count
        return found

    def others(self, rank: int) -> list[Piece]:
        """The blocks that a rank does not own, if it holds their state."""
        if rank not in self._others:
            found: list[Piece] = []
            for piece in [p for other in range(self.world) if other != rank and self.whole for p in self.pieces(other)]:
                found.append(replace(piece, local=sum(p.count for p in found)))
            self._others[rank] = found
        return self._others[rank]

    @cached_property
    def state_shapes(self) -> dict[Member, dict[str, tuple[int, ...]]]:
        """Per member: the state of each block, by name."""
        return {member: self.algorithm.state_shapes(member, self.options) for member in self.members}

    @cached_property
    def grad_dtype(self) -> torch.dtype:
        """The dtype that gradients of this batch are read and reduced in: theirs, if they share one that kernels read.

        From the parameters alone, since some ranks may have no gradient.
        """
        kinds = {grad_dtype_of(member.param) for member in self.members}
        read = kinds & {torch.float32, torch.bfloat16, self.dtype}
        return read.pop() if read == kinds and len(kinds) == 1 else wide_dtype(self.dtype)

    @cached_property
    def scales(self) -> list[float]:
        """The learning-rate factor of each slot."""
        return [scale for member in self.members for scale in member.scales]


def logical_scale(kind: str | None, rows: int, cols: int, transposed: bool) -> float:
    """The shape-dependent factor of the learning rate, for a block of rows x cols that may be stored transposed."""
    if transposed:
        rows, cols = cols, rows
    if kind == "spectral":
        return math.sqrt(max(1.0, rows / cols))
    if kind == "rms":
        return 0.2 * math.sqrt(max(rows, cols))  # an update as large per element as AdamW's typically is
    return 1.0


def plan_batches(
    groups: Sequence[dict[str, Any]], params: Sequence[Tensor] | None, world: int, equal_gradients: bool = False
) -> list[Batch]:
    """Sorts the parameters of matrix algorithms (those in `params`, or all) into batches, the largest first.

    With equal gradients, every rank can keep the whole state itself, if the algorithm does.
    """
    chosen = None if params is None else {id(param) for param in params}
    found: dict[Any, Batch] = {}
    for item in find_matrices(groups):
        param, group = item.param, groups[item.group]
        if (chosen is not None and id(param) not in chosen) or is_sharded(param):
            continue  # DTensors are stepped elsewhere (`sharded`), but keep their index
        options = item.algorithm.batch_options(group)
        for member in find_members(item, group):
            short, long = sorted((member.rows, member.cols))
            key = (short, long, item.algorithm, options, group["cautious"], param.dtype)
            if key not in found:
                whole = world == 1 or (equal_gradients and item.algorithm.follows)
                found[key] = Batch(
                    short, long, item.algorithm, options, group["cautious"], param.dtype, world, whole, first_owner=0
                )
            found[key].members.append(replace(member, first=found[key].count))
    batches = sorted(found.values(), key=lambda batch: -batch.count * batch.rows * batch.cols)
    next_owner = 0
    for batch in batches:
        batch.first_owner = next_owner
        next_owner = (next_owner + len(batch.leftover)) % world
    return batches


def find_members(item: MatrixParam, group: dict[str, Any]) -> list[Member]:
    """The parts of a parameter: one, or one for each run of equal heights in `split_sizes`, for each matrix of a stack."""
    check_dtype(item.param, item.name)  # a model may have been converted since the group was added
    count, rows, cols, order = block_shape(item.param, group, item.name)
    flags = tuple(group["transposed"] or (False,) * count)
    flags = tuple(not flag for flag in flags) if order == (1, 0) else flags
    heights = group["split_sizes"] or (rows,)
    runs = [(count * len(heights), heights[0])] if len(set(heights)) == 1 else _find_runs(heights) * count
    if group["split_sizes"]:
        flags = (False,) * max(blocks for blocks, _ in runs)
    members: list[Member] = []
    offset, shape = 0, tuple(item.param.shape)
    for part, (blocks, height) in enumerate(runs):
        place = (item.group, item.index, 0, blocks, height, cols, height > cols, order)
        members.append(Member(item.param, *place, flags[:blocks], group["lr_scale"], part, offset, shape))
        offset += blocks * height * cols
    return members


def _find_runs(heights: Sequence[int]) -> list[tuple[int, int]]:
    """(how many, height) of neighbouring equal heights."""
    return [(len(list(same)), height) for height, same in groupby(heights)]


def block_shape(param: Tensor, group: dict[str, Any], name: str) -> tuple[int, int, int, tuple[int, ...]]:
    """(count, rows, cols) of a parameter's blocks as they lie in memory, and the memory order of its dimensions.

    The order is (1, 0) for a transposed 2-D weight. With `split_sizes`, rows are those of all its blocks. Refuses shapes
    and layouts that Muon cannot take.
    """
    if param.ndim < 2 or param.numel() == 0:
        raise ConfigError(
            f"{name} has shape {tuple(param.shape)}; Muon takes matrices (rows, cols), stacks (N, rows, cols) and "
            "convolutions. Put it in a group with algorithm='adamw', or let split_parameters(model) sort them"
        )
    # Channels-last convolutions: the columns of the flattened matrix are permuted, which does not affect orthogonalisation.
    strides = param.stride()
    order = tuple(sorted(range(param.ndim), key=lambda dim: (dim != 0, -strides[dim], dim)))
    if param.ndim == 2 and not param.is_contiguous() and param.mT.is_contiguous():
        order = (1, 0)
    elif not param.permute(order).is_contiguous():
        order = tuple(range(param.ndim))
        if not param.is_contiguous():
            raise ConfigError(
                f"{name} has strides {param.stride()} with gaps or overlaps; give Muon param.contiguous()"
            )
    flatten = param.ndim > 3 or bool(group["flatten"])
    stacked = param.ndim == 3 and not flatten
    count, rows = (param.shape[0], param.shape[1]) if stacked else (1, param.shape[0])
    cols = param.numel() // (count * rows)
    if order == (1, 0):
        rows, cols = cols, rows
    if stacked and order != (0, 1, 2):
        raise ConfigError(
            f"{name} is a stack with strides {param.stride()}; its matrices must be contiguous: param.contiguous()"
        )
    heads = group["num_heads"]
    flags = group["transposed"]
    if flags is not None and len(flags) != count:
        raise ConfigError(
            f"{name} is a stack of {count} matrices, but transposed has {len(flags)} flags; give one for each"
        )
    sizes = group["split_sizes"]
    split = f"num_heads={heads}" if heads and heads > 1 else f"split_sizes={sizes}" if sizes else None
    if split is None:
        return count, rows, cols, order
    if order == (1, 0):
        raise ConfigError(
            f"{name} has strides {param.stride()}: {split} splits rows, which must be contiguous: param.contiguous()"
        )
    if flags is not None and any(flags):
        raise ConfigError(
            f"{name}: {split} splits the rows, and a transposed matrix has them in its columns; use one or the other"
        )
    if not heads or heads == 1:
        if sum(sizes) != rows or min(sizes) < 1:
            raise ConfigError(
                f"{name} has {rows} rows, and {split} has {sum(sizes)} in all; give the height of each block of rows"
            )
        return count, rows, cols, order
    if sizes:
        raise ConfigError(f"{name} has both num_heads={heads} and split_sizes={sizes}; use one or the other")
    if rows % heads:
        raise ConfigError(f"{name} has {rows} rows, which num_heads={heads} does not divide")
    return count * heads, rows // heads, cols, order


def grad_dtype_of(param: Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient, which the user may have set; None there allows any."""
    found: torch.dtype = getattr(param, "grad_dtype", None) or param.dtype
    return found


def name_of(group: dict[str, Any], position: int) -> str:
    names = group.get("param_names")
    return names[position] if names else f"parameter {position} of its group"
