"""Mistakes around an optimizer that must not pass in silence: weights that change, shared gradients, foreign checkpoints."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parbank.errors import ConfigError
from parbank.optim import ParallelMuon, orthogonalize, split_parameters

ALGORITHMS = ("muon", "adamw", "lion")


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _make(param: nn.Parameter, algorithm: str, **options: Any) -> ParallelMuon:
    return ParallelMuon([{"params": [param], "algorithm": algorithm, **{"lr": 0.1, **options}}])


def _step(optimizer: ParallelMuon, seed: int) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = _random(seed, *param.shape).to(param.dtype)
    optimizer.step()


# --- weights that change between steps --------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_weight_of_another_shape_is_refused_until_its_state_is_dropped(algorithm: str) -> None:
    """The strides stay as they were: a layout planned for the old shape would write beyond the state."""
    param = nn.Parameter(_random(0, 8, 4))
    optimizer = _make(param, algorithm)
    _step(optimizer, 1)
    param.grad, param.data = None, _random(2, 16, 4)
    with pytest.raises(ConfigError, match=r"had shape \(8, 4\).*has \(16, 4\) now"):
        _step(optimizer, 3)
    optimizer.state.pop(param)
    _step(optimizer, 3)
    assert (param != _random(2, 16, 4)).any(dim=1).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_weight_converted_to_float16_is_refused(algorithm: str) -> None:
    param = nn.Parameter(_random(0, 8, 4))
    optimizer = _make(param, algorithm)
    _step(optimizer, 1)
    param.grad, param.data = None, param.data.half()
    with pytest.raises(ConfigError, match="float16"):
        _step(optimizer, 2)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_weight_converted_to_float64_goes_on(algorithm: str) -> None:
    params = [nn.Parameter(_random(0, 8, 4)) for _ in range(2)]
    optimizers = [_make(param, algorithm) for param in params]
    for seed in range(4):
        if seed == 2:
            params[1].grad, params[1].data = None, params[1].data.double()
        for optimizer in optimizers:
            _step(optimizer, seed)
    torch.testing.assert_close(params[0].double(), params[1], rtol=1e-5, atol=1e-6)


def test_split_parameters_wants_the_model_itself() -> None:
    with pytest.raises(ConfigError, match=r"takes the model, a torch\.nn\.Module, got a generator"):
        split_parameters(nn.Linear(4, 4).parameters())  # type: ignore[arg-type]


def test_weights_without_values_are_refused() -> None:
    param = nn.Parameter(torch.empty(4, 4, device="meta"))
    optimizer = ParallelMuon([param])
    param.grad = torch.empty(4, 4, device="meta")
    with pytest.raises(ConfigError, match="meta device"):
        optimizer.step()


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("maximize", [False, True])
def test_parameters_may_share_a_gradient(algorithm: str, maximize: bool) -> None:
    """AdamW's kernel writes the clipped gradient back, and `maximize` negates it: neither may happen twice."""
    shared, alone = ([nn.Parameter(_random(seed, 8, 4)) for seed in range(2)] for _ in range(2))
    for step in range(2):
        grad = _random(step + 5, 8, 4)
        for params in (shared, alone):
            for param in params:
                param.grad = grad if params is shared else grad.clone()
        if step == 0:
            options = {"algorithm": algorithm, "lr": 0.1, "maximize": maximize}
            optimizers = [
                ParallelMuon([{"params": p, **options} for p in params], max_norm=0.1) for params in (shared, alone)
            ]
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(shared, alone):
        assert torch.equal(one, other)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_gradient_that_is_shared_by_opposite_directions(algorithm: str) -> None:
    params = [nn.Parameter(torch.zeros(8, 4)) for _ in range(2)]
    options = {"algorithm": algorithm, "lr": 0.1}
    groups = [{"params": param, **options, "maximize": up} for param, up in zip(params, (False, True))]
    params[0].grad = params[1].grad = _random(0, 8, 4)
    ParallelMuon(groups).step()
    assert params[0].abs().sum() > 0
    assert torch.equal(params[0], -params[1])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_maximize_takes_an_expanded_gradient(algorithm: str) -> None:
    up, down = (nn.Parameter(_random(0, 8, 4)) for _ in range(2))
    row = _random(1, 1, 4)
    up.grad, down.grad = row.expand(8, 4), -row.repeat(8, 1)
    _make(up, algorithm, maximize=True).step()
    _make(down, algorithm).step()
    assert torch.equal(up, down)


