"""Whether all ranks train the same thing, asked at the first step; their options again every `INTERVAL` steps.

Ranks with other weights, options or another order of parameters would train on without an error, each towards its own
model. One all-gather of two numbers compares a digest of everything. Only if it differs do ranks exchange the facts,
and the error names the rank and the parameter. Options may part later: ReduceLROnPlateau, for instance, given the loss
of each rank.
"""

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from parbank.errors import RankError
from parbank.optim.communication import Ranks
from parbank.optim.dtensor import is_sharded
from parbank.optim.layout import name_of

if TYPE_CHECKING:
    from parbank.optim.parallel_muon import ParallelMuon

Fact = tuple[str, str, str]
"""(what is compared, its value on this rank, what to do if ranks differ in it)"""

INTERVAL = 128  # steps; a comparison waits for the device

BUILD_ALIKE = "build the optimizer with the same groups, options and order of parameters on every rank"
SCHEDULE_ALIKE = "let schedules write the same numbers on every rank: give ReduceLROnPlateau the mean loss of all ranks"
SAME_WEIGHTS = "give every rank the same seed, or broadcast the weights of rank 0 before the first step"
SAME_GRADIENTS = (
    "reduce_gradients=False says that gradients are equal on all ranks: wrap the model in DistributedDataParallel, or "
    "leave reduce_gradients=False out"
)


class Agreement:
    """Compares ranks now and then."""

    def __init__(self) -> None:
        self._steps = 0

    def look(self, optimizer: "ParallelMuon", ranks: Ranks) -> None:
        """Called before each step, on every rank."""
        if self._steps % INTERVAL == 0:
            check_agreement(optimizer, ranks, options_only=self._steps > 0)
        self._steps += 1


def check_agreement(optimizer: "ParallelMuon", ranks: Ranks, options_only: bool = False) -> None:
    """Raises RankError, on every rank, if the ranks differ. Collective."""
    facts = _find_facts(optimizer, options_only)
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()
    numbers = [int.from_bytes(half, "little", signed=True) for half in (digest[:8], digest[8:])]
    device = optimizer.param_groups[0]["params"][0].device
    digests = ranks.share(torch.tensor(numbers, dtype=torch.int64, device=device))
    if bool((digests == digests[0]).all()):
        return
    everything: list[Any] = [None] * ranks.world
    dist.all_gather_object(everything, facts, group=ranks.group)
    raise RankError(_describe(everything))


def _find_facts(optimizer: "ParallelMuon", options_only: bool) -> list[Fact]:
    groups, claims_equal = optimizer.param_groups, not optimizer.reduce_gradients
    options_remedy = SCHEDULE_ALIKE if options_only else BUILD_ALIKE
    facts = [("the number of parameters", str([len(group["params"]) for group in groups]), BUILD_ALIKE)]
    settings = {"max_norm": optimizer.max_norm, "reduce_gradients": optimizer.reduce_gradients}
    settings["ranks.merged"] = optimizer.ranks.merged
    facts += [(name, repr(value), BUILD_ALIKE) for name, value in settings.items()]
    weights: list[tuple[str, Tensor]] = []
    for number, group in enumerate(groups):
        for key in optimizer.defaults:
            value = group[key].item() if isinstance(group[key], Tensor) else group[key]
            facts.append((f"{key} of group {number}", repr(value), options_remedy))
        for position, param in enumerate(group["params"]):
            name = name_of(group, position) + ("" if "param_names" in group else f" (group {number})")
            facts.append(
                (f"parameter {position} of group {number}", f"{name} {tuple(param.shape)} {param.dtype}", BUILD_ALIKE)
            )
            if not is_sharded(param):
                weights.append((name, param))
    if options_only:  # later, devices of several kinds may round weights differently
        return facts
    facts += _digest("weight", weights, SAME_WEIGHTS)
    if claims_equal:
        facts += _digest("gradient", [(n, p.grad) for n, p in weights if p.grad is not None], SAME_GRADIENTS)
    return facts


def _digest(kind: str, tensors: list[tuple[str, Tensor]], remedy: str) -> list[Fact]:
    """The sum of the bits of each tensor, read as integers."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [t.detach().view(kinds[t.element_size()]).sum(dtype=torch.int64) for _, t in tensors]
    values = torch.stack(sums).tolist() if sums else []
    return [(f"the {kind} of {name}", f"digest {value}", remedy) for (name, _), value in zip(tensors, values)]


def _describe(everything: list[list[Fact]]) -> str:
    """The first fact in which ranks differ. With three ranks or more, the rank that differs is the one in the minority."""
    for facts in zip(*everything):
        usual = Counter(fact[:2] for fact in facts).most_common(1)[0][0]
        for rank, (what, value, remedy) in enumerate(facts):
            if (what, value) != usual:
                other = next(n for n, fact in enumerate(facts) if fact[:2] == usual)
                return f"rank {rank} differs from rank {other} in {what}: {value}, against {usual[1]}; {remedy}"
    return f"ranks differ in the parameters that have gradients; {SAME_GRADIENTS}"
