"""The collectives of a step. One rank runs the same code and skips them. (The overlap: parameter-golf #399.)

The layout alone fixes the pattern, never which gradients exist, so no rank can wait for a rank that took another
branch.

Per batch of B blocks over W ranks, the even part takes two collectives in place: a reduce-scatter of gradients and an
all-gather of updates. Each of the B mod W remaining blocks is reduced to its owner and broadcast from it: exactly its
bytes. Padding to a multiple of W would send up to W - 1 empty blocks and copy every gradient first. With many ranks
and small blocks, so many operations run far below the link's bandwidth: `Ranks.merged` makes them one all-reduce a
batch, of up to twice the bytes (docs/design/communication.md). Gradients keep their dtype. Updates travel in Newton-Schulz's
16 bits (32 on a CPU), and every rank applies all of them; gathering float32 weights would move twice the bytes.

Sums are not divided by W here: the mean is part of the factor that multiplies every gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parbank.errors import ConfigError
from parbank.optim.layout import Batch

# PyTorch 2.13 renamed these; the old names still work there, with a warning.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Ranks:
    """This process's rank in the group, and the collectives of a step."""

    merged = False
    """One all-reduce for all remaining blocks of a batch. Set it on every rank, before the first step. Off: the gain is
    modelled, not measured."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        here = dist.is_available() and dist.is_initialized()
        self.world = dist.get_world_size(group) if here else 1
        self.rank = dist.get_rank(group) if here else 0

    def check(self) -> None:
        """Refuses an optimizer that was made for another number of ranks: it would train each rank separately."""
        if self.group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() != self.world:
            raise ConfigError(
                f"the optimizer was made for {self.world} rank(s) and there are {dist.get_world_size()} now; call "
                "init_process_group first, or pass process_group to work with some of the ranks only"
            )

    def reduce(self, flat: Tensor, batch: Batch) -> list[Any]:
        """Starts summing a batch's gradients, (slots, elements) and in place, at the owner of each slot."""
        works = []
        even = batch.even
        if even:
            mine = flat[self.rank * even : (self.rank + 1) * even]
            works.append(_reduce_scatter(mine, flat[: even * self.world], group=self.group, async_op=True))  # in place
        if self.merged and batch.leftover:
            return [*works, dist.all_reduce(flat[even * self.world :], group=self.group, async_op=True)]
        for slot, owner in batch.leftover:
            works.append(dist.reduce(flat[slot], group_dst=owner, group=self.group, async_op=True))
        return works

    def reduce_to(self, block: Tensor, owner: int) -> list[Any]:
        """Starts summing one block at its owner, in place."""
        return [dist.reduce(block, group_dst=owner, group=self.group, async_op=True)]

    def gather(self, local: Tensor, batch: Batch) -> tuple[Tensor, list[Any]]:
        """Starts sharing the updates of the blocks that this rank owns. Returns the tensor that will hold all of them."""
        if self.world == 1:
            return local, []
        everything = torch.empty(batch.count, *local.shape[1:], dtype=local.dtype, device=local.device)
        works = []
        even = batch.even
        if even:
            works.append(_all_gather(everything[: even * self.world], local[:even], group=self.group, async_op=True))
        merged = everything[even * self.world :] if self.merged and batch.leftover else None
        if merged is not None:
            merged.zero_()  # the terms of the other ranks: x + 0 is exact
        for slot, owner in batch.leftover:
            if owner == self.rank:
                everything[slot].copy_(local[even])
            if merged is None:
                works.append(dist.broadcast(everything[slot], group_src=owner, group=self.group, async_op=True))
        if merged is not None:
            works.append(dist.all_reduce(merged, group=self.group, async_op=True))
        return everything, works

    def share(self, numbers: Tensor) -> Tensor:
        """(ranks, numbers): the numbers of every rank."""
        everything = torch.empty(self.world, len(numbers), dtype=numbers.dtype, device=numbers.device)
        _all_gather(everything.view(-1), numbers, group=self.group)
        return everything

    def sum(self, tensor: Tensor, async_op: bool = False) -> list[Any]:
        """Starts (or completes) the sum of a tensor over all ranks, in place."""
        if self.world == 1:
            return []
        work = dist.all_reduce(tensor, group=self.group, async_op=async_op)
        return [work] if async_op else []


def wait(works: Sequence[Any]) -> None:
    """Makes the current stream (on a CPU: the caller) wait for collectives."""
    for work in works:
        work.wait()
