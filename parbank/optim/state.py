"""The optimizer's state: shards in `optimizer.state`, whole tensors in `state_dict()`.

On one rank, a parameter's momentum has the parameter's shape. The same holds on several ranks with equal gradients
(DDP): each rank can update all of the momentum, and saving needs no other rank. Otherwise a rank holds the blocks it
owns, (owned, rows, cols). A state dict always has the whole tensor, in the parameter's shape, on every rank. To write a
state dict, ranks gather the shards (one all-gather a batch, so all ranks must call it). To read it, a rank keeps its own
blocks. So a checkpoint does not depend on the number of ranks, on the layout, or on parbank: torch.save,
`torch.distributed.checkpoint` and a single process see the state of an ordinary optimizer. Sharded tensors (DTensor)
would need no gather, but they cut every parameter into equal chunks along its first dimension, which does not match
whole matrices, and reading them needs a device mesh. No arithmetic changes a value on the way.
"""

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parbank.errors import ConfigError
from parbank.optim.communication import Ranks, wait
from parbank.optim.dtensor import is_sharded
from parbank.optim.layout import Batch, Member, Piece
from parbank.optim.master import LIKE_THE_WEIGHT, check_fit, wide_dtype
from parbank.optim.meeting import Meeting

if TYPE_CHECKING:
    from parbank.optim.parallel_muon import ParallelMuon


_log = logging.getLogger("parbank")

SAVE_ON_ALL = (
    "every rank holds a part of the momentum: call state_dict() on every rank and write the file on one, or use DDP with "
    "reduce_gradients=False, where every rank holds all of it"
)


def key_of(member: Member, name: str, shape: tuple[int, ...], whole: bool) -> str:
    """The key of a member's state in the state of its parameter.

    Members of one parameter (`split_sizes`) share a tensor of the parameter's shape. Shards and states of fewer
    dimensions have their own keys: "row_moment", "row_moment.1" and so on.
    """
    return name if member.part == 0 or (whole and len(shape) == 2) else f"{name}.{member.part}"


def init_state(state: Any, batch: Batch, pieces: Sequence[Piece]) -> None:
    """Creates missing states for every parameter of a batch."""
    for member in batch.members:
        held = state[member.param]
        for name, shape in batch.state_shapes[member].items():
            key = key_of(member, name, shape, batch.whole)
            if key not in held:
                held[key] = _zeros(member, pieces, batch.whole, shape)
        if member.param.dtype == torch.bfloat16 and "low_bits" not in held:
            held["low_bits"] = torch.zeros_like(member.param, dtype=torch.int16)


def tensor_of(state: Any, name: str, member: Member, batch: Batch) -> Tensor:
    """The tensor that holds a state of a member."""
    found: Tensor = state[member.param][key_of(member, name, batch.state_shapes[member][name], batch.whole)]
    return found


def find_blocks(state: Any, name: str, pieces: Sequence[Piece], batch: Batch) -> list[Tensor]:
    """The blocks of each piece in the state of its parameter."""
    return [blocks_of(state[piece.member.param], name, piece, batch) for piece in pieces]


def blocks_of(held: dict[str, Tensor], name: str, piece: Piece, batch: Batch) -> Tensor:
    """The blocks of a piece in the state of its parameter."""
    shape = batch.state_shapes[piece.member][name]
    value = held[key_of(piece.member, name, shape, batch.whole)]
    if not batch.whole:
        return value[piece.offset : piece.offset + piece.count]
    return piece.take(piece.member.blocks(value) if len(shape) == 2 else value)


def _zeros(member: Member, pieces: Sequence[Piece], whole: bool, shape: tuple[int, ...]) -> Tensor:
    if whole and len(shape) == 2:
        return torch.zeros_like(member.param, dtype=wide_dtype(member.param.dtype))
    owned = member.count if whole else sum(piece.count for piece in pieces if piece.member is member)
    return torch.zeros(owned, *shape, dtype=wide_dtype(member.param.dtype), device=member.param.device)


def warn_of_copy(optimizer: "ParallelMuon") -> None:
    """Says what a copy of an optimizer lacks: what it was given of the program around it."""
    if optimizer.extra_captured is not None or optimizer.ranks.group is not None:
        _log.warning(
            "a copy of a ParallelMuon has neither its extra_captured nor its process_group: give them to it again"
        )


def find_part(ranks: Ranks, batches: Sequence[Batch], state: Any) -> tuple[int, int] | None:
    """(rank, ranks) where the state that this rank holds is a part of the whole; None where it is all."""
    return (ranks.rank, ranks.world) if state and not all(batch.whole for batch in batches) else None


