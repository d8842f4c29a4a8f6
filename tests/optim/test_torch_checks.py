"""The checks that PyTorch makes of each of its optimizers, written out for ours: for every algorithm, as a user sees them."""

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from parbank.optim import ParallelMuon

LR = {"muon": 0.1, "adamw": 0.05, "lion": 0.01}
SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 5, gamma=0.9),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=0.4, total_iters=4),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 40, eta_min=1e-3),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.98),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, threshold=0.5, patience=1),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 5), torch.optim.lr_scheduler.StepLR(o, 10)], milestones=[6]
    ),
}


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _param(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(_random(0, 6, 10).to(dtype))


def _loss(param: Tensor) -> Tensor:
    return ((param.float() @ _random(9, 10, 4)) - _random(8, 6, 4)).square().mean()


def _make(param: nn.Parameter, algorithm: str, **options: Any) -> ParallelMuon:
    return ParallelMuon([{"params": [param], "algorithm": algorithm, "lr": LR[algorithm], **options}])


def _descend(param: nn.Parameter, optimizer: ParallelMuon, steps: int = 30, schedule: Any = None) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = _loss(param)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            schedule.step(loss.item())
        elif schedule is not None:
            schedule.step()
    return losses


@pytest.mark.parametrize("algorithm", LR)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_goes_in_the_right_direction(algorithm: str, dtype: torch.dtype) -> None:
    param = _param(dtype)
    losses = _descend(param, _make(param, algorithm))
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_write_rates_that_count(name: str, recwarn: pytest.WarningsRecorder) -> None:
    for algorithm in LR:
        param, twin = _param(), _param()
        optimizer, by_hand = _make(param, algorithm), _make(twin, algorithm)
        schedule = SCHEDULERS[name](optimizer)
        rates = []
        for _ in range(12):
            rates.append(optimizer.param_groups[0]["lr"])
            by_hand.param_groups[0]["lr"] = rates[-1]
            _descend(param, optimizer, 1, schedule)
            _descend(twin, by_hand, 1)
        assert len(set(rates)) > 1
        assert torch.equal(param, twin)


@pytest.mark.parametrize("algorithm", LR)
def test_a_rate_may_be_a_tensor(algorithm: str) -> None:
    params = [_param(), _param()]
    for param, lr in zip(params, (LR[algorithm], torch.tensor(LR[algorithm]))):
        _descend(param, _make(param, algorithm, lr=lr), 4)
    torch.testing.assert_close(*params)


@pytest.mark.parametrize("algorithm", LR)
def test_groups_have_their_own_rate_and_decay(algorithm: str) -> None:
    still, decayed = _param(), _param()
    groups = [
        {"params": [still], "lr": 0.0, "weight_decay": 0.5, "algorithm": algorithm},
        {"params": [decayed], "lr": 0.1, "weight_decay": 0.5, "algorithm": algorithm},
    ]
    optimizer = ParallelMuon(groups)
    still.grad, decayed.grad = torch.ones(6, 10), torch.zeros(6, 10)
    optimizer.step()
    assert torch.equal(still, _param())
    torch.testing.assert_close(decayed.detach(), _param().detach() * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("algorithm", LR)
def test_no_gradient_no_step_and_no_state(algorithm: str) -> None:
    param = _param()
    optimizer = _make(param, algorithm, weight_decay=0.1)
    optimizer.step()
    assert torch.equal(param, _param())
    assert not optimizer.state.get(param)


@pytest.mark.parametrize("cuda_graph", [False, "auto", True])
def test_a_group_may_be_empty(cuda_graph: bool | str) -> None:
    """As a filter leaves it that finds nothing."""
    optimizer = ParallelMuon([{"params": [], "algorithm": "adamw"}], cuda_graph=cuda_graph)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state


@pytest.mark.parametrize("algorithm", LR)
def test_a_gradient_of_zeros_moves_nothing(algorithm: str) -> None:
    param = _param()
    optimizer = _make(param, algorithm)
    param.grad = torch.zeros(6, 10)
    optimizer.step()
    assert torch.equal(param, _param())


@pytest.mark.parametrize("algorithm", LR)
def test_a_state_dict_is_the_same_twice_and_saves_with_weights_only(algorithm: str) -> None:
    param, other = _param(), _param()
    optimizer = _make(param, algorithm, weight_decay=0.1)
    _descend(param, optimizer, 3)
    first, second = optimizer.state_dict(), optimizer.state_dict()
    assert first["param_groups"] == second["param_groups"]
    assert all(torch.equal(first["state"][0][k], v) for k, v in second["state"][0].items())
    file = io.BytesIO()
    torch.save({"optimizer": first, "param": param.detach()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    with torch.no_grad():
        other.copy_(saved["param"])
    resumed = _make(other, algorithm)
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.param_groups[0]["weight_decay"] == 0.1
    assert _descend(param, optimizer, 3) == _descend(other, resumed, 3)
    assert torch.equal(param, other)


@pytest.mark.parametrize("algorithm", LR)
def test_the_state_lives_where_and_as_the_weight_does(algorithm: str) -> None:
    """Whatever the default device and dtype: a model is often made under `with torch.device("meta")`."""
    expected, param = _param(), _param()
    _descend(expected, _make(expected, algorithm, weight_decay=0.1), 3)
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            optimizer = _make(param, algorithm, weight_decay=0.1)
            optimizer.max_norm = 1e6
            for _ in range(3):
                param.grad = torch.autograd.grad(_on_cpu(param), param)[0]
                optimizer.step()
    finally:
        torch.set_default_dtype(default)
    assert {(v.device.type, v.dtype) for v in optimizer.state[param].values()} == {("cpu", torch.float32)}
    torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-6)


def _on_cpu(param: Tensor) -> Tensor:
    with torch.device("cpu"):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            return _loss(param)
        finally:
            torch.set_default_dtype(default)


def test_dtypes_may_be_mixed() -> None:
    params = [_param(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    optimizer = ParallelMuon(params, lr=0.1, max_norm=1.0)
    for step in range(3):
        for param in params:
            param.grad = _random(step + 1, 6, 10).to(param.dtype)
        optimizer.step()
    torch.testing.assert_close(params[0].detach(), params[2].detach().float(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(params[0].detach(), params[1].detach().float(), rtol=2e-2, atol=2e-2)


def test_parameters_come_as_any_iterable_but_a_set_or_a_tensor() -> None:
    def generate() -> Iterator[nn.Parameter]:
        yield _param()

    assert len(ParallelMuon(generate()).param_groups[0]["params"]) == 1
    assert ParallelMuon([("weight", _param())]).param_groups[0]["param_names"] == ["weight"]
    with pytest.raises(TypeError, match="ordered collections"):
        ParallelMuon([{"params": {_param()}}])
    with pytest.raises(TypeError, match="iterable"):
        ParallelMuon(_param())
    with pytest.raises(ValueError, match="non-leaf"):
        ParallelMuon([_param() * 2])
    with pytest.raises(TypeError, match="optimizer can only optimize Tensors"):
        ParallelMuon([3.0])


def test_names_travel_with_the_state() -> None:
    param = _param()
    optimizer = ParallelMuon([("block.weight", param)])
    _descend(param, optimizer, 1)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["block.weight"]
    other = ParallelMuon([("block.weight", _param())])
    other.load_state_dict(saved)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        ParallelMuon([{"params": [_param()]}, {"params": [_param()]}]).load_state_dict(saved)
    with pytest.raises(ValueError, match="doesn't match the size"):
        ParallelMuon([_param(), _param()]).load_state_dict(saved)


def test_hooks_run_around_each_step() -> None:
    param, seen = _param(), []
    optimizer = _make(param, "muon")
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("all before")),
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
        register_optimizer_step_post_hook(lambda *_: seen.append("all after")),
    ]
    try:
        _descend(param, optimizer, 1)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["all before", "before", "after", "all after"]
    _descend(param, optimizer, 1)
    assert len(seen) == 4


def test_copies_step_on_their_own_and_keep_what_is_public() -> None:
    param = _param()
    optimizer = ParallelMuon([param], lr=0.1, max_norm=2.0, reduce_gradients=False, maximize=False)
    _descend(param, optimizer, 2)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (twin.max_norm, twin.reduce_gradients) == (2.0, False)
        assert optimizer.defaults.items() <= twin.defaults.items()  # PyTorch adds one of its own
        (mine,) = twin.param_groups[0]["params"]
        assert mine is not param
        assert torch.equal(mine, param)
        _descend(mine, twin, 1)
        assert not torch.equal(mine, param)


def test_an_optimizer_pickled_by_an_earlier_version_goes_on() -> None:
    param = _param()
    optimizer = _make(param, "muon")
    _descend(param, optimizer, 1)
    for options in (optimizer.defaults, *optimizer.param_groups):
        for key in ("split_sizes", "equilibrate"):
            del options[key]
    twin = pickle.loads(pickle.dumps(optimizer))
    _descend(twin.param_groups[0]["params"][0], twin, 1)
    assert twin.param_groups[0]["split_sizes"] is None


def test_a_closure_has_gradients_on_and_its_value_comes_back() -> None:
    param = _param()
    optimizer = _make(param, "muon")

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = _loss(param)
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure) == _loss(_param())  # type: ignore[arg-type, comparison-overlap]


def test_can_be_printed_and_profiled() -> None:
    param = _param()
    optimizer = _make(param, "adamw")
    assert "Parameter Group 0" in repr(optimizer)
    param.grad = torch.ones(6, 10)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert any(event.key == "Optimizer.step#ParallelMuon.step" for event in profile.key_averages())