def test_a_norm_beyond_float32_is_not_called_another_ranks_fault(caplog: pytest.LogCaptureFixture) -> None:
    param = nn.Parameter(torch.eye(4))
    param.grad = torch.full((4, 4), 1e20)
    ParallelMuon([param]).step()
    assert "all are finite and their norm is too large for float32" in caplog.text
    assert torch.equal(param, torch.eye(4))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32])
def test_a_gradient_of_other_numbers_is_refused(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.eye(4))
    param.grad_dtype = None
    param.grad = torch.ones(4, 4, dtype=dtype)
    with pytest.raises(ConfigError, match=f"parameter 0 .* has a gradient of {dtype}; .*floating-point"):
        ParallelMuon([param]).step()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_gradient_of_another_shape_is_refused(algorithm: str) -> None:
    """As many numbers as the weight has: Muon would take rows for columns."""
    param = nn.Parameter(_random(0, 8, 4))
    optimizer = _make(param, algorithm)
    param.grad, param.data = _random(1, 8, 4), _random(2, 4, 8)
    with pytest.raises(ConfigError, match=r"has shape \(4, 8\) and a gradient of shape \(8, 4\)"):
        optimizer.step()


@pytest.mark.parametrize("max_norm", [None, 1e-3])
def test_scaled_gradients_whose_squares_overflow_are_no_reason_to_skip(max_norm: float | None) -> None:
    """The scaler sees finite gradients and keeps its scale: every later step would be skipped, too."""
    plain, scaled = (nn.Parameter(_random(0, 8, 4)) for _ in range(2))
    optimizers = [ParallelMuon([param], max_norm=max_norm) for param in (plain, scaled)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**80)
    for seed in range(3):
        plain.grad = _random(seed + 1, 8, 4)
        optimizers[0].step()
        scaler.scale(torch.zeros(()))  # makes its scale
        scaled.grad = _random(seed + 1, 8, 4) * 2.0**80
        scaler.step(optimizers[1])
        scaler.update()
        torch.testing.assert_close(optimizers[1].last_grad_norm, optimizers[0].last_grad_norm)
    torch.testing.assert_close(scaled, plain)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_a_tensor_option_is_checked_as_a_number_is(key: str) -> None:
    for value, message in ((torch.tensor([0.1, 0.2]), "one number"), (torch.tensor(-1.0), "negative")):
        with pytest.raises(ConfigError, match=f"{key} must.*{message}"):
            ParallelMuon([{"params": [nn.Parameter(torch.eye(4))], key: value}])


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"lr": "0.1"}, "lr must be a number, got '0.1'"),
    ({"lr": math.inf}, "lr must be a finite number, got inf"),
    ({"weight_decay": math.nan}, "weight_decay must be a finite number, got nan"),
    ({"momentum": "high"}, "momentum must be a number"),
    ({"ns_steps": 2.5}, "ns_steps must be a whole number of at least 1, got 2.5"),
    ({"betas": 0.9}, "betas must be two numbers, got 0.9"),
    ({"betas": (0.9, 1.0)}, "second of betas must be at least 0 and below 1, got 1.0"),
    ({"eps": -1.0}, "eps must not be negative"),
    ({"num_heads": 0}, "num_heads must be a whole number of at least 1, got 0"),
    ({"num_heads": 2.0}, "num_heads must be a whole number"),
    ({"nesterov": "no"}, "nesterov must be True or False, got 'no'"),
    ({"max_norm": "1"}, "max_norm must be a number above 0"),
    ({"extra_captured": 3}, "extra_captured must be callable, got 3"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_an_option_of_another_kind_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelMuon([nn.Parameter(torch.eye(4))], **options)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("momentun", "momentun is not an option of a group of ParallelMuon; use momentum instead"),
        ("adam_lr", "use lr instead"),
        ("use_muon", "use algorithm='adamw' or 'muon' instead"),
        ("mu", "use momentum instead"),
        ("max_norm", "max_norm is an option of the whole optimizer"),
        ("split_sizes", r"split_sizes must be the heights of the blocks of rows, such as \(768, 256, 256\); got 1"),
        ("transposed", "transposed must be True or False for each matrix"),
    ],
)
def test_a_name_in_a_group_that_would_do_nothing_is_refused(key: str, message: str) -> None:
    """PyTorch takes any key: embeddings under use_muon=False would be orthogonalised."""
    with pytest.raises(ConfigError, match=message):
        ParallelMuon([{"params": [nn.Parameter(torch.eye(4))], key: 1}])


