"""What ParallelMuon works with and what it refuses: the page docs/reference/compatibility.md.

    python -m tests.integrations.compatibility            writes it

Tests run every row: `test_architectures`, `test_trainers` and `test_placements` those that work, `test_compatibility` those
that are refused. `test_compatibility` also compares the page with these lists.
"""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parbank.errors import ParbankError
from parbank.optim import ParallelMuon, meeting, split_parameters
from tests.integrations import architectures
from tests.integrations.test_placements import WAYS
from tests.integrations.test_trainers import TRAINERS

PAGE = architectures.ROOT / "docs" / "reference" / "compatibility.md"
WORLD = 4

# --- what is refused, on one rank ---------------------------------------------------------------------------------------


def _step_with(param: nn.Parameter, grad: torch.Tensor | None = None, algorithm: str = "adamw", **options: Any) -> None:
    optimizer = ParallelMuon([{"params": [param], "algorithm": algorithm}], **options)
    param.grad = torch.ones_like(param) if grad is None else grad
    optimizer.step()


def _float16() -> None:
    _step_with(nn.Parameter(torch.ones(4, 4, dtype=torch.float16)))


def _complex() -> None:
    _step_with(nn.Parameter(torch.ones(4, 4, dtype=torch.complex64)))


def _overlapping() -> None:
    _step_with(nn.Parameter(torch.ones(1, 4).expand(4, 4)))


def _gaps() -> None:
    _step_with(nn.Parameter(torch.ones(4, 8)[:, :4]), algorithm="muon")


def _vector() -> None:
    _step_with(nn.Parameter(torch.ones(4)), algorithm="muon")


def _meta() -> None:
    _step_with(nn.Parameter(torch.ones(4, 4, device="meta")))


def _sparse() -> None:
    embedding = nn.Embedding(4, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    _step_with(embedding.weight, embedding.weight.grad)  # type: ignore[arg-type]


def _unclear() -> None:
    split_parameters(nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 5)))


def _graph_on_cpu() -> None:
    _step_with(nn.Parameter(torch.ones(4, 4)), cuda_graph=True)


def _fused() -> None:
    ParallelMuon([{"params": [nn.Parameter(torch.ones(4, 4))], "fused": True}])


def _misspelt() -> None:
    ParallelMuon([{"params": [nn.Parameter(torch.ones(4, 4))], "use_muon": False}])


def _other_checkpoint() -> None:
    param = nn.Parameter(torch.ones(4, 4))
    ParallelMuon([param]).load_state_dict(torch.optim.SGD([param], momentum=0.9).state_dict())


# --- what is refused, on several ranks ----------------------------------------------------------------------------------


def _net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))


def _train(model: nn.Module, optimizer: Any) -> None:
    model(torch.full((2, 4), dist.get_rank() + 1.0)).square().sum().backward()
    optimizer.step()


def _make(model: nn.Module, **options: Any) -> ParallelMuon:
    return ParallelMuon(split_parameters(model, overrides={"*2.weight": "adamw"}), **options)


def _mesh(*sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=("first", "second")[: len(sizes)])


def _fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    _make(FullyShardedDataParallel(_net(), device_id=torch.device("cpu"), use_orig_params=True))


def _zero() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(4, 4, bias=False)
    _train(model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=ParallelMuon))


def _partly_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    model: Any = _net()
    fully_shard(model[0], mesh=_mesh(WORLD))
    _train(model, _make(model))


def _mesh_of_some_ranks() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    parallelize_module(model, _mesh(2, 2)["second"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    _train(model, ParallelMuon(model.parameters()))


def _scaler() -> None:
    model = _net()
    optimizer = _make(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)


def _other_weights() -> None:
    model = _net(seed=dist.get_rank())
    _train(model, _make(model))


def _other_options() -> None:
    model = _net()
    _train(model, _make(model, weight_decay=0.1 * dist.get_rank()))


def _unequal_gradients() -> None:
    model = _net()
    _train(model, _make(model, reduce_gradients=False))


def _save_alone() -> None:
    model = _net()
    optimizer = _make(model)
    _train(model, optimizer)
    meeting.WARN_SECONDS, meeting.ALONE_SECONDS = 0.2, 0.5
    try:
        if dist.get_rank() == 0:
            optimizer.state_dict()
    finally:
        dist.barrier()


def _add_alone() -> None:
    model = _net()
    optimizer = _make(model)
    _train(model, optimizer)
    meeting.WARN_SECONDS, meeting.ALONE_SECONDS = 0.2, 0.5
    try:
        if dist.get_rank() == 0:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))]})
    finally:
        dist.barrier()


def _second_backward() -> None:
    model = _net()
    optimizer = _make(model)
    with optimizer.reducing():
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()


Refused = dict[str, tuple[Callable[[], None], str]]
"""By what was tried: how, and the sentence that says so."""