def check_part(ranks: Ranks, part: tuple[int, int] | None) -> None:
    """Refuses the part of another rank, as a pickled optimizer holds it."""
    if part is not None and part != (ranks.rank, ranks.world):
        raise ConfigError(
            f"this optimizer was copied or pickled on rank {part[0]} of {part[1]} and holds the part of its state that belongs to "
            f"that rank, and here is rank {ranks.rank} of {ranks.world}; save optimizer.state_dict(), which has all of it"
        )


def complete(optimizer: "ParallelMuon", state_dict: dict[str, Any]) -> None:
    """Puts whole tensors in place of shards. Collective, where a rank holds a part."""
    if optimizer.ranks.world == 1 or all(batch.whole for batch in optimizer.batches()):
        return
    Meeting(optimizer.ranks, "ParallelMuon.state_dict()", SAVE_ON_ALL).wait()
    numbers = {id(p): n for n, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    for param, values in gather(optimizer, optimizer.batches()).items():
        state_dict["state"][numbers[id(param)]] = values


def gather(optimizer: "ParallelMuon", batches: Sequence[Batch]) -> dict[Tensor, dict[str, Any]]:
    """The whole state of every parameter of the batches that has one. Collective, where a rank holds a part."""
    sharded = _find_keys([batch for batch in batches if not batch.whole], whole=False)
    params = {member.param: None for batch in batches for member in batch.members if member.param in optimizer.state}
    whole = {p: {k: v for k, v in optimizer.state[p].items() if k not in sharded.get(p, ())} for p in params}
    for batch in batches:
        shapes = batch.state_shapes
        for name in dict.fromkeys(name for found in shapes.values() for name in found if not batch.whole):
            having = [
                m
                for m in batch.members
                if name in shapes[m] and key_of(m, name, shapes[m][name], False) in optimizer.state.get(m.param, {})
            ]
            if having:
                for member, rows in _gather_rows(optimizer, batch, name, having):
                    _assemble(whole[member.param], member, name, shapes[member][name], rows)
    return whole


def _find_keys(batches: Sequence[Batch], whole: bool) -> dict[Tensor, set[str]]:
    """Per parameter: the keys of its members' states."""
    keys: dict[Tensor, set[str]] = {}
    for batch in batches:
        for member, shapes in batch.state_shapes.items():
            keys.setdefault(member.param, set()).update(key_of(member, n, shapes[n], whole) for n in shapes)
    return keys


def _gather_rows(
    optimizer: "ParallelMuon", batch: Batch, name: str, members: Sequence[Member]
) -> list[tuple[Member, Tensor]]:
    """One state of all blocks of some members of a batch, flat, from their owners. Collective."""
    ranks, shapes = optimizer.ranks, batch.state_shapes
    pieces = batch.pieces(ranks.rank)
    width = max(math.prod(found[name]) for found in shapes.values() if name in found)
    owned = sum(piece.count for piece in pieces)
    local = torch.zeros(owned, width, dtype=wide_dtype(batch.dtype), device=members[0].param.device)
    for piece in pieces:
        if piece.member in members:
            values = blocks_of(optimizer.state[piece.member.param], name, piece, batch).reshape(piece.count, -1)
            local[piece.local : piece.local + piece.count, : values.shape[1]] = values
    everything, works = ranks.gather(local, batch)
    wait(works)
    return [(member, everything[member.first : member.first + member.count]) for member in members]


def share_vectors(optimizer: "ParallelMuon", batch: Batch) -> None:
    """Copies states of fewer dimensions than a block from their owners, where every rank holds the whole state."""
    for name in dict.fromkeys(
        n for found in batch.state_shapes.values() for n, shape in found.items() if len(shape) != 2
    ):
        for member, rows in _gather_rows(optimizer, batch, name, batch.members):
            key = key_of(member, name, batch.state_shapes[member][name], batch.whole)
            held = optimizer.state[member.param][key]
            held.copy_(rows[:, : held[0].numel()].reshape(held.shape))


def _assemble(values: dict[str, Any], member: Member, name: str, shape: tuple[int, ...], rows: Tensor) -> None:
    """Puts a state of all blocks of a member into `values`, from flat rows: in the parameter's shape where it has a number
    for each weight."""
    blocks = rows[:, : math.prod(shape)].clone()
    key = key_of(member, name, shape, whole=True)
    if len(shape) != 2:
        values[key] = blocks.view(-1, *shape)
        return
    if key not in values:
        values[key] = torch.empty_like(member.param, dtype=rows.dtype, requires_grad=False)
    member.blocks(values[key]).copy_(blocks.view(-1, *shape))


def scatter(optimizer: "ParallelMuon", whole: dict[Tensor, dict[str, Any]]) -> None:
    """Keeps this rank's part of whole states: the inverse of `gather`, in the current layout."""
    batches, rank = optimizer.batches(), optimizer.ranks.rank
    cut = _find_keys([batch for batch in batches if not batch.whole], whole=True)
    kept = {p: {k: v for k, v in values.items() if k not in cut.get(p, ())} for p, values in whole.items()}
    for batch in batches:
        pieces = batch.pieces(rank)
        for member in [m for m in batch.members if m.param in whole and not batch.whole]:
            mine = [piece for piece in pieces if piece.member is member]
            for name, shape in batch.state_shapes[member].items():
                value = whole[member.param].get(key_of(member, name, shape, whole=True))
                if value is None or not _fits(value, member, shape):
                    continue
                rows = member.blocks(value) if len(shape) == 2 else value
                parts = [rows[piece.block : piece.block + piece.count] for piece in mine]
                key = key_of(member, name, shape, whole=False)
                kept[member.param][key] = torch.cat(parts) if parts else rows[:0].clone()
    for param in {member.param: None for batch in batches for member in batch.members if member.param in kept}:
        optimizer.state[param] = kept[param]


def _fits(value: Tensor, member: Member, shape: tuple[int, ...]) -> bool:
    """Whether a state of fewer dimensions than a block was made for these blocks: other heads have other moments."""
    return len(shape) == 2 or value.shape == (member.count, *shape)


def check_shapes(optimizer: "ParallelMuon", batches: Sequence[Batch]) -> None:
    """Refuses weights that have a state and another shape than in their layout."""
    for member in [member for batch in batches for member in batch.members]:
        if optimizer.state.get(member.param):
            check_fit(member.param.shape, member.shape)


def arrange_state(optimizer: "ParallelMuon", batches: Sequence[Batch]) -> None:
    """Follows weights whose memory order has changed: blocks must be views of weight and state. Moments that no longer fit
    begin anew."""
    for batch in batches:
        for member in batch.members:
            if member.param in optimizer.state:
                held = optimizer.state[member.param]
                for name, shape in batch.state_shapes[member].items() if batch.whole else ():
                    key = key_of(member, name, shape, whole=True)
                    if key in held and not _fits(held[key], member, shape):
                        del held[key]
                for key, value in held.items():
                    if batch.whole and key in LIKE_THE_WEIGHT:
                        check_fit(member.param.shape, value.shape)
                    if value.shape == member.param.shape and not value.permute(member.order).is_contiguous():
                        held[key] = torch.empty_like(member.param, dtype=value.dtype).copy_(value)


def _copy_like(value: Tensor, param: Tensor) -> Tensor:
    """A copy on the parameter's device, in its memory order if it has its shape: blocks must be views of both."""
    if (
        is_sharded(param) and value.shape == param.shape and not is_sharded(value)
    ):  # a whole tensor for a sharded weight
        from torch.distributed.tensor import distribute_tensor

        kind = torch.int32 if value.dtype == torch.int16 else value.dtype  # neither NCCL nor gloo sends int16
        sent = value.to(param.device, kind, copy=True)
        placed = distribute_tensor(sent, param.device_mesh, param.placements)  # type: ignore[attr-defined]
        return placed.to(value.dtype)
    if value.shape == param.shape:
        return torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.detach().to(device=param.device, copy=True)


def load(optimizer: "ParallelMuon", state_dict: dict[str, Any]) -> None:
    """Loads the tensors of a state dict: numbers in the dtype of the weight's arithmetic, and integers unchanged.

    PyTorch has matched the groups before, but has also converted every tensor to its weight's dtype: for bfloat16
    weights the momentum would lose 16 bits.
    """
    numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, param in zip(numbers, params):
        for key, value in state_dict["state"].get(number, {}).items():
            if key == "step":  # PyTorch writes any kind of number
                optimizer.state[param][key] = (
                    torch.as_tensor(value, device=param.device).to(torch.float32, copy=True).view(())
                )
            elif isinstance(value, Tensor):
                wide = value.to(wide_dtype(param.dtype)) if value.is_floating_point() else value
                optimizer.state[param][key] = _copy_like(wide, param)
    optimizer.forget_layout()
    if optimizer.ranks.world > 1:
        scatter(optimizer, {param: dict(optimizer.state[param]) for param in params if param in optimizer.state})
