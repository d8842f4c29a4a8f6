"""Whether all ranks train the same thing, asked at the first step; their options again every `INTERVAL` steps.

Ranks with other weights, options or another order of parameters would train on without an error, each towards its own
model. One all-gather of two numbers compares a digest of everything. Only if it differs do ranks exchange the facts,
and the error names the rank and the parameter. Options may differ later, for instance by a ReduceLROnPlateau that is given
the loss of its own rank.

What `load_state_dict` was given is compared at the next of these checks, and not at once: the checks are at the same
steps on every rank, so that a rank that loads alone cannot make the others hang.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from parbank.errors import RankError
from parbank.optim.algorithm import find_algorithm, is_matrix_group
from parbank.optim.communication import Ranks
from parbank.optim.dtensor import is_sharded
from parbank.optim.groups import find_device
from parbank.optim.layout import name_of

if TYPE_CHECKING:
    from parbank.optim.parallel_muon import ParallelMuon

Fact = tuple[str, str, str]
"""(what is compared, its value on this rank, what to do if ranks differ in it)"""

INTERVAL = 128  # steps; a comparison waits for the device

BUILD_ALIKE = "build the optimizer with the same groups, options and order of parameters on every rank"
SCHEDULE_ALIKE = "let schedules write the same numbers on every rank: give ReduceLROnPlateau the mean loss of all ranks"
SAME_WEIGHTS = "give every rank the same seed, or broadcast the weights of rank 0 before the first step"
SAME_STATE = "load the same checkpoint on every rank"
SAME_GRADIENTS = (
    "reduce_gradients=False says that gradients are equal on all ranks: wrap the model in DistributedDataParallel, or "
    "leave reduce_gradients=False out"
)


NOTHING = "nothing"
"""The value of a fact that a rank does not have."""
CHUNK = 2**20  # numbers that a digest takes at once
ADDED_BY_PYTORCH = "differentiable"  # `load_state_dict` puts it among the defaults


class Agreement:
    """Compares ranks now and then."""

    def __init__(self) -> None:
        self._steps = 0
        self.loaded: list[Fact] = []
        """The digests of the state that was loaded last."""

    def look(self, optimizer: "ParallelMuon", ranks: Ranks) -> None:
        """Called before each step, on every rank."""
        if self._steps % INTERVAL == 0:
            check_agreement(optimizer, ranks, self.loaded, options_only=self._steps > 0)
        self._steps += 1

    def remember(self, groups: Sequence[dict[str, Any]], state_dict: dict[str, Any]) -> None:
        """After a state was loaded: takes its digests. Parts of DTensors differ between ranks and are left out."""
        self.loaded = []
        for number, saved in enumerate(state_dict["param_groups"]):
            for position, key in enumerate(saved["params"]):
                held = state_dict["state"].get(key, {})
                self.loaded += _describe_state("loaded state", _name(groups, number, position), held)


def check_agreement(optimizer: "ParallelMuon", ranks: Ranks, loaded: list[Fact], options_only: bool = False) -> None:
    """Raises RankError, on every rank, if the ranks differ. Collective."""
    facts = _find_facts(optimizer, loaded, options_only)
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()
    numbers = [int.from_bytes(half, "little", signed=True) for half in (digest[:8], digest[8:])]
    digests = ranks.share(torch.tensor(numbers, dtype=torch.int64, device=find_device(optimizer.param_groups)))
    if bool((digests == digests[0]).all()):
        return
    everything: list[Any] = [None] * ranks.world
    dist.all_gather_object(everything, facts, group=ranks.group)
    raise RankError(_describe(everything))


def _find_facts(optimizer: "ParallelMuon", loaded: list[Fact], options_only: bool) -> list[Fact]:
    groups, claims_equal = optimizer.param_groups, not optimizer.reduce_gradients
    options_remedy = SCHEDULE_ALIKE if options_only else BUILD_ALIKE
    facts = [("the number of parameters", str([len(group["params"]) for group in groups]), BUILD_ALIKE)]
    settings = {"max_norm": optimizer.max_norm, "reduce_gradients": optimizer.reduce_gradients}
    settings["ranks.merged"] = optimizer.ranks.merged
    facts += [(name, repr(value), BUILD_ALIKE) for name, value in settings.items()]
    weights: list[tuple[str, Tensor]] = []
    states: list[Fact] = []
    for number, group in enumerate(groups):
        options = {**optimizer.defaults, **find_algorithm(group).defaults}
        for key in sorted(options.keys() - {ADDED_BY_PYTORCH}):
            value = group[key].item() if isinstance(group[key], Tensor) else group[key]
            facts.append((f"{key} of group {number}", repr(value), options_remedy))
        for position, param in enumerate(group["params"]):
            name = _name(groups, number, position)
            facts.append(
                (f"parameter {position} of group {number}", f"{name} {tuple(param.shape)} {param.dtype}", BUILD_ALIKE)
            )
            if not is_sharded(param):
                weights.append((name, param))
                if not options_only and not is_matrix_group(group):  # of a matrix, a rank may hold a part
                    states += _describe_state("state", name, optimizer.state.get(param, {}))
    facts += loaded
    if options_only:  # later, devices of several kinds may round weights differently
        return facts
    facts += _digest("weight", weights, SAME_WEIGHTS) + states
    if claims_equal:
        facts += _digest("gradient", [(n, p.grad) for n, p in weights if p.grad is not None], SAME_GRADIENTS)
    return facts


def _name(groups: Sequence[dict[str, Any]], number: int, position: int) -> str:
    name = name_of(groups[number], position)
    return name if "param_names" in groups[number] else f"{name} (group {number})"


def _describe_state(kind: str, name: str, held: dict[str, Any]) -> list[Fact]:
    """One fact for each part of a parameter's state."""
    parts = {k: torch.tensor(v) if isinstance(v, int | float) else v for k, v in sorted(held.items())}
    plain = [(f"{name}: {k}", v) for k, v in parts.items() if isinstance(v, Tensor) and not is_sharded(v)]
    return _digest(kind, plain, SAME_STATE)


def _digest(kind: str, tensors: list[tuple[str, Tensor]], remedy: str) -> list[Fact]:
    sums = [_sum_bits(tensor) for _, tensor in tensors]
    values = torch.stack(sums).tolist() if sums else []
    return [(f"the {kind} of {name}", f"digest {value}", remedy) for (name, _), value in zip(tensors, values)]


def _sum_bits(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits, read as integers and each multiplied by a number of its place: the same values in
    another order have another sum."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().reshape(-1).view(kinds[tensor.element_size()])
    places = torch.arange(1, min(CHUNK, bits.numel()) + 1, dtype=torch.int64, device=bits.device)
    factors = (places * -7046029254386353131 >> 32).to(torch.int32)  # 2^64 over the golden ratio: spreads neighbours
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, part in enumerate(bits.split(CHUNK)):
        total += (2 * number + 1) * (part * factors[: part.numel()]).sum(dtype=torch.int64)
    return total


def _describe(everything: list[list[Fact]]) -> str:
    """The first fact in which ranks differ. With three ranks or more, the rank that differs is the one in the minority."""
    by_rank = [{what: value for what, value, _ in facts} for facts in everything]
    for what, remedy in {what: remedy for facts in everything for what, _, remedy in facts}.items():
        values = [facts.get(what, NOTHING) for facts in by_rank]
        usual = Counter(values).most_common(1)[0][0]
        for rank, value in enumerate(values):
            if value != usual:
                other = values.index(usual)
                return f"rank {rank} differs from rank {other} in {what}: {value}, against {usual}; {remedy}"
    raise AssertionError("digests differ, and no fact does")