ON_ONE_RANK: Refused = {
    "weights in float16": (_float16, "ParallelMuon updates float32, bfloat16 and float64 weights: convert it"),
    "complex or integer weights": (_complex, "ParallelMuon updates float32, bfloat16 and float64 weights: convert it"),
    "a weight whose numbers share memory, as after `expand`": (_overlapping, "several of its numbers share memory"),
    "a matrix for Muon with gaps in memory": (_gaps, "with gaps or overlaps; give Muon param.contiguous()"),
    "a vector, a scalar or an empty matrix for Muon": (_vector, "Put it in a group with algorithm='adamw'"),
    "weights on the meta device": (_meta, "call model.to_empty(device=...) and set its weights first"),
    "sparse gradients": (_sparse, "has a sparse gradient; use nn.Embedding(..., sparse=False)"),
    "a model whose head has no usual name": (
        _unclear,
        "It may be the output layer (adamw) or a hidden matrix (muon). Say so",
    ),
    "`fused`, `foreach`, `capturable`, `differentiable`, `amsgrad`": (_fused, "is not an option of ParallelMuon"),
    "options by the names of other Muons, or misspelt": (_misspelt, "use algorithm='adamw' or 'muon' instead"),
    "a checkpoint of SGD or of an unknown optimizer": (
        _other_checkpoint,
        "make the groups as they were, or load the weights only",
    ),
    "`cuda_graph=True` on a CPU": (_graph_on_cpu, "cuda_graph=True needs parameters on a GPU"),
}
ON_RANKS: Refused = {
    "FSDP1": (_fsdp1, "Use FSDP2 (torch.distributed.fsdp.fully_shard)"),
    "`ZeroRedundancyOptimizer` around it": (_zero, "build the optimizer with the same groups"),
    "FSDP2 over a part of the model": (_partly_sharded, "call fully_shard on the whole model"),
    "tensor parallelism over some ranks, alone": (_mesh_of_some_ranks, "call fully_shard over the other dimension of the mesh"),
    "a `GradScaler` without DDP": (_scaler, "train in bfloat16 without a scaler, or use DDP with reduce_gradients=False"),
    "ranks with other weights": (_other_weights, "give every rank the same seed, or broadcast the weights of rank 0"),
    "ranks with other options, or another order": (_other_options, "build the optimizer with the same groups, options and order"),
    "`reduce_gradients=False` without DDP": (_unequal_gradients, "wrap the model in DistributedDataParallel"),
    "`state_dict()` on rank 0 alone, without DDP": (_save_alone, "call state_dict() on every rank and write the file on one"),
    "`add_param_group()` on rank 0 alone": (_add_alone, "add the group on every rank"),
    "a second backward inside `reducing()`": (_second_backward, "put only the last backward of a step inside"),
}  # fmt: skip


def hear(attempt: Callable[[], None]) -> str:
    """The sentence by which an attempt is refused."""
    try:
        attempt()
    except ParbankError as error:
        return str(error)
    return "was taken"


def hear_on_ranks() -> dict[str, str]:
    """The same for every attempt on several ranks, on each of them."""
    said = {}
    for name, (attempt, _) in ON_RANKS.items():
        said[name] = hear(attempt)
        dist.barrier()
    return said


# --- the page -----------------------------------------------------------------------------------------------------------


def find_rows() -> list[str]:
    """All rows but those of architectures, which say more than that they work."""
    rows = [f"| {name} | {written} | works |" for name, (_, written) in TRAINERS.items()]
    rows += [f"| {way} | {written} | works |" for way, (_, written) in WAYS.items()]
    refused = {**ON_ONE_RANK, **ON_RANKS}
    return rows + [f'| {name} | refused: "{sentence}" |' for name, (_, sentence) in refused.items()]


def write() -> str:
    """The page."""
    rows, first, last = find_rows(), len(TRAINERS), len(TRAINERS) + len(WAYS)
    packages = ", ".join(f"{name} {version(name)}" for name in ("accelerate", "transformers", "lightning"))
    parts = [
        f"""# What ParallelMuon works with

ParallelMuon works with {len(TRAINERS)} trainers, {len(WAYS)} ways of sharding and {architectures.count()} architectures.
`make integrations` tests every row, and `python -m tests.integrations.compatibility` writes this page. [Muon in your
trainer](../guide/muon.md) explains the calls.

## Trainers

Each trains on 2 ranks, saves, and resumes on 1, 2 and 3 ranks. The weights equal those of one process that trains
without a break. `groups` is the result of `split_parameters(model)`.
Packages: {packages}.

| trainer | what you write | |
| --- | --- | --- |""",
        *rows[:first],
        """
## Ways of sharding

On 4 ranks, weights and optimizer state equal those of one process. This includes `num_heads`, `split_sizes`,
`normuon`, `equilibrate` and cautious decay. Training continues from a checkpoint of one process. DTensors may have any
placement: Shard(0), Shard(1) and Replicate over two dimensions of a mesh, with gradients that are Partial or placed.

| way | what you write | |
| --- | --- | --- |""",
        *rows[first:last],
        """
## Refused

Each row ends in an error that says what to do instead. The second column quotes it.

One case has no error: `DistributedDataParallel.join()` with uneven inputs waits for the timeout of the process group. A
step has collectives, so every rank must take as many steps as the others.

| what you try | |
| --- | --- |""",
        *rows[last:],
        "",
        architectures.write(),
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(write())