def test_names_of_the_callers_own_and_of_schedulers_are_kept() -> None:
    own = {"name": "body", "initial_lr": 0.1, "max_momentum": 0.95, "base_momentum": 0.8, "layer": 3, "lr_mult": 2.0}
    optimizer = ParallelMuon([{"params": [nn.Parameter(torch.eye(4))], **own}])
    assert own.items() <= optimizer.param_groups[0].items()
    with pytest.raises(ConfigError, match="a parameter group is a dict with 'params', got"):
        optimizer.add_param_group([nn.Parameter(torch.eye(4))])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value"), [("lr", math.nan), ("lr", -0.1), ("momentum", 1.5), ("weight_decay", math.inf)]
)
def test_a_schedule_that_writes_what_no_step_can_use_is_told(key: str, value: float) -> None:
    param = nn.Parameter(torch.eye(4))
    optimizer = ParallelMuon([param])
    _step(optimizer, 1)
    before, optimizer.param_groups[0][key] = param.detach().clone(), value
    with pytest.raises(ConfigError, match=f"{key} must"):
        _step(optimizer, 2)
    assert torch.equal(param, before)


@pytest.mark.parametrize("key", ["lr", "momentum", "weight_decay", "row_beta"])
def test_a_number_may_be_a_tensor(key: str) -> None:
    params = [nn.Parameter(_random(0, 8, 4)) for _ in range(2)]
    for param, value in zip(params, (0.5, torch.tensor(0.5))):
        optimizer = _make(param, "muon", normuon=True, **{key: value})
        for seed in range(3):
            _step(optimizer, seed + 1)
    assert torch.equal(*params)


def test_a_schedule_may_end_a_rounding_error_below_zero() -> None:
    optimizer = ParallelMuon([nn.Parameter(torch.eye(4))])
    optimizer.param_groups[0]["lr"] = -1e-18
    _step(optimizer, 1)


def test_an_option_changed_later_is_checked_too() -> None:
    param = nn.Parameter(torch.eye(4))
    optimizer = ParallelMuon([param])
    _step(optimizer, 1)
    optimizer.param_groups[0]["lr_scale"] = "spectrum"
    with pytest.raises(ConfigError, match="lr_scale must be"):
        _step(optimizer, 2)


@pytest.mark.parametrize("change", [{"num_heads": 2}, {"split_sizes": (4, 4)}, {"split_sizes": (6, 2)}])
def test_normuon_begins_anew_when_heads_change(change: dict[str, Any]) -> None:
    params = [nn.Parameter(_random(0, 8, 4)) for _ in range(2)]
    changed, fresh = (
        ParallelMuon(params[:1], normuon=True),
        ParallelMuon([{"params": params[1:], **change}], normuon=True),
    )
    _step(changed, 1)
    changed.param_groups[0].update(change)
    params[1].data.copy_(params[0])
    fresh.state[params[1]]["momentum_buffer"] = changed.state[params[0]]["momentum_buffer"].clone()
    for optimizer in (changed, fresh):
        _step(optimizer, 2)
    assert torch.equal(*params)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_orthogonalize_refuses_other_numbers(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=str(dtype)):
        orthogonalize(torch.zeros(3, 3, dtype=dtype))


