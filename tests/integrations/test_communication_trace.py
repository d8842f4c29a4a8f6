"""The model of communication (benchmarks/communication.py) against real steps over gloo, on two to four ranks: the same
operations on as many bytes, in the same order, with the same work and the same waits between them."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parbank.config import override
from parbank.data.dataset import open_dataset
from parbank.model import GPT
from parbank.optim import ParallelMuon, collect, step
from parbank.optim.algorithms import muon
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from parbank.training.trainer import Trainer
from tests.distributed import run_distributed_test

pytestmark = pytest.mark.integration

BANKS = [
    (5, 8, 8),
    (3, 8, 16),
    (6, 16, 8),
    (1, 6, 6),
]  # two of one shape up to transposition; a batch smaller than ranks
REST = [(20, 8), (8,), ()]
WORLDS = (2, 3, 4)
ON_A_CPU = 4  # bytes of a number in an update
CLOCK = ("all_reduce", 40)  # begins a step of the trainer
OPERATIONS = {  # of the dispatcher: our name, and the position of the whole tensor among its arguments
    "allreduce_": ("all_reduce", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_": ("reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "broadcast_": ("broadcast", 0),
}


class Trace(TorchDispatchMode):
    """Every collective that this process starts, whoever calls it, and what else is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []

    def note(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            self.events.append((name, 0))
            return function(*args, **options)

        return noted

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            operation, place = OPERATIONS[function.__name__.partition(".")[0]]
            tensor = args[place][0] if isinstance(args[place], list) else args[place]
            self.events.append((operation, tensor.nbytes))
        return function(*args, **(kwargs or {}))


def _trace_banks(group: Any, merged: bool) -> tuple[list[tuple[str, int]], Tensor]:
    """The second step of an optimizer, since the first one compares the ranks; and the weights after it. Gradients are small
    integers: whatever the order of a sum, its bits are the same."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [*BANKS, *REST]]
    rest: list[Tensor] = list(params[len(BANKS) :])
    groups = [{"params": list(params[: len(BANKS)])}, {"params": rest, "algorithm": "adamw"}]
    optimizer = ParallelMuon(groups, max_norm=1.0, process_group=group)
    optimizer.ranks.merged = merged
    generator.manual_seed(dist.get_rank())
    for _ in range(2):
        for param in params:
            param.grad = torch.randint(-8, 9, param.shape, generator=generator).float()
        with Trace() as trace, pytest.MonkeyPatch.context() as patch:
            patch.setattr(muon, "iterate_in_parts", trace.note("orthogonalize", muon.iterate_in_parts))
            patch.setattr(step, "wait", trace.note("wait", step.wait))
            patch.setattr(collect, "wait", trace.note("wait", collect.wait))
            optimizer.step()
    return trace.events, torch.cat([param.detach().flatten() for param in params])


def _trace_training(spec: str, cache: Path, out: Path) -> dict[str, Any]:
    """The second step of a run, and the shapes of the model: its banks and everything else."""
    config = override(get_recipe("nano"), "budget.steps=3", "train.warmup_steps=0", "train.checkpoint_minutes=0")
    place = Runtime(device=torch.device("cpu"), rank=dist.get_rank(), world=dist.get_world_size())
    trainer = Trainer(config, place, open_dataset(spec, vocab_size=320, cache=cache, say=lambda line: None), out)
    with Trace() as trace:
        trainer.train()
    trainer.close()
    starts = [n for n, event in enumerate(trace.events) if event == CLOCK]
    shapes = {name: tuple(param.shape) for name, param in trainer.model.named_parameters()}
    banks = [shapes.pop(f"banks.{key}") for key in trainer.model.banks.entries]
    return {"events": trace.events[starts[1] : starts[2]], "banks": banks, "rest": list(shapes.values())}


def _run(spec: str, cache: Path, out: Path) -> dict[Any, Any]:
    """By (ranks, merged): the trace of a step and its weights. And a step of training."""
    found: dict[Any, Any] = {"training": _trace_training(spec, cache, out)}
    for world in WORLDS:
        group = dist.new_group(list(range(world)))
        if dist.get_rank() < world:
            found |= {(world, merged): _trace_banks(group, merged) for merged in (False, True)}
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def ranks(text_spec: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("trace")
    open_dataset(
        text_spec, vocab_size=320, cache=folder / "cache", say=lambda line: None
    )  # once, before the ranks read it
    return run_distributed_test(_run, 4, args=(text_spec, folder / "cache", folder / "out"))


@pytest.fixture
def communication(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("communication")


def _flatten(communication: ModuleType, events: Any) -> list[tuple[str, int]]:
    """A schedule of the model in the form of a trace."""
    found = []
    for event in events:
        if isinstance(event, communication.Collective):
            found.append((event.operation, event.size))
        elif isinstance(event, communication.Wait) and event.label != "norm":  # that sum is waited for where it starts
            found.append(("wait", 0))
        elif isinstance(event, communication.Work) and event.name == "orthogonalize":
            found.append(("orthogonalize", 0))
    return found


def _describe(communication: ModuleType, banks: Any, rest: Any) -> tuple[Any, Any]:
    """A model of these shapes, and rates that play no part here."""
    model = communication.Model(banks=banks, rest=rest, layers=1, width=1, length=1, tokens=1)
    return model, communication.Rates(pass_seconds=1.0, ns_rate=1.0, copy_rate=1.0)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_the_model_lists_what_a_step_does(
    ranks: list[dict[Any, Any]], communication: ModuleType, world: int, merged: bool
) -> None:
    model, rates = _describe(communication, BANKS, REST)
    expected = _flatten(communication, communication.schedule(model, world, rates, ON_A_CPU, merged))
    kinds = {operation for operation, _ in expected}
    assert {"reduce_scatter", "all_gather"} <= kinds
    assert ({"reduce", "broadcast"} <= kinds) is not merged
    traces = [rank[world, merged][0] for rank in ranks[:world]]
    for trace in traces:
        collectives = [event for event in trace if event[1]]
        assert collectives == [event for event in expected if event[1]], "bytes and order, the same on every rank"
    # A rank without a share of the last batch orthogonalises nothing there; the model's rank has every largest share.
    assert max(traces, key=len) == expected


@pytest.mark.parametrize("world", WORLDS)
def test_merged_operations_give_the_same_bits(ranks: list[dict[Any, Any]], world: int) -> None:
    for rank in ranks[:world]:
        assert torch.equal(rank[world, True][1], rank[world, False][1])
        assert torch.equal(rank[world, True][1], ranks[0][world, True][1])


def test_the_model_lists_what_a_step_of_training_does(ranks: list[dict[Any, Any]], communication: ModuleType) -> None:
    for found in (rank["training"] for rank in ranks):
        model, rates = _describe(communication, found["banks"], found["rest"])
        expected = _flatten(communication, communication.schedule_trainer(model, 4, rates, update_bytes=ON_A_CPU))
        assert found["events"] == [event for event in expected if event[1]]


def test_what_a_trace_shows_of_overlap(ranks: list[dict[Any, Any]]) -> None:
    """Exposed: with a clip, no batch is worked on before the last gradient has arrived. Hidden: the updates of a batch are
    waited for after the next batch's work."""
    events = [name for name, _ in max((rank[2, False][0] for rank in ranks[:2]), key=len)]
    first = events.index("orthogonalize")
    assert not {"reduce", "reduce_scatter"} & set(events[first:])
    assert events[first - 1] == "all_reduce", "the norm"
    after = [name for name in events[first:] if name in ("orthogonalize", "wait")]
    assert after == ["orthogonalize", "orthogonalize", "wait", "orthogonalize", "wait", "wait"]


def test_the_gradient_of_a_bank_comes_at_the_end_of_backward() -> None:
    """So the trainer has nothing to send while backward runs: every block's own parameters have their gradients first."""
    model = GPT(get_recipe("nano").model)
    order: list[str] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    ids = torch.randint(0, model.config.vocab_size, (2, 17), generator=torch.Generator().manual_seed(0))
    model(ids[:, :-1], ids[:, 1:]).backward()
    first_bank = next(n for n, name in enumerate(order) if name.startswith("banks."))
    assert any(name.startswith("blocks.") for name in order)
    assert not [name for name in order[first_bank:] if name.startswith("blocks.")]
