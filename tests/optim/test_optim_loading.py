"""Checkpoints of other optimizers and of other settings, and the order of hooks."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from parbank.errors import ConfigError
from parbank.optim import ParallelMuon


def _params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((8, 12), (12, 8))]


def _set_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def _train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], first: int, last: int) -> None:
    for step in range(first, last):
        _set_gradients(params, step)
        optimizer.step()


@pytest.mark.parametrize("step", ["tensor", "number", "int64"])
def test_a_checkpoint_of_adamw_continues_as_adamw(step: str) -> None:
    theirs = _params()
    other = torch.optim.AdamW(theirs, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    _train(other, theirs, 0, 3)
    saved = copy.deepcopy(other.state_dict())
    for values in saved["state"].values():
        if step == "number":
            values["step"] = int(values["step"])
        elif step == "int64":
            values["step"] = values["step"].long()
    ours = [nn.Parameter(p.detach().clone()) for p in theirs]
    optimizer = ParallelMuon([{"params": ours, "algorithm": "adamw", "normuon": True}])
    optimizer.load_state_dict(saved)
    group = optimizer.param_groups[0]
    assert (group["algorithm"], group["normuon"], group["lr"], group["betas"]) == ("adamw", True, 0.01, (0.8, 0.9))
    _train(other, theirs, 3, 6)
    _train(optimizer, ours, 3, 6)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert optimizer.state[a]["step"] == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
def test_a_checkpoint_of_torch_muon_continues(adjust: str | None, dtype: torch.dtype) -> None:
    """PyTorch's momentum is a mean and ours a sum: the loaded one is scaled. Its iteration rounds to bfloat16."""
    theirs = _params(dtype)
    other = torch.optim.Muon(theirs, lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn=adjust, ns_steps=4)
    _train(other, theirs, 0, 3)
    ours = [nn.Parameter(p.detach().clone()) for p in theirs]
    start = [p.detach().clone() for p in theirs]
    optimizer = ParallelMuon([{"params": ours, "num_heads": None, "cautious": False}])
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    group = optimizer.param_groups[0]
    assert group["lr_scale"] == ("rms" if adjust == "match_rms_adamw" else "spectral")
    assert (group["ns_steps"], group["momentum"]) == (4, 0.9)
    assert not {"ns_coefficients", "adjust_lr_fn"} & set(group)
    _train(other, theirs, 3, 6)
    _train(optimizer, ours, 3, 6)
    for a, b, s in zip(ours, theirs, start):
        if dtype == torch.float32:  # PyTorch loses small updates of bfloat16 weights
            assert ((a - s) - (b - s)).norm() < 0.02 * (b - s).norm()
        assert optimizer.state[a]["momentum_buffer"].dtype == torch.float32


def test_options_that_a_checkpoint_lacks_are_kept() -> None:
    theirs, ours = _params(), _params()
    saved = torch.optim.Muon(theirs, ns_coefficients=(3.0, -3.2, 1.2)).state_dict()
    optimizer = ParallelMuon([{"params": ours, "num_heads": 4, "cautious": True, "role": "mine"}])
    optimizer.load_state_dict(saved)
    group = optimizer.param_groups[0]
    assert (group["num_heads"], group["cautious"], group["role"]) == (4, True, "mine")
    assert group["coefficients"] == ((3.0, -3.2, 1.2),) * 5
    _train(optimizer, ours, 0, 1)


def test_refuses_a_checkpoint_that_does_not_fit() -> None:
    theirs, ours = _params(), _params()
    optimizer = ParallelMuon([{"params": ours, "algorithm": "adamw"}])
    for change, message in (
        (torch.optim.AdamW(theirs, amsgrad=True), "amsgrad"),
        (torch.optim.AdamW(theirs[::-1]), r"parameter 0 .*exp_avg.*\(12, 8\).*\(8, 12\)"),
    ):
        _train(change, theirs, 0, 1)
        with pytest.raises(ConfigError, match=message):
            optimizer.load_state_dict(change.state_dict())
    broken = torch.optim.AdamW(theirs).state_dict() | {"state": {1: {"step": 1.0, "exp_avg": {}, "exp_avg_sq": {}}}}
    with pytest.raises(ConfigError, match=r"parameter 1 .*exp_avg is a dict instead of a tensor"):
        optimizer.load_state_dict(broken)
    assert not optimizer.state
    _train(optimizer, ours, 0, 1)


@pytest.mark.parametrize(
    "given", [None, [1], {}, {"state": {}}, {"state": 3, "param_groups": 3}, {"model": {}, "optimizer": {}}]
)
def test_something_else_than_a_state_dict_is_refused(given: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"takes what state_dict\(\) of an optimizer returns.*pass the optimizer's part"
    ):
        ParallelMuon(_params()).load_state_dict(given)


