"""The arithmetic of a step, in three phases, for any number of ranks: the part that a CUDA graph captures.

1. collect: reduces the gradients of each batch to the rank that owns them, while AdamW runs; then one norm over all
   gradients, on the device.
2. orthogonalize: batch by batch, the owner updates the momentum, runs Newton-Schulz, and sends the updates while the
   next batch is computed. With a clip AdamW runs here, during the last all-gather: the clip is global, so that no
   update can begin before the last gradient has arrived.
3. apply: every rank subtracts the same updates from the same weights.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parbank.config import require
from parbank.optim import backward, kernels, state, update
from parbank.optim.algorithm import ElementwiseAlgorithm, Settings, Work, find_algorithm
from parbank.optim.collect import SCALES_DIFFER, Collected, Small, collect, measure, place_gradients
from parbank.optim.communication import wait
from parbank.optim.groups import are_sharded, find_raised, negate
from parbank.optim.hyper import DECAY, LR
from parbank.optim.layout import Batch, Piece
from parbank.optim.sharded import step_dtensors
from parbank.optim.update import Control

if TYPE_CHECKING:
    from parbank.optim.parallel_muon import ParallelMuon


def run(optimizer: "ParallelMuon") -> None:
    """One step on the current gradients and hyperparameters."""
    ranks, buffers, groups = optimizer.ranks, optimizer.buffers, optimizer.param_groups
    batches = optimizer.batches()
    pieces = [batch.pieces(ranks.rank) for batch in batches]
    sharded = are_sharded(groups, optimizer.reduce_gradients and ranks.world > 1)
    if sharded:
        place_gradients(groups, ranks.world, optimizer.reduce_gradients)
    reduce = optimizer.reduce_gradients and not sharded
    staging = buffers.staging if buffers.captured else None
    early = optimizer.max_norm is None
    others = [batch.others(ranks.rank) for batch in batches]
    needed = [mine + rest for mine, rest in zip(pieces, others)]
    options = (ranks, reduce, buffers.constant, staging, early, backward.take(optimizer, batches))
    require(getattr(optimizer, "grad_scale", None) is None or not reduce or ranks.world == 1, SCALES_DIFFER)
    raised = find_raised(groups)
    negate(raised)  # after the last check: a step that is refused leaves gradients alone
    collected = collect(groups, batches, needed, *options)
    if collected.spoilt is not None:
        factor = torch.full((), 1 / collected.divisor, dtype=torch.float32, device=buffers.device)
        _step_small(optimizer, collected, torch.stack([1 - collected.spoilt.float(), factor]))
    control = _measure(optimizer, collected)
    flying: list[tuple[Batch, Tensor, list[Any]]] = []
    for number, (batch, mine, rest) in enumerate(zip(batches, pieces, others)):
        grads, collected.pieces[number] = collected.pieces[number], []  # freed with this batch
        flying.append((batch, *_share_updates(optimizer, batch, mine, grads[: len(mine)], control)))
        if batch.whole and batch.world > 1:
            batch.algorithm.follow(_find_work(optimizer, batch, rest, grads[len(mine) :], control))
            state.share_vectors(optimizer, batch)
        # One batch in flight while the next is worked on; on one rank, none.
        while len(flying) > (ranks.world > 1):
            _apply(optimizer, *flying.pop(0), control)
    if collected.spoilt is None:
        _step_small(optimizer, collected, control.values)
    if sharded:
        step_dtensors(groups, optimizer.state, control)
    for batch, updates, works in flying:
        _apply(optimizer, batch, updates, works, control)
    negate(raised)  # exact: gradients are as if nothing had been done


def _measure(optimizer: "ParallelMuon", collected: Collected) -> Control:
    """The global norm, the clip, and whether the step is taken: all on the device."""
    buffers = optimizer.buffers
    grad_scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    norm, values = measure(collected, optimizer.ranks, buffers.hyper.max_norm, grad_scale, found_inf)
    buffers.grad_norm.copy_(norm)
    torch.eq(values[0], 0, out=buffers.skipped)
    buffers.skipped_in_a_row.add_(1).mul_(buffers.skipped)
    active = collected.active
    if active is None:
        active = buffers.constant([1.0] * sum(len(group["params"]) for group in optimizer.param_groups))
    return Control(values, buffers.hyper.values, active)


def _share_updates(
    optimizer: "ParallelMuon", batch: Batch, pieces: list[Piece], grads: list[Tensor], control: Control
) -> tuple[Tensor, list[Any]]:
    """Computes the updates of the blocks that this rank owns, and starts the all-gather. Returns the tensor that will hold all
    updates of the batch, and the pending collectives."""
    state.init_state(optimizer.state, batch, pieces)
    work = _find_work(optimizer, batch, pieces, grads, control)
    return optimizer.ranks.gather(batch.algorithm.directions(work), batch)


def _find_work(
    optimizer: "ParallelMuon", batch: Batch, pieces: list[Piece], grads: list[Tensor], control: Control
) -> Work:
    states, buffers = optimizer.state, optimizer.buffers

    def blocks(name: str) -> list[Tensor]:
        held = [state.tensor_of(states, name, piece.member, batch) for piece in pieces]
        key = (id(batch), name, id(pieces))  # the batch keeps its lists of pieces
        return buffers.views.get(key, held, lambda: state.find_blocks(states, name, pieces, batch))

    return Work(batch, pieces, grads, control, blocks, buffers.tables, captured=buffers.captured)


def _step_small(optimizer: "ParallelMuon", collected: Collected, values: Tensor) -> None:
    """The groups of element-wise algorithms; `values` as in Control."""
    for small in collected.small:
        _step_group(optimizer, small, values)


def _step_group(optimizer: "ParallelMuon", small: Small, values: Tensor) -> None:
    """Steps one group. A parameter without a gradient here may have one on another rank: then it is stepped separately."""
    buffers, group = optimizer.buffers, optimizer.param_groups[small.group]
    hyper = buffers.hyper.values[small.group]
    algorithm = find_algorithm(group)
    assert isinstance(algorithm, ElementwiseAlgorithm)
    states = [optimizer.state[param] for param in small.params]
    for state_of_param, param in zip(states, small.params):
        algorithm.prepare_state(state_of_param, param)
    taken, factor = values
    together = [n for n, flag in enumerate(small.flags) if flag is None]
    alone = [n for n, flag in enumerate(small.flags) if flag is not None]
    for numbers in [together, *([n] for n in alone)]:
        flag = small.flags[numbers[0]] if numbers else None
        mine = taken if flag is None else taken * (flag > 0)
        settings = Settings(hyper[LR], hyper[DECAY], factor, mine, captured=buffers.captured)
        params = [small.params[n] for n in numbers]
        grads = [small.grads[n] for n in numbers]
        algorithm.step(params, grads, [states[n] for n in numbers], group, settings)


def _apply(optimizer: "ParallelMuon", batch: Batch, updates: Tensor, works: list[Any], control: Control) -> None:
    """Subtracts the updates of a batch from the weights, once they have arrived."""
    wait(works)
    buffers, members = optimizer.buffers, batch.members
    weights = [member.param for member in members]
    params = buffers.views.get((id(batch), "weights"), weights, lambda: [m.blocks(m.param) for m in members])
    low: list[Tensor | None] = [None] * len(members)
    if batch.dtype == torch.bfloat16:
        low = [member.blocks(optimizer.state[member.param]["low_bits"]) for member in members]
    scales = buffers.constant(batch.scales)
    if kernels.use_kernels(batch, control):
        kernels.apply(batch, updates, params, low, scales, control, buffers.tables)
    else:
        update.apply(batch, updates, params, low, scales, control)
