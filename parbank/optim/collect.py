"""The first third of a step: finds the gradients, starts their reduction, and computes the global norm.

Three cases, one result. On one rank, gradients are used in place. On ranks with equal gradients (DDP), the same, and
each rank uses the blocks it owns. On ranks with their own gradients, every batch is summed at its owners, and the
small parameters are summed everywhere, in one flat sum. That sum also carries a flag per parameter, "this rank has a
gradient for it". A parameter without a gradient on any rank is left alone, and no host needs to know.

The flat sum goes first, since nccl runs collectives in order, and the batches overlap with the update of the small
parameters. For that the sum carries one more flag, "this rank has a non-finite gradient". Without a clip, the small
parameters need nothing else from other ranks. With a clip they wait for the norm, and so for every batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from parbank.errors import ConfigError
from parbank.optim.algorithm import is_matrix_group
from parbank.optim.backward import Reductions
from parbank.optim.communication import Ranks, wait
from parbank.optim.dtensor import check_mesh, count_copies, is_sharded, local_of, place_gradient
from parbank.optim.groups import find_device
from parbank.optim.layout import Batch, Member, Piece, name_of
from parbank.optim.master import wide_dtype

SCALES_DIFFER = (
    "a GradScaler keeps its own scale on every rank, and gradients of different scales cannot be averaged; train in "
    "bfloat16 without a scaler, or use DDP with reduce_gradients=False"
)
CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass
class Small:
    """The parameters of one group with an element-wise algorithm that take part in this step."""

    group: int
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    flags: list[Tensor | None] = field(default_factory=list)
    """None where this rank has a gradient; otherwise, on the device, how many ranks have one."""


@dataclass
class Collected:
    """The gradients of a step."""

    pieces: list[list[Tensor]] = field(default_factory=list)
    """Per batch, per piece this rank owns: its blocks, contiguous; `Work.grads` gives them their shape."""
    small: list[Small] = field(default_factory=list)
    split: list[Tensor] = field(default_factory=list)
    """Terms of the norm that are partial, and summed over ranks."""
    copied: dict[int, list[Tensor]] = field(default_factory=dict)
    """The same, by the number of ranks that hold each term: of DTensors."""
    shared: list[Tensor] = field(default_factory=list)
    """Terms of the norm that are equal on every rank."""
    active: Tensor | None = None
    """Per parameter of a matrix algorithm: how many ranks have a gradient; None where that is all of them."""
    squares: Tensor | None = None
    """The sum of squares of the equal terms, if computed already: an update may scale gradients in place, as AdamW does."""
    spoilt: Tensor | None = None
    """On the device: whether some rank has a non-finite gradient. None: the norm shows it."""
    flying: list[Any] = field(default_factory=list)
    """The pending sums of the batches: `measure` waits for them."""
    divisor: int = 1
    """Gradients are sums over so many ranks."""


def collect(
    groups: Sequence[dict[str, Any]],
    batches: Sequence[Batch],
    pieces: Sequence[Sequence[Piece]],
    ranks: Ranks,
    reduce: bool,
    constant: Callable[[Sequence[float]], Tensor],
    staging: dict[int, Tensor] | None,
    early: bool = False,
    begun: Reductions | None = None,
) -> Collected:
    """Finds the gradients, starts the reductions, and lists the parts of the norm.

    `constant` puts numbers on the device and caches them. `staging` keeps the memory that scattered gradients are
    copied to, for a step that needs fixed addresses. `early`: check whether gradients are finite before the batches
    arrive, if there is anything to wait for. `begun`: the reductions that backward has started.
    """
    if ranks.world > 1 and reduce:
        return _reduce(groups, batches, pieces, ranks, constant, staging, early, begun)
    collected = Collected(small=_find_small(groups))
    for batch, mine in zip(batches, pieces):
        blocks = {m: _place_blocks(m, batch.grad_dtype, staging, whole=ranks.world == 1) for m in batch.members}
        collected.pieces.append([p.take(blocks[p.member]) for p in mine])
        # All parts of a weight with `split_sizes` have one gradient: it counts once.
        collected.shared += [m.param.grad for m in batch.members if m.param.grad is not None and m.part == 0]
    sharded = [param for group in groups for param in group["params"] if is_sharded(param)]
    collected.shared += [g for small in collected.small for g in small.grads if not (sharded and is_sharded(g))]
    for param in sharded:
        held = collected.copied.setdefault(
            count_copies(param, ranks.world), []
        )  # by parameters: ranks must agree on the keys
        if param.grad is not None and local_of(param.grad).numel():
            held.append(local_of(param.grad))
    if ranks.world > 1:
        collected.active = constant(_flags(groups, matrices=True)).clone()
        ranks.sum(collected.active)
    return collected


def _reduce(
    groups: Sequence[dict[str, Any]],
    batches: Sequence[Batch],
    pieces: Sequence[Sequence[Piece]],
    ranks: Ranks,
    constant: Callable[[Sequence[float]], Tensor],
    staging: dict[int, Tensor] | None,
    early: bool,
    begun: Reductions | None,
) -> Collected:
    collected = Collected(divisor=ranks.world)
    rest = [(n, param) for n, group in enumerate(groups) if not is_matrix_group(group) for param in group["params"]]
    matrices = sum(len(group["params"]) for group in groups if is_matrix_group(group))
    device = find_device(groups)
    parts = [
        torch.zeros(p.numel(), dtype=wide_dtype(p.dtype), device=device)
        if p.grad is None
        else p.grad.reshape(-1).to(wide_dtype(p.dtype))
        for _, p in rest
    ]
    parts.append(constant([*_flags(groups, matrices=True), *_flags(groups, matrices=False)]))
    if early:
        wait([] if begun is None else begun.works)  # its sums lie in the gradients
        parts.append(_is_spoilt(groups, device))
    flat = torch.cat(parts)
    summing = ranks.sum(flat, async_op=True)
    flats: list[Tensor] = []
    for batch in batches if begun is None else ():  # the largest first
        flats.append(flatten_batch(batch, staging))
        collected.flying += ranks.reduce(flats[-1], batch)
    wait(summing)
    sizes = [p.numel() for _, p in rest]
    *grads, active, present, spoilt = flat.split([*sizes, matrices, len(rest), int(early)])
    collected.active = active.float()  # kernels read float32; a float64 gradient makes the sum float64
    small_ones = flat[: sum(sizes)]
    if early:
        collected.squares = _sum_of_squares([small_ones] if rest else [], device)
        collected.spoilt = (spoilt[0] > 0) | ~torch.isfinite(collected.squares)
    by_group: dict[int, Small] = {}
    for position, ((number, param), grad) in enumerate(zip(rest, grads)):
        small = by_group.setdefault(number, Small(number))
        small.params.append(param)
        small.grads.append(grad.view(param.shape))
        small.flags.append(present[position] if param.grad is None else None)
    collected.small = list(by_group.values())
    collected.shared = [small_ones] if rest and not early else []
    if begun is not None:
        collected.flying += begun.works
        for batch, mine in zip(batches, pieces):
            found = [p.take(begun.blocks[p.member]) for p in mine]
            if any(blocks.dtype != batch.grad_dtype for blocks in found):
                wait(begun.works)
            collected.pieces.append([blocks.to(batch.grad_dtype) for blocks in found])
    for mine, summed in zip(pieces, flats):
        collected.pieces.append(
            [summed[p.slot : p.slot + p.count].view(p.count, p.member.rows, p.member.cols) for p in mine]
        )
    collected.split = [blocks for mine in collected.pieces for blocks in mine]
    return collected


def _is_spoilt(groups: Sequence[dict[str, Any]], device: torch.device) -> Tensor:
    """(1,): 1.0 if a gradient of this rank is not finite, else 0.0."""
    grads = [p.grad for group in groups for p in group["params"] if p.grad is not None and p.grad.numel()]
    if not grads:
        return torch.zeros(1, dtype=torch.float32, device=device)
    return (~torch.isfinite(_find_norms(grads, torch.inf)).all()).float().view(1)


def flatten_batch(batch: Batch, staging: dict[int, Tensor] | None = None) -> Tensor:
    """A batch's gradients as (slots, elements): the bank's own gradient, adjacent tensors in place, or one copy in the
    batch's dtype of gradients."""
    blocks = [member.blocks(grad_of(member)) for member in batch.members]
    first = blocks[0]
    size = batch.rows * batch.cols
    step = first.element_size() * size
    storage = first.untyped_storage().data_ptr()
    if all(
        block.dtype == batch.grad_dtype
        and block.data_ptr() == first.data_ptr() + step * member.first
        and block.untyped_storage().data_ptr() == storage
        for block, member in zip(blocks, batch.members)
    ):
        return first.as_strided((batch.count, size), (size, 1))
    flat = None if staging is None else staging.get(id(batch))
    if flat is None:
        flat = torch.empty(batch.count, size, dtype=batch.grad_dtype, device=first.device)
    if staging is not None:
        staging[id(batch)] = flat
    slots = [flat[m.first : m.first + m.count] for m in batch.members]
    torch._foreach_copy_(slots, [block.view(block.shape[0], size) for block in blocks])
    return flat


