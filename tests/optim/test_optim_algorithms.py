"""A new algorithm is a class and a line: two that this file makes train through ParallelMuon as its own do."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parbank.errors import ConfigError
from parbank.optim import ParallelMuon, split_parameters
from parbank.optim.algorithm import ALGORITHMS, ElementwiseAlgorithm, Group, MatrixAlgorithm, Settings, Work
from parbank.optim.layout import Member
from tests.distributed import run_distributed_test

STEPS = 4


class SignSGD(ElementwiseAlgorithm):
    """The sign of an exponential mean of gradients."""

    defaults = {"lr": 1e-3, "sign_beta": 0.5}  # noqa: RUF012 (a constant of this class)

    def check_options(self, options: Group) -> None:
        if not 0 <= options["sign_beta"] < 1:
            raise ConfigError(f"sign_beta must lie in 0 <= b < 1, got {options['sign_beta']}")

    def init_state(self, state: dict[str, Any], param: Tensor) -> None:
        if "mean" not in state:
            state["mean"] = torch.zeros_like(param, dtype=torch.float32)

    def update(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        states: Sequence[dict[str, Any]],
        group: Group,
        settings: Settings,
    ) -> None:
        beta = 1 - (1 - group["sign_beta"]) * settings.taken
        for weight, grad, state in zip(weights, grads, states):
            state["mean"].copy_(torch.lerp(settings.scale(grad), state["mean"], beta))
            weight.mul_(1 - settings.lr * settings.weight_decay * settings.taken)
            weight.sub_(settings.lr * settings.taken * state["mean"].sign())


class Polar(MatrixAlgorithm):
    """The exact polar factor of the mean gradient, from a singular value decomposition."""

    layout_options = ("nesterov",)

    def state_shapes(self, member: Member, options: Any) -> dict[str, tuple[int, ...]]:
        return {"sum": (member.rows, member.cols), "count": ()}

    def directions(self, work: Work) -> Tensor:
        found = torch.empty(sum(piece.count for piece in work.pieces), work.batch.rows, work.batch.cols)
        for piece, grad, total, count in zip(work.pieces, work.grads, work.state("sum"), work.state("count")):
            taken = work.control.taken(piece)
            total.add_(torch.where(taken, grad.float() * work.control.values[1], 0.0))
            count.add_(taken)
            mean = total / count.clamp(min=1).view(-1, 1, 1)
            U, _, V = torch.linalg.svd(mean.mT if piece.member.flipped else mean, full_matrices=False)
            found[piece.local : piece.local + piece.count] = U @ V
        return found


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    yield
    del ALGORITHMS["signsgd"], ALGORITHMS["polar"]


def register() -> None:
    ALGORITHMS["signsgd"] = SignSGD()
    ALGORITHMS["polar"] = Polar()


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bank = nn.Parameter(torch.randn(5, 6, 4, dtype=dtype))
        self.tall = nn.Parameter(torch.randn(4, 7, dtype=dtype))
        self.gain = nn.Parameter(torch.randn(9, dtype=dtype))
        self.table = nn.Parameter(torch.randn(11, 3, dtype=dtype))

    def optimizer(self) -> ParallelMuon:
        groups = [
            {"params": [self.bank, self.tall], "algorithm": "polar"},
            {"params": [self.gain], "algorithm": "signsgd"},
            {"params": [self.table], "algorithm": "adamw", "lr": 0.01},
        ]
        return ParallelMuon(groups, lr=0.1, weight_decay=0.05, max_norm=2.0)


def train(model: Model, optimizer: ParallelMuon, steps: range = range(STEPS), rank: int = 0, world: int = 1) -> None:
    """The mean gradient over ranks is the same for any number of them; the third step has one that is not finite."""
    for step in steps:
        for number, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * step + number)
            both = torch.randn(2, *param.shape, generator=generator).to(param.dtype)
            param.grad = both[rank] if world == 2 else both.float().mean(dim=0).to(param.dtype)
            if step == 2 and number == 0 and rank == 0:
                param.grad[0, 0, 0] = torch.inf
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_algorithms_do_what_they_say(dtype: torch.dtype) -> None:
    model = Model(dtype)
    optimizer = model.optimizer()
    weights = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    totals = {name: torch.zeros_like(w) for name, w in weights.items()}
    rates = {"bank": 0.1, "tall": 0.1, "gain": 1e-3}
    for step in (0, 1):
        train(model, optimizer, range(step, step + 1))
        factor = min(1.0, 2.0 / (float(optimizer.last_grad_norm) + 1e-6))
        for number, (name, rate) in enumerate(rates.items()):
            generator = torch.Generator().manual_seed(10 * step + number)
            both = torch.randn(2, *weights[name].shape, generator=generator).to(dtype)
            grad = both.float().mean(dim=0).to(dtype).float() * factor
            totals[name] = 0.5 * totals[name] + 0.5 * grad if name == "gain" else totals[name] + grad
            if name == "gain":
                direction = totals[name].sign()
            else:
                U, _, V = torch.linalg.svd(totals[name], full_matrices=False)
                direction = U @ V * max(1.0, weights[name].shape[-2] / weights[name].shape[-1]) ** 0.5
            weights[name] = weights[name] * (1 - rate * 0.05) - rate * direction
    for name in rates:
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(model.get_parameter(name).float(), weights[name], rtol=tolerance, atol=tolerance)


def test_a_skipped_step_changes_nothing() -> None:
    model = Model()
    optimizer = model.optimizer()
    train(model, optimizer, range(2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    held = {name: value.clone() for name, value in optimizer.state[model.gain].items()}
    train(model, optimizer, range(2, 3))
    assert optimizer.last_skipped
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(torch.equal(value, held[name]) for name, value in optimizer.state[model.gain].items())


def test_a_saved_state_goes_on_exactly() -> None:
    model, other = Model(), Model()
    optimizer, resumed = model.optimizer(), other.optimizer()
    train(model, optimizer, range(3))
    saved, weights = optimizer.state_dict(), model.state_dict()
    assert saved["state"][0]["sum"].shape == model.bank.shape
    assert saved["state"][0]["count"].shape == (5,)
    other.load_state_dict(weights)
    resumed.load_state_dict(saved)
    train(model, optimizer, range(3, 6))
    train(other, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def _on_ranks() -> tuple[dict[str, Tensor], dict[str, Any]]:
    import torch.distributed as dist

    register()
    model = Model()
    optimizer = model.optimizer()
    train(model, optimizer, rank=dist.get_rank(), world=dist.get_world_size())
    state = optimizer.state_dict()
    assert optimizer.state[model.bank]["sum"].shape[0] in (2, 3), "each rank holds the blocks it owns"
    return model.state_dict(), state


def test_two_ranks_equal_one() -> None:
    model = Model()
    optimizer = model.optimizer()
    train(model, optimizer)
    expected = optimizer.state_dict()
    for weights, state in run_distributed_test(_on_ranks, world_size=2):
        torch.testing.assert_close(weights, dict(model.state_dict()))
        for number, held in expected["state"].items():
            torch.testing.assert_close(state["state"][number], held)


def test_options_have_their_own_defaults_and_checks() -> None:
    model = Model()
    optimizer = model.optimizer()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1e-3, 0.01]
    assert optimizer.param_groups[1]["sign_beta"] == 0.5
    assert "sign_beta" not in optimizer.param_groups[2]
    with pytest.raises(ConfigError, match="sign_beta must lie"):
        ParallelMuon([{"params": [model.gain], "algorithm": "signsgd", "sign_beta": 2.0}])


def test_split_parameters_takes_them_by_name() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    groups = split_parameters(model, overrides={"1.weight": "polar", "2.*": "signsgd"})
    found = {name: (group["algorithm"], group["role"]) for group in groups for name, _ in group["params"]}
    assert found["1.weight"] == ("polar", "matrices")
    assert found["2.weight"] == ("signsgd", "norms, biases, gates and scalars")
    assert found["0.weight"] == ("adamw", "embeddings and heads")
    assert found["1.bias"][0] == "adamw"
    ParallelMuon(groups)


def test_an_unknown_algorithm_is_refused_with_the_choices() -> None:
    with pytest.raises(
        ConfigError, match="algorithm must be one of muon, adamw, lion, signsgd, polar, got 'signsdg'; did you mean"
    ):
        ParallelMuon([{"params": [nn.Parameter(torch.zeros(2))], "algorithm": "signsdg"}])
