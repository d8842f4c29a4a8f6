"""DTensors. FSDP2 first: weights that `fully_shard` has cut along their first dimension (Shard(0)).

Momentum is element-wise, so each rank updates its own rows. Newton-Schulz is not: each matrix is gathered, normalised
and in 16 bits, to one rank, orthogonalised whole, and its rows are sent back. Matrices are distributed so that counts
differ by at most one, and one all-to-all each way carries all matrices of a shape. A stack (N, rows, cols) is cut
between its matrices, so each rank has whole ones and nothing is sent. Weights that are cut in any other way (tensor
parallelism, alone or with FSDP2), or not at all, are gathered by every rank. State is sharded like its weight, so that
`torch.distributed.checkpoint` saves and re-shards it like the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parbank.errors import ConfigError
from parbank.optim.coefficients import resolve_coefficients
from parbank.optim.dtensor import local_of
from parbank.optim.hyper import DECAY, LR, MOMENTUM, send
from parbank.optim.layout import MatrixParam, block_shape, logical_scale
from parbank.optim.master import join_master, split_master
from parbank.optim.newton_schulz import NORM_EPS, iterate, orthogonalize, working_dtype
from parbank.optim.update import Control


@dataclass(eq=False)
class Sharded:
    """One sharded Muon weight."""

    param: Any
    group: int
    index: int
    stacked: bool
    count: int
    rows: int
    cols: int
    whole: bool
    """Not cut along dimension 0 alone: every rank gathers the whole update."""
    owner: int = 0

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
    if group["normuon"]:
        raise ConfigError(f"{name} is a DTensor, where normuon is not available; leave it out of its group")


def step_sharded(params: Sequence[MatrixParam], groups: Sequence[dict[str, Any]], state: Any, control: Control) -> None:
    """Momentum, Newton-Schulz and update of sharded Muon weights."""
    for items in plan(params, groups):
        group = groups[items[0].group]
        updates = [_move_momentum(item, group, state[item.param], control) for item in items]
        if items[0].whole:
            directions = [_orthogonalize_whole(item, u, groups[item.group]) for item, u in zip(items, updates)]
        elif items[0].stacked:
            directions = [_orthogonalize(u, group) for u in updates]
        else:
            mesh_group, rank, world = _ranks(items[0].param)
            directions = _orthogonalize_gathered(items, updates, group, mesh_group, rank, world)
        for item, direction in zip(items, directions):
            _apply(item, direction, groups[item.group], state[item.param], control)


def plan(params: Sequence[MatrixParam], groups: Sequence[dict[str, Any]]) -> list[list[Sharded]]:
    """Weights that go through Newton-Schulz together, with an owner for each."""
    batches: dict[Any, list[Sharded]] = {}
    for given in params:
        param: Any = given.param
        group = groups[given.group]
        count, rows, cols, _ = block_shape(param, group, given.name)
        stacked = param.ndim == 3 and not group["flatten"]
        whole = _cut_dimensions(param) != [0] or (group["num_heads"] or 0) > 1
        options = tuple(group[name] for name in ("ns_steps", "coefficients", "method", "nesterov"))
        key = (whole, stacked, rows, cols, *options, id(param.device_mesh))
        item = Sharded(param, given.group, given.index, stacked, count, rows, cols, whole)
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


def _taken(item: Sharded, control: Control) -> Tensor:
    return (control.values[0] * control.active[item.index]) > 0


def _move_momentum(item: Sharded, group: dict[str, Any], held: dict[str, Any], control: Control) -> Tensor:
    """This rank's part of the update: (its matrices, rows, cols) of a stack, or (1, its rows, cols); of a `whole` one, as
    the weight is cut."""
    param = item.param
    if "momentum_buffer" not in held:
        held["momentum_buffer"] = torch.zeros_like(param, dtype=torch.float32)
    if param.dtype == torch.bfloat16 and "low_bits" not in held:
        held["low_bits"] = torch.zeros_like(param, dtype=torch.int16)
    buffer = local_of(held["momentum_buffer"])
    grad = local_of(param.grad) if param.grad is not None else torch.zeros_like(buffer)
    taken, momentum = _taken(item, control), control.hyper[item.group, MOMENTUM]
    g = torch.where(taken, grad.float() * control.values[1], 0.0)
    buffer.mul_(torch.where(taken, momentum, 1.0)).add_(g)
    update = g + momentum * buffer if group["nesterov"] else buffer.clone()
    if item.whole:
        return update
    count, rows = (update.shape[0], item.rows) if item.stacked else (1, update.shape[0])
    return update.reshape(count, rows, item.cols)


def _orthogonalize(update: Tensor, group: dict[str, Any]) -> Tensor:
    return orthogonalize(update, group["ns_steps"], group["coefficients"], group["method"])


def _orthogonalize_whole(item: Sharded, update: Tensor, group: dict[str, Any]) -> Tensor:
    """Gathers the update on every rank of the mesh; each does the same work and keeps its part of the result, times the
    learning-rate factor of each block."""
    from torch.distributed.tensor import DTensor, Replicate

    param, mesh = item.param, item.param.device_mesh
    cut = DTensor.from_local(update, mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride())
    found = _orthogonalize(cut.full_tensor().reshape(item.count, item.rows, item.cols), group).float()
    flags = group["transposed"] or (False,) * item.count
    scales = [logical_scale(group["lr_scale"], item.rows, item.cols, flag) for flag in flags]
    found = found * send(scales, torch.float32, found.device).view(-1, 1, 1)
    whole = DTensor.from_local(found.reshape(param.shape), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local_of(whole.redistribute(placements=param.placements))


def _orthogonalize_gathered(
    items: Sequence[Sharded], updates: Sequence[Tensor], group: dict[str, Any], ranks: Any, rank: int, world: int
) -> list[Tensor]:
    rows, cols = items[0].rows, items[0].cols
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
        whole = iterate((whole.mT if tall else whole).contiguous(), triples, group["method"])
        whole = whole.mT if tall else whole
        received = torch.cat([part.reshape(-1, cols) for part in whole.split(heights, dim=1)])
    returned = torch.empty_like(sent)
    dist.all_to_all_single(returned, received, away, home, group=ranks)
    order = [n for numbers in by_owner for n in numbers]
    parts = list(returned.split(heights[rank])) if heights[rank] else [returned] * len(items)
    found = dict(zip(order, parts))
    return [found[n][None] for n in range(len(items))]


def _apply(item: Sharded, direction: Tensor, group: dict[str, Any], held: dict[str, Any], control: Control) -> None:
    param = local_of(item.param)
    if not param.numel():
        return
    lr = torch.where(_taken(item, control), control.hyper[item.group, LR], 0.0)
    rate = lr * control.hyper[item.group, DECAY]
    low = local_of(held["low_bits"]) if param.dtype == torch.bfloat16 else None
    weight = param if low is None else join_master(param, low)
    update = direction.float().reshape(weight.shape)
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