def _place_blocks(member: Member, dtype: torch.dtype, staging: dict[int, Tensor] | None, *, whole: bool) -> Tensor:
    """A gradient's blocks in a dtype: in place, or a copy where it has another dtype or lies in memory in another order than
    its weight. With `staging` the copy has the same address at every step. `whole`: all blocks are used together. The
    gradient itself then stands for them, without a view, which would cost the host time (docs/log/optimizer.md)."""
    grad = grad_of(member)
    if whole and grad.dtype == dtype and member.covers(grad):
        return grad
    blocks = member.blocks(grad)
    if staging is None:
        return blocks if grad.dtype == dtype else blocks.to(dtype)
    if grad.dtype == dtype and blocks.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr():
        return blocks
    if id(member) not in staging:
        staging[id(member)] = torch.empty_like(blocks, dtype=dtype)
    return staging[id(member)].copy_(blocks)


def grad_of(member: Member) -> Tensor:
    grad = member.param.grad
    return torch.zeros_like(member.param) if grad is None else grad


def _find_small(groups: Sequence[dict[str, Any]]) -> list[Small]:
    """AdamW writes to gradients: parameters that share one get copies."""
    small: list[Small] = []
    seen: set[int] = set()
    for number, group in enumerate(groups):
        if is_matrix_group(group):
            continue
        found = Small(number)
        for param in group["params"]:
            grad = param.grad
            if grad is not None:
                place = local_of(grad).data_ptr()
                found.params.append(param)
                found.grads.append(grad.clone() if place in seen else grad)
                found.flags.append(None)
                seen.add(place)
        if found.params:
            small.append(found)
    return small


