"""A Muon step of DTensors: FSDP2, tensor parallelism, or both.

FSDP2's `fully_shard` cuts weights along their first dimension (Shard(0)). Momentum is element-wise, so each rank
updates its own rows. Newton-Schulz is not: each matrix is gathered, normalised and in 16 bits, to one rank,
orthogonalised whole, and its rows are sent back. Matrices are distributed so that counts differ by at most one, and one
all-to-all each way carries all matrices of a shape. A stack (N, rows, cols) is cut between its matrices, so each rank
has whole ones and nothing is sent. Weights that are cut in any other way (tensor parallelism, alone or with FSDP2), or
not at all, or whose blocks are orthogonalised by themselves, are gathered by every rank. State is sharded like its
weight, so that `torch.distributed.checkpoint` saves and re-shards it like the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parbank.errors import ConfigError
from parbank.optim.coefficients import resolve_coefficients
from parbank.optim.dtensor import is_sharded, local_of
from parbank.optim.hyper import DECAY, LR, MOMENTUM, send
from parbank.optim.layout import MatrixParam, Member, Piece, find_matrices, find_members, logical_scale
from parbank.optim.master import join_master, split_master, wide_dtype
from parbank.optim.newton_schulz import NORM_EPS, choose_for, iterate, normalize, working_dtype
from parbank.optim.state import key_of
from parbank.optim.update import Control, divide_by_moment, equilibrate, find_row_beta, normalize_rows

MOMENT = "row_moment"


@dataclass(eq=False)
class Sharded:
    """One sharded Muon weight."""

    param: Any
    group: int
    index: int
    stacked: bool
    members: list[Member]
    whole: bool
    """Not cut along dimension 0 alone: every rank gathers the whole update."""
    owner: int = 0

    @property
    def rows(self) -> int:
        return self.members[0].rows

    @property
    def cols(self) -> int:
        return self.members[0].cols

    def split(self, world: int) -> list[int]:
        """How many rows each rank has: equal chunks, the last ones short or empty."""
        chunk = -(-self.rows // world)
        return [max(0, min(chunk, self.rows - rank * chunk)) for rank in range(world)]


def check_sharded(param: Any, group: dict[str, Any], name: str) -> None:
    """Refuses weights that cannot be gathered."""
    if any(placement.is_partial() for placement in param.placements):
        raise ConfigError(
            f"{name} is placed as {param.placements}: a weight that is a sum over ranks; give the optimizer "
            "param.redistribute(...) with Shard or Replicate"
        )
    if not param.is_contiguous():
        raise ConfigError(f"{name} is sharded and has strides {param.stride()}; shard a weight that is contiguous")


def step_dtensors(groups: Sequence[dict[str, Any]], state: Any, control: Control) -> None:
    """One step of all matrices that are DTensors, by their algorithms."""
    params = [item for item in find_matrices(groups) if is_sharded(item.param)]
    for algorithm in dict.fromkeys(item.algorithm for item in params):
        algorithm.step_sharded([item for item in params if item.algorithm is algorithm], groups, state, control)


def step_sharded(params: Sequence[MatrixParam], groups: Sequence[dict[str, Any]], state: Any, control: Control) -> None:
    """Momentum, Newton-Schulz and update of sharded Muon weights."""
    for items in plan(params, groups):
        group = groups[items[0].group]
        updates = [_move_momentum(item, group, state[item.param], control) for item in items]
        if items[0].whole or items[0].stacked:
            find = _orthogonalize_whole if items[0].whole else _orthogonalize_stack
            directions = [find(item, u, groups[item.group], state, control) for item, u in zip(items, updates)]
        else:
            directions = _orthogonalize_gathered(items, updates, groups, state, control)
        for item, direction in zip(items, directions):
            _apply(item, direction, groups[item.group], state[item.param], control)


def plan(params: Sequence[MatrixParam], groups: Sequence[dict[str, Any]]) -> list[list[Sharded]]:
    """Weights that go through Newton-Schulz together, with an owner for each."""
    batches: dict[Any, list[Sharded]] = {}
    for given in params:
        param: Any = given.param
        group = groups[given.group]
        members = find_members(given, group)
        stacked = param.ndim == 3 and not group["flatten"]
        split = (group["num_heads"] or 0) > 1 or bool(group["split_sizes"])
        # The neurons of a transposed matrix are its columns, of which FSDP2 leaves a part on each rank.
        columns = not stacked and any(members[0].transposed) and (group["normuon"] or group["equilibrate"])
        whole = _cut_dimensions(param) != [0] or split or columns
        options = tuple(
            group[name] for name in ("ns_steps", "coefficients", "method", "nesterov", "normuon", "equilibrate")
        )
        key = (whole, stacked, members[0].rows, members[0].cols, *options, id(param.device_mesh))
        item = Sharded(param, given.group, given.index, stacked, members, whole)
        batches.setdefault(key, []).append(item)
    owner = 0
    for items in batches.values():
        if items[0].whole or items[0].stacked:
            continue
        world = _ranks(items[0].param)[2]
        for item in items:
            item.owner = owner % world
            owner += 1
    return list(batches.values())


def _cut_dimensions(param: Any) -> list[int | None]:
    """Per dimension of the mesh that cuts a weight: the weight's dimension, or None for another way of cutting it (FSDP2
    over tensor parallelism interleaves rows)."""
    return [p.dim if p.is_shard() else None for p in param.placements if not p.is_replicate()]


def _ranks(param: Any) -> tuple[Any, int, int]:
    """The ranks that share a weight (with HSDP, those of one replica)."""
    dim = next(n for n, placement in enumerate(param.placements) if placement.is_shard())
    group = param.device_mesh.get_group(dim)
    return group, dist.get_rank(group), dist.get_world_size(group)


def _move_momentum(item: Sharded, group: dict[str, Any], held: dict[str, Any], control: Control) -> Tensor:
    """This rank's part of the update: (its matrices, rows, cols) of a stack, or (1, its rows, cols); of a `whole` one, as
    the weight is cut."""
    param = item.param
    if "momentum_buffer" not in held:
        held["momentum_buffer"] = torch.zeros_like(param, dtype=wide_dtype(param.dtype))
    if param.dtype == torch.bfloat16 and "low_bits" not in held:
        held["low_bits"] = torch.zeros_like(param, dtype=torch.int16)
    buffer = local_of(held["momentum_buffer"])
    grad = local_of(param.grad) if param.grad is not None else torch.zeros_like(buffer)
    taken, momentum = control.taken_by(item.index), control.hyper[item.group, MOMENTUM]
    g = torch.where(taken, grad.to(buffer.dtype) * control.values[1], 0.0)
    buffer.mul_(torch.where(taken, momentum, 1.0)).add_(g)
    update = g + momentum * buffer if group["nesterov"] else buffer.clone()
    if item.whole:
        return update
    count, rows = (update.shape[0], item.rows) if item.stacked else (1, update.shape[0])
    return update.reshape(count, rows, item.cols)


def _orthogonalize_whole(item: Sharded, update: Tensor, group: dict[str, Any], state: Any, control: Control) -> Tensor:
    """Gathers the update on every rank of the mesh; each does the same work and keeps its part of the result, times the
    learning-rate factor of each block."""
    from torch.distributed.tensor import DTensor, Replicate

    param, mesh = item.param, item.param.device_mesh
    cut = DTensor.from_local(update, mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride())
    given = cut.full_tensor().contiguous()
    found = torch.empty_like(given)
    for member in item.members:
        piece = Piece(member, 0, member.count, 0, 0)
        moment = _moment(item, member, state[param], [Replicate()] * mesh.ndim) if group["normuon"] else None
        blocks = _orthogonalize(piece, member.blocks(given), group, moment, control)
        member.blocks(found).copy_(blocks * send(member.scales, torch.float32, blocks.device).view(-1, 1, 1))
    whole = DTensor.from_local(found, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local_of(whole.redistribute(placements=param.placements))


def _orthogonalize_stack(item: Sharded, update: Tensor, group: dict[str, Any], state: Any, control: Control) -> Tensor:
    """The whole matrices of a stack that this rank has."""
    _, rank, world = _ranks(item.param)
    chunk = -(-item.members[0].count // world)
    piece = Piece(item.members[0], rank * chunk, update.shape[0], 0, 0)
    placements = item.param.placements
    moment = _moment(item, item.members[0], state[item.param], placements) if group["normuon"] else None
    return _orthogonalize(piece, update, group, moment, control) if update.numel() else update


def _orthogonalize(
    piece: Piece, update: Tensor, group: dict[str, Any], moment: Tensor | None, control: Control
) -> Tensor:
    """Whole blocks (count, rows, cols), as stored."""
    flipped = piece.member.flipped
    X = (update.mT if flipped else update).contiguous()
    if group["equilibrate"]:
        equilibrate(X, piece)
    X = normalize(X, working_dtype(update))
    triples = resolve_coefficients(group["coefficients"], group["ns_steps"])
    X = iterate(X, triples, choose_for(X, group["method"]))
    if moment is not None:
        normalize_rows(X, [piece], [moment], control)
    return (X.mT if flipped else X).to(update.dtype)


def _moment(item: Sharded, member: Member, held: dict[str, Any], placements: Sequence[Any]) -> Tensor:
    """This rank's part of NorMuon's moments (blocks, neurons), which are created or placed where they are not yet."""
    from torch.distributed.tensor import distribute_tensor, zeros

    mesh, neurons = item.param.device_mesh, max(member.cols if flag else member.rows for flag in member.transposed)
    key = key_of(member, MOMENT, (neurons,), whole=True)
    if key not in held:
        held[key] = zeros(
            member.count, neurons, dtype=wide_dtype(item.param.dtype), device_mesh=mesh, placements=placements
        )
    elif not is_sharded(held[key]):  # from a checkpoint of one process
        held[key] = distribute_tensor(held[key].contiguous(), mesh, placements)
    elif tuple(held[key].placements) != tuple(placements):
        held[key] = held[key].redistribute(placements=placements)
    return local_of(held[key])


def _orthogonalize_gathered(
    items: Sequence[Sharded], updates: Sequence[Tensor], groups: Sequence[dict[str, Any]], state: Any, control: Control
) -> list[Tensor]:
    ranks, rank, world = _ranks(items[0].param)
    group = groups[items[0].group]
    rows, cols = items[0].rows, items[0].cols
    if group["equilibrate"]:
        updates = [u / (torch.linalg.vector_norm(u, dim=-1, keepdim=True) + NORM_EPS) for u in updates]
    squares = torch.stack([update.square().sum() for update in updates])
    dist.all_reduce(squares, group=ranks)
    inverse = (squares.sqrt() + NORM_EPS).reciprocal()
    dtype = working_dtype(updates[0])
    normalized = [(update[0] * scale).to(dtype) for update, scale in zip(updates, inverse)]
    heights = items[0].split(world)
    by_owner = [[n for n, item in enumerate(items) if item.owner == o] for o in range(world)]
    mine = by_owner[rank]
    # There: to each owner, my rows of its matrices. Back: the same, the other way round.
    away = [len(numbers) * heights[rank] for numbers in by_owner]
    home = [len(mine) * height for height in heights]
    sent = torch.cat([normalized[n] for numbers in by_owner for n in numbers])
    received = sent.new_empty(sum(home), cols)
    dist.all_to_all_single(received, sent, home, away, group=ranks)
    if mine:
        parts = [part.view(len(mine), height, cols) for part, height in zip(received.split(home), heights)]
        whole = torch.cat(parts, dim=1)
        tall = rows > cols
        triples = resolve_coefficients(group["coefficients"], group["ns_steps"])
        whole = iterate((whole.mT if tall else whole).contiguous(), triples, choose_for(whole, group["method"]))
        whole = whole.mT if tall else whole
        received = torch.cat([part.reshape(-1, cols) for part in whole.split(heights, dim=1)])
    returned = torch.empty_like(sent)
    dist.all_to_all_single(returned, received, away, home, group=ranks)
    order = [n for numbers in by_owner for n in numbers]
    parts = list(returned.split(heights[rank])) if heights[rank] else [returned] * len(items)
    found = dict(zip(order, parts))
    directions = [found[n][None] for n in range(len(items))]
    if group["normuon"]:
        directions = [_normalize_own_rows(i, d, state[i.param], control) for i, d in zip(items, directions)]
    return directions


def _normalize_own_rows(item: Sharded, direction: Tensor, held: dict[str, Any], control: Control) -> Tensor:
    """NorMuon on the rows (1, rows, cols) of a matrix that this rank has: norms are those of the whole matrix."""
    from torch.distributed.tensor import Replicate, Shard

    member, ranks = item.members[0], _ranks(item.param)[0]
    places = [Replicate() if placement.is_replicate() else Shard(1) for placement in item.param.placements]
    moment = _moment(item, member, held, places)
    return divide_by_moment(
        direction, moment, find_row_beta(member, control), -1, lambda squares: dist.all_reduce(squares, group=ranks)
    )


def _apply(item: Sharded, direction: Tensor, group: dict[str, Any], held: dict[str, Any], control: Control) -> None:
    param = local_of(item.param)
    if not param.numel():
        return
    lr = torch.where(control.taken_by(item.index), control.hyper[item.group, LR], 0.0)
    rate = lr * control.hyper[item.group, DECAY]
    low = local_of(held["low_bits"]) if param.dtype == torch.bfloat16 else None
    weight = param if low is None else join_master(param, low)
    update = direction.to(weight.dtype).reshape(weight.shape)
    if group["cautious"]:
        weight.sub_(weight * (rate * (update * weight > 0)))
    else:
        weight.mul_(1 - rate)
    weight.sub_(update * (lr * _scales(item, group, update)))
    if low is not None:
        split_master(weight, param, low)


def _scales(item: Sharded, group: dict[str, Any], update: Tensor) -> Tensor | float:
    """The learning-rate factor of the logical matrix: one number, or one per matrix of this rank's part of a stack."""
    if item.whole:
        return 1.0  # already in the direction
    flags = group["transposed"] or (False,)
    if not any(flags):
        return logical_scale(group["lr_scale"], item.rows, item.cols, False)
    if not item.stacked:
        return logical_scale(group["lr_scale"], item.rows, item.cols, flags[0])
    _, rank, world = _ranks(item.param)
    chunk = -(-len(flags) // world)
    mine = flags[rank * chunk : rank * chunk + update.shape[0]]
    values = [logical_scale(group["lr_scale"], item.rows, item.cols, flag) for flag in mine]
    return send(values, torch.float32, update.device).view(-1, 1, 1)
