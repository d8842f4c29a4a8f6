"""Eight ways to share a model between ranks, each with every option of Muon that looks at more than one number: all train
as one process does, and go on from its checkpoint. DTensors in every placement do, too.

Starting processes costs most here: one set of four ranks runs everything.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbank.errors import ConfigError
from parbank.optim import ParallelMuon
from tests.distributed import run_distributed_test

WORLD = 4
STEPS = 2
PLACED_STEPS = 3


class Net(nn.Module):
    """A joint query, key and value of unequal heights, heads, and matrices that are cut along either dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)
        self.up = nn.Linear(8, 12, bias=False)
        self.out = nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(torch.tanh(self.qkv(self.norm(x))))
        return self.out(torch.tanh(self.up(x)))

    def groups(self) -> list[dict[str, Any]]:
        decay = {"cautious": True, "weight_decay": 0.1}
        return [
            {"params": [self.qkv.weight], "lr": 0.05, "split_sizes": (8, 4, 4), "normuon": True},
            {"params": [self.up.weight], "lr": 0.05, "num_heads": 3, "normuon": True, **decay},
            {"params": [self.down.weight, self.out.weight], "lr": 0.05, "normuon": True, "equilibrate": True, **decay},
            {"params": [self.norm.weight, self.norm.bias], "algorithm": "adamw", "lr": 0.05},
        ]


Made = tuple[nn.Module, int, int, dict[str, Any]]
"""The module to call, which of how many parts of the data this rank has, and options of the optimizer."""


def _ddp(model: Net) -> Made:
    wrapped = nn.parallel.DistributedDataParallel(model)
    return wrapped, dist.get_rank(), WORLD, {"reduce_gradients": False}


def _without_wrapper(model: Net) -> Made:
    return model, dist.get_rank(), WORLD, {}


def _fsdp2(model: Net) -> Made:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=_mesh(WORLD))
    return model, dist.get_rank(), WORLD, {}


def _hsdp(model: Net) -> Made:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=_mesh(2, 2))
    return model, dist.get_rank(), WORLD, {}


def _column_wise(model: Net) -> Made:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    plan = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("qkv", "up")}
    parallelize_module(model, _mesh(WORLD), plan)
    return model, 0, 1, {"reduce_gradients": False}


def _row_wise(model: Net) -> Made:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    plan = {name: RowwiseParallel(input_layouts=Replicate()) for name in ("down", "out")}
    parallelize_module(model, _mesh(WORLD), plan)
    return model, 0, 1, {"reduce_gradients": False}


def _sequence_parallel(model: Net, mesh: Any = None) -> Made:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    plan = {
        "norm": SequenceParallel(),
        "qkv": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
        "up": ColwiseParallel(),
        "out": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh or _mesh(WORLD), plan)
    return model, 0, 1, {}


def _fsdp2_and_tensor_parallel(model: Net) -> Made:
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh(2, 2)
    _sequence_parallel(model, mesh["second"])
    fully_shard(model, mesh=mesh["first"])
    return model, mesh["first"].get_local_rank(), 2, {}


OWN, EQUAL = "`ParallelMuon(groups)`", "`ParallelMuon(groups, reduce_gradients=False)`"

WAYS: dict[str, tuple[Callable[[Net], Made], str]] = {
    "DDP": (_ddp, EQUAL),
    "ranks without a wrapper": (_without_wrapper, OWN),
    "FSDP2": (_fsdp2, OWN),
    "HSDP": (_hsdp, OWN),
    "tensor parallel, column-wise, of some layers": (_column_wise, EQUAL),
    "tensor parallel, row-wise, of some layers": (_row_wise, EQUAL),
    "tensor parallel of all layers, with sequence-parallel norms": (_sequence_parallel, OWN),
    "FSDP2 and tensor parallel": (_fsdp2_and_tensor_parallel, OWN),
}
"""By name: the function, and what a user writes, for docs/reference/compatibility.md."""


def _mesh(*sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=("first", "second")[: len(sizes)])


def _step(model: nn.Module, optimizer: ParallelMuon, step: int, part: int, parts: int) -> None:
    x = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(step))
    model(x.chunk(parts)[part]).square().mean().mul(100).backward()
    optimizer.step()
    optimizer.zero_grad()


def _alone() -> dict[str, Any]:
    """One process: weights and state after STEPS steps, and the weights one step later."""
    model = Net()
    optimizer = ParallelMuon(model.groups(), max_norm=0.1)
    for step in range(STEPS):
        _step(model, optimizer, step, 0, 1)
    weights, state = _weights(model), optimizer.state_dict()
    saved = {**state, "state": {n: {k: v.clone() for k, v in values.items()} for n, values in state["state"].items()}}
    _step(model, optimizer, STEPS, 0, 1)
    return {"weights": weights, "saved": saved, "after": _weights(model)}


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): _whole(param) for name, param in model.named_parameters()}


def _whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def _share(way: str) -> dict[str, Any]:
    wrap, written = WAYS[way]
    model, part, parts, options = wrap(net := Net())
    assert options == ({"reduce_gradients": False} if written == EQUAL else {})
    optimizer = ParallelMuon(net.groups(), max_norm=0.1, **options)
    for step in range(STEPS):
        _step(model, optimizer, step, part, parts)
    state = {n: {k: _whole(v) for k, v in s.items()} for n, s in optimizer.state_dict()["state"].items()}
    result = {"weights": _weights(model), "state": state, "norm": float(optimizer.last_grad_norm)}
    again = ParallelMuon(net.groups(), max_norm=0.1, **options)
    again.load_state_dict(_alone()["saved"])
    _step(model, again, STEPS, part, parts)
    return {**result, "after": _weights(model)}


