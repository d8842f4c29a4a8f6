"""DTensors in every placement train as whole tensors do: FSDP2, tensor parallelism, sequence parallelism, both together.

Four ranks, as a mesh of 2 x 2. Gradients differ from rank to rank as those of a sum over ranks do.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbank.errors import ConfigError
from parbank.optim import ParallelMuon
from tests.distributed import run_distributed_test

WORLD = 4
STEPS = 3
PLACEMENTS = (
    "Shard(0) Replicate", "Replicate Shard(0)", "Replicate Shard(1)", "Shard(0) Shard(1)", "Shard(0) Shard(0)",
    "Replicate Replicate", "Shard(1) Replicate", "Shard(1) Shard(1)",
)  # fmt: skip
SHAPES = {"matrix": (12, 20), "stack": (3, 8, 6), "heads": (12, 8), "gain": (8,), "small": (5, 4)}


def _groups(params: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"params": [params["matrix"]], "lr": 0.05, "weight_decay": 0.1, "cautious": True, "lr_scale": "rms"},
        {"params": [params["stack"]], "lr": 0.05, "transposed": (True, False, True)},
        {"params": [params["heads"]], "lr": 0.05, "num_heads": 2},
        {"params": [params["gain"], params["small"]], "algorithm": "adamw", "lr": 0.05},
    ]


def _weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _gradients(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _expected() -> tuple[dict[str, Tensor], list[float]]:
    """One process, with the sum of all ranks' gradients."""
    params = {name: nn.Parameter(weight) for name, weight in _weights().items()}
    optimizer = ParallelMuon(_groups(params), max_norm=5.0)
    norms = []
    for step in range(STEPS):
        parts = [_gradients(step, rank) for rank in range(WORLD)]
        for name, param in params.items():
            param.grad = torch.stack([part[name] for part in parts]).sum(0)
        optimizer.step()
        norms.append(optimizer.last_grad_norm.item())
    return {name: param.detach() for name, param in params.items()}, norms


def _place(mesh: Any, text: str, tensor: Tensor) -> list[Any]:
    """The placements of a text; a vector cannot be cut along its second dimension and is replicated, as norms are."""
    from torch.distributed.tensor import Replicate, Shard

    named = {"Shard(0)": Shard(0), "Shard(1)": Shard(1) if tensor.ndim > 1 else Replicate(), "Replicate": Replicate()}
    return [named[word] for word in text.split()]


def _train(text: str, partial: bool) -> tuple[dict[str, Tensor], list[float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    weights = _weights()
    places = {name: _place(mesh, text, weight) for name, weight in weights.items()}
    params = {n: nn.Parameter(distribute_tensor(w, mesh, places[n])) for n, w in weights.items()}
    optimizer = ParallelMuon(_groups(params), max_norm=5.0)
    norms = []
    for step in range(STEPS):
        for name, grad in _gradients(step, dist.get_rank()).items():
            summed = DTensor.from_local(grad, mesh, [Partial(), Partial()], run_check=False)
            params[name].grad = summed if partial else summed.redistribute(placements=places[name])
        optimizer.step()
        norms.append(optimizer.last_grad_norm.item())
    return {name: param.full_tensor().detach() for name, param in params.items()}, norms  # type: ignore[attr-defined]


def _interleaved() -> dict[str, Any]:
    """FSDP2 over tensor parallelism, with real modules: column-wise, row-wise, and a sequence-parallel norm."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    result: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, sharded in (("tensor parallel", False), ("with FSDP2", True)):
        model = Net()
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
        if sharded:
            fully_shard(model, mesh=mesh["dp"])
        group = None if sharded else mesh["tp"].get_group()
        optimizer = ParallelMuon(model.groups(), max_norm=0.5, process_group=group)
        data = mesh["dp"].get_local_rank() if sharded else 0
        for step in range(STEPS):
            x = torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(step))
            model(x[data] if sharded else x.flatten(0, 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        result[name] = {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}  # type: ignore[attr-defined]
        if not sharded:
            lonely = ParallelMuon(model.groups())  # all four ranks, though the mesh has two
            model(torch.ones(1, 4, 8)).sum().backward()
            try:
                lonely.step()
            except ConfigError as error:
                result["refused"] = str(error)
    return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))

    def groups(self) -> list[dict[str, Any]]:
        return [
            {"params": [self.up.weight, self.down.weight], "lr": 0.05},
            {"params": [self.norm.weight, self.norm.bias], "algorithm": "adamw", "lr": 0.05},
        ]


def _run() -> dict[str, Any]:
    found = {(text, partial): _train(text, partial) for text in PLACEMENTS for partial in (False, True)}
    return {"placements": found, "modules": _interleaved()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_distributed_test(_run, WORLD)


@pytest.mark.parametrize("partial", [False, True], ids=["placed gradients", "partial gradients"])
@pytest.mark.parametrize("text", PLACEMENTS)
def test_equals_one_process(ranks: list[dict[str, Any]], text: str, partial: bool) -> None:
    weights, norms = _expected()
    for rank in range(WORLD):
        found, found_norms = ranks[rank]["placements"][text, partial]
        assert found_norms == pytest.approx(norms, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5, msg=f"{text} {name}")
            assert torch.equal(found[name], ranks[0]["placements"][text, partial][0][name])


@pytest.mark.parametrize("kind", ["tensor parallel", "with FSDP2"])
def test_modules_equal_one_process(ranks: list[dict[str, Any]], kind: str) -> None:
    model = Net()
    optimizer = ParallelMuon(model.groups(), max_norm=0.5)
    for step in range(STEPS):
        x = torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(step))
        model(x.flatten(0, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank in range(WORLD):
        for name, param in model.named_parameters():
            found = ranks[rank]["modules"][kind][name]
            torch.testing.assert_close(found, param.detach(), rtol=1e-4, atol=1e-5, msg=name)


def test_refuses_ranks_that_nobody_averages_over(ranks: list[dict[str, Any]]) -> None:
    assert "a mesh of 2 ranks, and the optimizer works with 4" in ranks[0]["modules"]["refused"]
