"""Reduces gradients while backward still computes: matrix by matrix, as each becomes complete.

With a global clip no update can begin before the last gradient has arrived, so that a step waits for the whole
reduce-scatter. Inside `ParallelMuon.reducing()` a hook on each matrix starts its reduction to its owner instead, in place
in the gradient, and the traffic overlaps with the rest of backward. A batch as one reduce-scatter would not: its last
matrix is complete only when backward ends.

Ranks must start the same collectives in the same order, whatever gradients they have. So matrices go in a fixed order,
the reverse of the groups', which is about the order of backward. A matrix that is complete early waits for the matrices
before it. A matrix that backward does not reach is reduced at the end, as zeros.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parbank.config import require
from parbank.optim.communication import Ranks, wait
from parbank.optim.layout import Batch, Member, grad_dtype_of

if TYPE_CHECKING:
    from parbank.optim.parallel_muon import ParallelMuon


SECOND_BACKWARD = (
    "a second backward inside reducing() adds to gradients that are being summed over ranks; accumulate gradients before it, "
    "and put only the last backward of a step inside"
)
GRADIENTS_CHANGED = (
    "gradients were changed between reducing() and step(), while they were being summed over ranks; let the optimizer clip "
    "them (max_norm), or leave out reducing()"
)


class Reductions:
    """The reductions of one backward."""

    def __init__(self, batches: Sequence[Batch], ranks: Ranks) -> None:
        self.batches = batches
        self._ranks = ranks
        parts: dict[Tensor, list[tuple[Batch, Member]]] = {}
        for batch in batches:
            for member in batch.members:
                parts.setdefault(member.param, []).append((batch, member))
        order = sorted(parts, key=lambda param: -parts[param][0][1].index)
        self._parts = [(param, parts[param]) for param in order]
        self._ready: set[int] = set()
        self._next = 0
        self.blocks: dict[Member, Tensor] = {}
        """Per member: its reduced blocks, as far as this rank owns them."""
        self.works: list[Any] = []
        trained = [param for param in order if param.requires_grad]
        self._handles = [param.register_post_accumulate_grad_hook(self._arrive) for param in trained]

    def _arrive(self, param: Tensor) -> None:
        require(id(param) not in self._ready, SECOND_BACKWARD)
        self._ready.add(id(param))
        while self._next < len(self._parts) and id(self._parts[self._next][0]) in self._ready:
            self._start()

    def _start(self) -> None:
        """Starts the reduction of the next matrix."""
        param, parts = self._parts[self._next]
        self._next += 1
        grad = torch.zeros_like(param, dtype=grad_dtype_of(param)) if param.grad is None else param.grad
        for batch, member in parts:
            blocks = member.blocks(grad)
            self.blocks[member] = blocks
            for number in range(member.count):
                owner = batch.owner(member.first + number)
                self.works += self._ranks.reduce_to(blocks[number], owner)

    def cancel(self) -> None:
        """Starts nothing more."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def finish(self) -> None:
        """Starts the remaining reductions, after backward."""
        self.cancel()
        while self._next < len(self._parts):
            self._start()
        self._versions = self._find_versions()

    def check_unchanged(self) -> None:
        """Refuses gradients that other code has written to since `finish`."""
        require(self._find_versions() == self._versions, GRADIENTS_CHANGED)

    def _find_versions(self) -> list[tuple[int, int] | None]:
        grads = [param.grad for param, _ in self._parts]
        return [None if grad is None else (id(grad), grad._version) for grad in grads]


@contextmanager
def reducing(optimizer: "ParallelMuon") -> Iterator[None]:
    """See `ParallelMuon.reducing`."""
    raised = any(group["maximize"] for group in optimizer.param_groups)
    require(not raised, "reducing() sums gradients during backward, and maximize negates them after it; leave out one")
    drop(optimizer)
    begun = Reductions(optimizer.batches(), optimizer.ranks)
    try:
        yield
    except BaseException:
        begun.cancel()
        raise
    begun.finish()
    optimizer.begun = begun


def take(optimizer: "ParallelMuon", batches: Sequence[Batch]) -> Reductions | None:
    """The reductions that backward has started, for the step that uses them."""
    begun, optimizer.begun = optimizer.begun, None
    unchanged = begun is None or begun.batches is batches
    require(unchanged, "parameters or options have changed between reducing() and step(); change them before")
    if begun is not None:
        begun.check_unchanged()
    return begun


def drop(optimizer: "ParallelMuon") -> None:
    """Waits for reductions that no step uses: their gradients are about to change."""
    if optimizer.begun is not None:
        wait(optimizer.begun.works)
        optimizer.begun = None