@pytest.mark.parametrize("method", ["plain", "symmetric", "gram"])
def test_orthogonalize_refuses_to_be_differentiated(method: str) -> None:
    weight = nn.Parameter(_random(0, 4, 6))
    with pytest.raises(ConfigError, match=r"no derivative.*pass G\.detach\(\)"):
        orthogonalize(weight, method=method)
    with torch.no_grad():
        assert torch.equal(orthogonalize(weight, method=method), orthogonalize(weight.detach(), method=method))


def test_a_momentum_written_after_a_schedule_stays() -> None:
    param = nn.Parameter(torch.eye(4))
    optimizer = ParallelMuon([param])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9, base_momentum=0.8, max_momentum=0.9)
    for seed in range(3):
        _step(optimizer, seed)
        schedule.step()
    assert optimizer.param_groups[0]["momentum"] < 0.9
    optimizer.param_groups[0]["momentum"] = 0.5
    _step(optimizer, 4)
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_a_copy_says_what_it_lacks(caplog: pytest.LogCaptureFixture) -> None:
    copy.deepcopy(ParallelMuon([nn.Parameter(torch.eye(4))]))
    assert not caplog.text
    copy.deepcopy(ParallelMuon([nn.Parameter(torch.eye(4))], extra_captured=lambda: None))
    assert "extra_captured" in caplog.text


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "algorithm", "writer"),
    [
        (torch.optim.AdamW, "muon", "adamw"),
        (lambda p: torch.optim.SGD(p, momentum=0.9), "muon", "sgd"),
        (lambda p: torch.optim.SGD(p, momentum=0.9), "adamw", "sgd"),
        (torch.optim.Muon, "adamw", "muon"),
        (ParallelMuon, "adamw", "muon"),
        (lambda p: ParallelMuon([{"params": p, "algorithm": "adamw"}]), "lion", "adamw"),
    ],
)
def test_a_checkpoint_of_another_algorithm_is_refused(make: Any, algorithm: str, writer: str) -> None:
    """AdamW's learning rate would train Muon at a hundredth of its speed, and Muon's would destroy AdamW's weights."""
    theirs = nn.Parameter(_random(0, 4, 4))
    other = make([theirs])
    theirs.grad = _random(1, 4, 4)
    other.step()
    optimizer = _make(nn.Parameter(_random(0, 4, 4)), algorithm)
    with pytest.raises(ConfigError, match=f"written by {writer}.*algorithm='{algorithm}'"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_adams_weight_decay_is_not_taken_for_adamws() -> None:
    saved = torch.optim.Adam([nn.Parameter(torch.eye(4))], weight_decay=0.1).state_dict()
    optimizer = _make(nn.Parameter(torch.eye(4)), "adamw")
    with pytest.raises(ConfigError, match=r"Adam with weight_decay=0\.1"):
        optimizer.load_state_dict(saved)
    optimizer.load_state_dict(torch.optim.Adam([nn.Parameter(torch.eye(4))]).state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_the_same_names_in_another_order_are_refused() -> None:
    first, second = (("a", nn.Parameter(torch.eye(4))), ("b", nn.Parameter(torch.eye(4))))
    saved = ParallelMuon([first, second]).state_dict()
    with pytest.raises(ConfigError, match="has a where the optimizer has b"):
        ParallelMuon([second, first]).load_state_dict(saved)
    ParallelMuon([(f"_orig_mod.{name}", param) for name, param in (first, second)]).load_state_dict(saved)
