"""FSDP2: weights cut over ranks train as whole ones do, and their state goes through torch.distributed.checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbank.errors import ConfigError
from parbank.optim import ParallelMuon
from tests.distributed import run_distributed_test

WORLD = 3
BATCH = 12
STEPS = 5


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 20)  # 20 rows over 3 ranks: 7, 7, 6
        self.down = nn.Linear(20, width)
        self.stack = nn.Parameter(torch.randn(4, width, width) / width**0.5)  # 4 matrices over 3 ranks: 2, 2, 0

    def forward(self, x: Tensor) -> Tensor:
        for w in self.stack:
            x = x + torch.tanh(x @ w.T)
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList([Block(8) for _ in range(2)])
        self.tiny = nn.Linear(8, 2)  # fewer rows than ranks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.tiny(x)

    def groups(self) -> list[dict[str, Any]]:
        matrices = [p for n, p in self.named_parameters() if p.ndim == 2]
        stacks = [p for n, p in self.named_parameters() if p.ndim == 3]
        rest = [p for n, p in self.named_parameters() if p.ndim == 1]
        return [
            {"params": matrices, "lr": 0.02, "weight_decay": 0.1, "cautious": True},
            {"params": stacks, "lr": 0.01, "transposed": (True, False, False, True), "lr_scale": "rms"},
            {"params": rest, "algorithm": "adamw", "lr": 0.01},
        ]


def _train(model: nn.Module, optimizer: ParallelMuon, rank: int, world: int, last: int = STEPS) -> list[float]:
    norms = []
    for step in range(last):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(BATCH, 8, generator=generator), torch.randn(BATCH, 2, generator=generator)
        dtype = next(model.parameters()).dtype
        x, y = x.to(dtype), y.to(dtype)
        (model(x.chunk(world)[rank]) - y.chunk(world)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.last_grad_norm.item())
    return norms


def _whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _shard(model: Model, mesh: Any = None) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _run(folder: Path) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    model = Model()
    _shard(model, mesh)
    optimizer = ParallelMuon(model.groups(), max_norm=0.5)
    norms = _train(model, optimizer, dist.get_rank(), WORLD)
    result: dict[str, Any] = {"norms": norms, "weights": {n: _whole(p) for n, p in model.named_parameters()}}
    state = get_optimizer_state_dict(model, optimizer)
    whole = {(n, k): _whole(v) for n, values in state["state"].items() for k, v in values.items()}
    dcp.save({"optimizer": state}, checkpoint_id=folder / "sharded")

    again = Model()
    _shard(again, mesh)
    other = ParallelMuon(again.groups(), max_norm=0.5)
    loaded = {"optimizer": get_optimizer_state_dict(again, other)}
    dcp.load(loaded, checkpoint_id=folder / "sharded")
    set_optimizer_state_dict(again, other, loaded["optimizer"])
    found = get_optimizer_state_dict(again, other)["state"]
    result["restored"] = all(torch.equal(_whole(found[n][k]), value) for (n, k), value in whole.items())

    half = Model()
    half.bfloat16()
    _shard(half, mesh)
    tracker = ParallelMuon(half.groups())
    half(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    tracker.step()
    result["bfloat16"] = {str(p.dtype) for p in half.parameters()} | {
        str(s["low_bits"].dtype) for s in tracker.state.values()
    }

    alone = [dist.new_group([rank]) for rank in range(WORLD)][dist.get_rank()]
    result |= _load_one_process(tracker, alone) | _load_replicated(mesh, alone)

    double = Model().double()
    _shard(double, mesh)
    precise = ParallelMuon(_with_normuon(double), max_norm=0.5)
    _train(double, precise, dist.get_rank(), WORLD)
    result["double"] = {n: _whole(p) for n, p in double.named_parameters()}
    result["double kinds"] = {str(v.dtype) for s in precise.state.values() for k, v in s.items() if k != "step"}

    matrices = [model.blocks[0].up.weight]  # type: ignore[union-attr]
    mixed = ParallelMuon([{"params": matrices}, {"params": [nn.Parameter(torch.ones(3))], "algorithm": "adamw"}])
    try:
        mixed.step()
    except ConfigError as error:
        result["mixed"] = str(error)
    return result


def _load_one_process(tracker: ParallelMuon, alone: Any) -> dict[str, Any]:
    """A checkpoint of one process, into bfloat16 weights under FSDP2."""
    model = Model().bfloat16()
    optimizer = ParallelMuon(model.groups(), process_group=alone)
    model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    tracker.load_state_dict(optimizer.state_dict())
    states = zip(tracker.state.values(), optimizer.state.values())
    return {"loaded": all(torch.equal(_whole(a["low_bits"].int()), b["low_bits"].int()) for a, b in states)}


def _load_replicated(mesh: Any, alone: Any) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, distribute_tensor

    optimizers = []
    for kind, group in (("whole", alone), ("replicated", None)):
        weight = torch.eye(4) if kind == "whole" else distribute_tensor(torch.eye(4), mesh, [Replicate()])
        optimizers.append(ParallelMuon([nn.Parameter(weight)], process_group=group))
    one, other = optimizers
    one.param_groups[0]["params"][0].grad = torch.ones(4, 4)
    one.step()
    saved = one.state_dict()
    other.load_state_dict(saved)
    held = other.state[other.param_groups[0]["params"][0]]["momentum_buffer"].to_local()
    return {"shares memory": held.data_ptr() == saved["state"][0]["momentum_buffer"].data_ptr()}


def _with_normuon(model: Model) -> list[dict[str, Any]]:
    return [{**group, "normuon": True} for group in model.groups()]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed_test(_run, WORLD, args=(tmp_path_factory.mktemp("sharded"),))


def test_equals_one_rank(ranks: list[dict[str, Any]]) -> None:
    model = Model()
    norms = _train(model, ParallelMuon(model.groups(), max_norm=0.5), 0, 1)
    assert max(norms) > 0.5
    for result in ranks:
        torch.testing.assert_close(result["norms"], norms, rtol=1e-4, atol=0)
        for name, param in model.named_parameters():
            torch.testing.assert_close(result["weights"][name], param.detach(), rtol=1e-4, atol=1e-5, msg=name)


def test_state_goes_through_distributed_checkpoint(ranks: list[dict[str, Any]]) -> None:
    assert all(result["restored"] for result in ranks)


def test_bfloat16_weights_keep_their_low_bits(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["bfloat16"] == {"torch.bfloat16", "torch.int16"}


def test_a_checkpoint_of_one_process_loads_with_its_low_bits(ranks: list[dict[str, Any]]) -> None:
    assert [(result["loaded"], result["shares memory"]) for result in ranks] == [(True, False)] * WORLD


def test_float64_weights_are_trained_in_float64(ranks: list[dict[str, Any]]) -> None:
    model = Model().double()
    _train(model, ParallelMuon(_with_normuon(model), max_norm=0.5), 0, 1)
    for result in ranks:
        assert result["double kinds"] == {"torch.float64"}
        for name, param in model.named_parameters():
            # The clip and the learning rate are float32.
            torch.testing.assert_close(result["double"][name], param.detach(), rtol=1e-7, atol=1e-8, msg=name)


def test_refuses_what_it_cannot_do(ranks: list[dict[str, Any]]) -> None:
    assert "fully_shard on the whole model" in ranks[0]["mixed"]