@pytest.mark.parametrize(
    ("algorithm", "key", "value", "message"),
    [
        ("muon", "momentum_buffer", torch.zeros(8, 12, dtype=torch.complex64), "momentum_buffer is torch.complex64"),
        ("muon", "momentum_buffer", torch.zeros(8, 12, dtype=torch.int32), "momentum_buffer is torch.int32"),
        ("adamw", "step", "3", "step is '3' instead of a number"),
        ("adamw", "step", torch.zeros(2), "step is .* instead of a number"),
    ],
)
def test_a_state_of_other_numbers_is_refused(algorithm: str, key: str, value: Any, message: str) -> None:
    params = _params()
    optimizer = ParallelMuon([{"params": params, "algorithm": algorithm}])
    _train(optimizer, params, 0, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0][key] = value
    with pytest.raises(ConfigError, match=f"parameter 0 .*{message}"):
        optimizer.load_state_dict(saved)
    _train(optimizer, params, 1, 2)


OTHERS = ("RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adafactor", "ASGD", "Rprop", "Adadelta")


@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize("algorithm", ["adamw", "muon", "lion"])
@pytest.mark.parametrize("kind", OTHERS)
def test_a_checkpoint_of_an_optimizer_that_is_not_known_is_refused(kind: str, algorithm: str, stepped: bool) -> None:
    """Its learning rate would be taken over: Adadelta's is 1.0."""
    theirs, ours = _params(), _params()
    other = getattr(torch.optim, kind)(theirs)
    _train(other, theirs, 0, int(stepped))
    optimizer = ParallelMuon([{"params": ours, "algorithm": algorithm}])
    before = dict(optimizer.param_groups[0])
    with pytest.raises(ConfigError, match=r"written by another optimizer: it has .*load the weights only"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0] == before
    assert not optimizer.state


def test_a_checkpoint_of_dions_muon_is_refused() -> None:
    """Its groups say algorithm="muon", too, and its momentum has another name: it would be lost."""
    ours = _params()
    options = {"algorithm": "muon", "lr": 0.02, "mu": 0.95, "weight_decay": 0.1, "nesterov": True, "flatten": False}
    saved = {
        "state": {n: {"momentum": torch.ones_like(param)} for n, param in enumerate(ours)},
        "param_groups": [{**options, "params": [0, 1]}],
    }
    with pytest.raises(ConfigError, match="it has mu, which neither"):
        ParallelMuon(ours).load_state_dict(saved)


def test_a_state_that_adamw_does_not_keep_is_refused() -> None:
    theirs, ours = _params(), _params()
    other = torch.optim.AdamW(theirs)
    _train(other, theirs, 0, 1)
    saved = other.state_dict()
    saved["state"][1]["state1"] = torch.zeros(3)  # bits of a compressed state
    with pytest.raises(ConfigError, match="it has state1, which neither"):
        ParallelMuon([{"params": ours, "algorithm": "adamw"}]).load_state_dict(saved)


def test_a_group_with_some_of_our_options_is_ours() -> None:
    ours = _params()
    optimizer = ParallelMuon(ours)
    optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1], "lr": 0.5, "initial_lr": 0.7}]})
    assert optimizer.param_groups[0]["lr"] == 0.5


def _record_hooks(optimizer: torch.optim.Optimizer, events: list[str]) -> None:
    def note(name: str) -> Any:
        return lambda *_: events.append(name)

    optimizer.register_step_pre_hook(note("step pre"))
    optimizer.register_step_post_hook(note("step post"))
    optimizer.register_state_dict_pre_hook(note("save pre"))
    optimizer.register_state_dict_post_hook(note("save post"))
    optimizer.register_state_dict_post_hook(note("save first"), prepend=True)
    optimizer.register_load_state_dict_pre_hook(note("load pre"))
    optimizer.register_load_state_dict_pre_hook(note("load first"), prepend=True)
    optimizer.register_load_state_dict_post_hook(note("load post"))


def test_hooks_run_in_pytorchs_order() -> None:
    logs = []
    for kind in (torch.optim.AdamW, lambda p: ParallelMuon([{"params": p, "algorithm": "adamw"}])):
        events: list[str] = []
        params = _params()
        optimizer = kind(params)  # type: ignore[operator]
        _record_hooks(optimizer, events)
        _train(optimizer, params, 0, 2)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
        logs.append(events)
    assert logs[0] == logs[1]
    assert logs[0][-4:] == ["save post", "load first", "load pre", "load post"]


def test_hooks_may_change_what_is_saved_and_loaded() -> None:
    params = _params(torch.bfloat16)
    optimizer = ParallelMuon(params)
    _train(optimizer, params, 0, 2)

    def double(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {n: {k: v * 2 for k, v in values.items()} for n, values in state_dict["state"].items()}
        groups = [{**group, "lr": 0.5} for group in state_dict["param_groups"]]
        return {"state": state, "param_groups": groups}

    before = optimizer.state[params[0]]["momentum_buffer"].clone()
    seen = []
    handles = [
        optimizer.register_load_state_dict_pre_hook(double),
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[params[0]]["momentum_buffer"])),
    ]
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(optimizer.state[params[0]]["momentum_buffer"], 2 * before)
    assert seen[0] is optimizer.state[params[0]]["momentum_buffer"], "the hook must see what the optimizer uses"
    assert optimizer.param_groups[0]["lr"] == 0.5
    for handle in handles:
        handle.remove()
    optimizer.register_state_dict_post_hook(double)
    assert torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], 4 * before)