def _flags(groups: Sequence[dict[str, Any]], *, matrices: bool) -> list[float]:
    """1.0 for each parameter with a gradient on this rank, 0.0 for the others: for matrix algorithms, or for the rest."""
    chosen = [group for group in groups if is_matrix_group(group) == matrices]
    return [float(p.grad is not None) for group in chosen for p in group["params"]]


def measure(
    collected: Collected, ranks: Ranks, max_norm: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The global gradient norm, and (1 or 0 for a step taken or skipped, factor on every gradient), both on the device."""
    wait(collected.flying)
    device = max_norm.device
    # Scaled gradients may be finite and their squares not; the scaler, which sees no overflow, would never lower its scale.
    dtype = torch.float32 if grad_scale is None else torch.float64
    squares = collected.squares
    total = _sum_of_squares(collected.shared, device, dtype) if squares is None else squares
    if ranks.world > 1 or collected.copied:
        partial = _sum_of_squares(collected.split, device, dtype)
        collected.split = []  # its gradients are freed batch by batch
        for copies, grads in sorted(collected.copied.items()):
            partial = partial + _sum_of_squares(grads, device, dtype) / copies
        ranks.sum(partial)
        total = total + partial
    norm, factor = total.sqrt(), None  # None: 1, without launches for it
    if collected.divisor > 1 or grad_scale is not None:
        factor = torch.full((), 1.0 / collected.divisor, dtype=torch.float32, device=device)
        if grad_scale is not None:
            factor = factor / grad_scale.squeeze()
        norm = norm * factor
    norm = norm.float()
    taken = norm < torch.inf  # one launch, where isfinite takes four
    if found_inf is not None:
        taken = taken & (found_inf.squeeze() == 0)
    if collected.spoilt is not None:
        taken = taken & ~collected.spoilt
    clip = (max_norm / (norm + CLIP_EPS)).clamp(max=1.0)
    return norm, torch.stack([taken.float(), clip if factor is None else clip * factor])


def _sum_of_squares(tensors: list[Tensor], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=dtype, device=device)
    return _find_norms(tensors, 2, dtype).square().sum()


def _find_norms(tensors: list[Tensor], order: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """The norm of each tensor; that of a float64 tensor is taken in float64."""
    if torch.float64 in [tensor.dtype for tensor in tensors]:
        return torch.stack([torch.linalg.vector_norm(tensor, order).to(dtype) for tensor in tensors])
    return torch.stack(torch._foreach_norm(tensors, order, dtype=dtype))


def place_gradients(groups: Sequence[dict[str, Any]], world: int, reduce: bool) -> None:
    """Completes the gradients of DTensors, on every rank in the same order."""
    for group in groups:
        for position, param in enumerate(group["params"]):
            if is_sharded(param):
                check_mesh(param, name_of(group, position), world, reduce)
                place_gradient(param)


def check_gradients(groups: Sequence[dict[str, Any]]) -> torch.device:
    """The device of all parameters. Refuses gradients that cannot be used."""
    device = find_device(groups)
    for group in groups:
        for position, param in enumerate(group["params"]):
            if param.device != device:
                raise ConfigError(
                    f"{name_of(group, position)} is on {param.device} and others are on {device}; one optimizer works on one "
                    "device: make one for each"
                )
            grad = param.grad
            if grad is not None and (grad.is_sparse or not grad.is_floating_point() or grad.shape != param.shape):
                _refuse_gradient(param, grad, name_of(group, position))
    if device.type == "meta":
        raise ConfigError(
            "the parameters are on the meta device and have no values; call model.to_empty(device=...) and set its weights first"
        )
    return device


def _refuse_gradient(param: Tensor, grad: Tensor, name: str) -> NoReturn:
    if grad.is_sparse:
        raise ConfigError(f"{name} has a sparse gradient; use nn.Embedding(..., sparse=False)")
    if not grad.is_floating_point():
        raise ConfigError(f"{name} has a gradient of {grad.dtype}; ParallelMuon takes real floating-point gradients")
    raise ConfigError(
        f"{name} has shape {tuple(param.shape)} and a gradient of shape {tuple(grad.shape)}, computed before the weight was "
        "replaced; call zero_grad() when you replace weights"
    )
