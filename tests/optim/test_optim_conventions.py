"""What PyTorch's users expect of any optimizer: the checks that PyTorch makes of its own, for ours."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parbank.errors import ConfigError
from parbank.optim import ParallelMuon

ALGORITHMS = ("muon", "adamw")


def _param(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (6, 10)) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype))


def _grad(step: int, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(step + 1)).to(like.dtype)


def _make(param: nn.Parameter, algorithm: str, **options: Any) -> ParallelMuon:
    return ParallelMuon([{"params": [param], "algorithm": algorithm, "lr": 0.1, **options}], max_norm=5.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_maximize_is_a_step_on_the_negative_gradient(algorithm: str) -> None:
    params = [_param() for _ in range(2)]
    up, down = (_make(param, algorithm, maximize=raised) for param, raised in zip(params, (True, False)))
    for step in range(3):
        params[0].grad, params[1].grad = _grad(step, params[0]), -_grad(step, params[0])
        up.step()
        down.step()
    assert torch.equal(*params)


def test_maximize_after_a_step_that_was_refused() -> None:
    """The gradient is as it was: once the option is right, the step goes up."""
    params = [nn.Parameter(torch.eye(4)) for _ in range(2)]
    optimizers = [ParallelMuon([param], maximize=True) for param in params]
    optimizers[0].param_groups[0]["num_heads"] = 3
    for param in params:
        param.grad = torch.ones(4, 4)
    with pytest.raises(ConfigError, match="num_heads=3 does not divide"):
        optimizers[0].step()
    optimizers[0].param_groups[0]["num_heads"] = None
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(*params)


def test_maximize_leaves_the_gradient_for_a_second_step() -> None:
    params = [_param() for _ in range(2)]
    for param, maximize, sign in zip(params, (True, False), (1, -1)):
        optimizer = ParallelMuon([param], maximize=maximize)
        param.grad = sign * _grad(0, param)
        optimizer.step()
        optimizer.step()
    assert torch.equal(*params)


def test_errors_of_options_are_value_errors() -> None:
    for options in ({"lr": -1.0}, {"momentum": 1.5}, {"betas": (1.0, 0.9)}, {"eps": -1.0}, {"weight_decay": -1.0}):
        with pytest.raises(ValueError, match=next(iter(options))) as caught:
            ParallelMuon([_param()], **options)  # type: ignore[arg-type]
        assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("option", ["foreach", "fused", "capturable", "differentiable", "amsgrad"])
def test_options_without_a_meaning_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}=True is not an option of ParallelMuon"):
        ParallelMuon([{"params": [_param()], option: True}])
    ParallelMuon([{"params": [_param()], option: None}])  # PyTorch's default: nothing was asked for


def test_float64_equals_pytorchs_adamw() -> None:
    ours, theirs = _param(torch.float64), _param(torch.float64)
    optimizer = ParallelMuon([{"params": [ours], "algorithm": "adamw", "lr": 0.01, "weight_decay": 0.1}])
    other = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(4):
        ours.grad, theirs.grad = _grad(step, ours), _grad(step, ours)
        optimizer.step()
        other.step()
    assert optimizer.state[ours]["exp_avg"].dtype == torch.float64
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)  # the learning rate is a float32 on the device


@pytest.mark.parametrize("normuon", [False, True])
def test_float64_matrices_follow_float32_ones(normuon: bool) -> None:
    params = [_param(torch.float32), _param(torch.float64)]
    optimizers = [_make(param, "muon", normuon=normuon, weight_decay=0.1) for param in params]
    for step in range(3):
        for param, optimizer in zip(params, optimizers):
            param.grad = _grad(step, params[0]).to(param.dtype)
            optimizer.step()
    state = optimizers[1].state[params[1]]
    assert state["momentum_buffer"].dtype == params[1].dtype == torch.float64
    torch.testing.assert_close(params[1].float(), params[0], rtol=1e-4, atol=1e-5)
    again = _make(params[1], "muon", normuon=normuon)
    again.load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    assert torch.equal(again.state[params[1]]["momentum_buffer"], state["momentum_buffer"])


def _cycle(kind: str, optimizer: ParallelMuon) -> Any:
    if kind == "OneCycleLR":
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10, base_momentum=0.8, max_momentum=0.9)
    return torch.optim.lr_scheduler.CyclicLR(
        optimizer, 0.01, 0.1, step_size_up=3, cycle_momentum=True, base_momentum=0.8, max_momentum=0.9
    )


@pytest.mark.parametrize("kind", ["OneCycleLR", "CyclicLR"])
def test_schedulers_cycle_momentum_of_both_algorithms(kind: str) -> None:
    params = [_param() for _ in ALGORITHMS]
    groups = [{"params": [p], "algorithm": a, "momentum": 0.95} for p, a in zip(params, ALGORITHMS)]
    optimizer = ParallelMuon(groups)
    schedule = _cycle(kind, optimizer)
    seen = []
    for step in range(9):
        for param in params:
            param.grad = _grad(step, param)
        optimizer.step()
        muon, adamw = optimizer.param_groups
        seen.append((muon["momentum"], adamw["betas"][0]))
        schedule.step()
    assert all(momentum == beta for momentum, beta in seen)
    assert min(seen)[0] < 0.82
    assert max(seen)[0] > 0.88


def test_momentum_stays_where_no_scheduler_writes_it() -> None:
    param = _param()
    optimizer = ParallelMuon([{"params": [param], "momentum": 0.7, "betas": (0.5, 0.9)}])
    param.grad = _grad(0, param)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert optimizer.param_groups[0]["momentum"] == 0.7


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_learning_rate_of_zero_changes_nothing_and_a_tensor_counts(algorithm: str) -> None:
    param, start = _param(), _param()
    optimizer = _make(param, algorithm)
    optimizer.param_groups[0]["lr"] = 0.0
    param.grad = _grad(0, param)
    optimizer.step()
    assert torch.equal(param, start)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    optimizer.step()
    assert not torch.equal(param, start)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_gradients_and_no_graph_remain(algorithm: str) -> None:
    param = _param()
    optimizer = _make(param, algorithm)
    param.square().sum().backward()
    assert optimizer.step() is None
    assert param.requires_grad
    assert param.is_leaf
    assert all(not value.requires_grad for value in optimizer.state[param].values())
    optimizer.zero_grad()
    assert param.grad is None


def test_duplicate_parameters_and_empty_optimizers_are_refused() -> None:
    param = _param()
    with pytest.raises(ValueError, match="empty parameter list"):
        ParallelMuon([])
    with pytest.raises(ValueError, match="more than one parameter group"):
        ParallelMuon([{"params": [param]}, {"params": [param]}])


def test_a_complex_weight_is_refused() -> None:
    with pytest.raises(ConfigError, match="complex64"):
        ParallelMuon([nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))])


def test_parameters_without_names_beside_others_with_names() -> None:
    """Lightning adds groups of unfrozen parameters so, and `split_parameters` gives names."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = ParallelMuon(list(model.named_parameters()))
    added = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))]
    optimizer.add_param_group({"params": added})
    optimizer.add_param_group({"params": nn.Parameter(torch.ones(4, 4))})
    optimizer.add_param_group({"params": [("mine", nn.Parameter(torch.ones(4, 4)))]})
    assert optimizer.param_groups[1]["param_names"] == ["parameter 0 of group 1", "parameter 1 of group 1"]
    assert optimizer.param_groups[3]["param_names"] == ["mine"]
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not torch.equal(added[1], torch.ones(4, 4))
    with pytest.raises(TypeError, match="set"):
        optimizer.add_param_group({"params": {nn.Parameter(torch.ones(4, 4))}})


def test_parameters_with_names_after_others_without() -> None:
    """An empty group, too: a filter may find nothing."""
    first, second = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    optimizer = ParallelMuon([{"params": [first]}, {"params": []}, {"params": [("mine", second)]}, {"params": []}])
    names = [group["param_names"] for group in optimizer.param_groups]
    assert names == [["parameter 0 of group 0"], [], ["mine"], []]
    for param in (first, second):
        param.grad = torch.randn(4, 4)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ConfigError, match="a dict with 'params', got"):
        optimizer.add_param_group({"lr": 0.1})