def _refuse() -> str:
    """A mesh of two of the four ranks, with nobody to average gradients over the others."""
    net = Net()
    _sequence_parallel(net, _mesh(2, 2)["second"])
    net(torch.ones(1, 4, 8)).sum().backward()
    try:
        ParallelMuon(net.groups()).step()
    except ConfigError as error:
        return str(error)
    return ""


# --- every placement of every kind of weight, with given gradients -----------------------------------------------------

PLACEMENTS = (
    "Shard(0) Replicate", "Replicate Shard(0)", "Replicate Shard(1)", "Shard(0) Shard(1)", "Shard(0) Shard(0)",
    "Replicate Replicate", "Shard(1) Replicate", "Shard(1) Shard(1)",
)  # fmt: skip
SHAPES = {"matrix": (12, 20), "turned": (8, 10), "stack": (3, 8, 6), "heads": (12, 8), "gain": (8,), "small": (5, 4)}


def _groups(params: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"params": [params["matrix"]], "lr": 0.05, "weight_decay": 0.1, "cautious": True, "lr_scale": "rms"},
        {"params": [params["turned"]], "lr": 0.05, "transposed": (True,), "normuon": True, "equilibrate": True},
        {"params": [params["stack"]], "lr": 0.05, "transposed": (True, False, True), "normuon": True},
        {"params": [params["heads"]], "lr": 0.05, "num_heads": 2},
        {"params": [params["gain"], params["small"]], "algorithm": "adamw", "lr": 0.05},
    ]


def _make_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _gradients(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _expected() -> tuple[dict[str, Tensor], list[float]]:
    """One process, with the sum of all ranks' gradients."""
    params = {name: nn.Parameter(weight) for name, weight in _make_weights().items()}
    optimizer = ParallelMuon(_groups(params), max_norm=5.0)
    norms = []
    for step in range(PLACED_STEPS):
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


def _train_placed(text: str, partial: bool) -> tuple[dict[str, Tensor], list[float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    weights = _make_weights()
    places = {name: _place(mesh, text, weight) for name, weight in weights.items()}
    params = {n: nn.Parameter(distribute_tensor(w, mesh, places[n])) for n, w in weights.items()}
    optimizer = ParallelMuon(_groups(params), max_norm=5.0)
    norms = []
    for step in range(PLACED_STEPS):
        for name, grad in _gradients(step, dist.get_rank()).items():
            summed = DTensor.from_local(grad, mesh, [Partial(), Partial()], run_check=False)
            params[name].grad = summed if partial else summed.redistribute(placements=places[name])
        optimizer.step()
        norms.append(optimizer.last_grad_norm.item())
    return {name: param.full_tensor().detach() for name, param in params.items()}, norms  # type: ignore[attr-defined]


def _run() -> dict[str, Any]:
    placed = {(text, partial): _train_placed(text, partial) for text in PLACEMENTS for partial in (False, True)}
    return {"refused": _refuse(), "placements": placed, **{way: _share(way) for way in WAYS}}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_distributed_test(_run, WORLD, timeout=300)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return _alone()


@pytest.mark.parametrize("way", WAYS)
def test_equals_one_process(ranks: list[dict[str, Any]], alone: dict[str, Any], way: str) -> None:
    for rank in ranks:
        assert rank[way]["norm"] > 0.1, "the clip was at work"
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(rank[way]["weights"][name], weight, rtol=1e-4, atol=1e-5, msg=name)
            assert torch.equal(rank[way]["weights"][name], ranks[0][way]["weights"][name]), name


@pytest.mark.parametrize("way", WAYS)
def test_state_is_that_of_one_process(ranks: list[dict[str, Any]], alone: dict[str, Any], way: str) -> None:
    found = ranks[1][way]["state"]
    assert {"row_moment", "row_moment.1"} <= found[0].keys(), "two heights, two sets of moments"
    for number, values in alone["saved"]["state"].items():
        assert found[number].keys() == values.keys()
        for key, value in values.items():
            torch.testing.assert_close(found[number][key], value, rtol=1e-3, atol=1e-5, msg=f"{number} {key}")


@pytest.mark.parametrize("way", WAYS)
def test_goes_on_from_the_checkpoint_of_one_process(ranks: list[Any], alone: dict[str, Any], way: str) -> None:
    for name, weight in alone["after"].items():
        torch.testing.assert_close(ranks[0][way]["after"][name], weight, rtol=1e-4, atol=1e-5, msg=name)


def test_refuses_ranks_that_nobody_averages_over(ranks: list[dict[str, Any]]) -> None:
    assert "a mesh of 2 ranks, and the optimizer works with 4" in ranks[0]["refused"]


@pytest.mark.parametrize("partial", [False, True], ids=["placed gradients", "partial gradients"])
@pytest.mark.parametrize("text", PLACEMENTS)
def test_placement_equals_one_process(ranks: list[dict[str, Any]], text: str, partial: bool) -> None:
    weights, norms = _expected()
    for rank in range(WORLD):
        found, found_norms = ranks[rank]["placements"][text, partial]
        assert found_norms == pytest.approx(norms, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5, msg=f"{text} {name}")
            assert torch.equal(found[name], ranks[0]["placements"][text, partial][0][name])
