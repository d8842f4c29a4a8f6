"""Ranks that disagree end at the first step, by an error with rank and parameter; and calls on one rank do not hang.

One set of three ranks runs every scenario.
"""

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbank.errors import ConfigError, RankError
from parbank.optim import ParallelMuon, agreement, meeting, split_parameters
from tests.distributed import run_distributed_test

WORLD = 3


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = {"first": nn.Linear(6, 6), "second": nn.Linear(6, 6), "norm": nn.LayerNorm(6), "head": nn.Linear(6, 2)}
    return nn.ModuleDict(layers)


def _backward(model: Any, seed: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    model["head"](model["norm"](model["second"](model["first"](x).tanh()))).square().mean().backward()


def _alike(rank: int) -> ParallelMuon:
    model = _model()
    _backward(model, rank)
    empty: list[dict[str, Any]] = [{"params": [], "algorithm": "adamw"}]  # as a filter leaves it that finds nothing
    return ParallelMuon(empty + split_parameters(model))


def _other_weight(rank: int) -> ParallelMuon:
    model: Any = _model()
    if rank == 1:
        with torch.no_grad():
            model["second"].weight[2, 3] += 1e-6
    _backward(model, rank)
    return ParallelMuon(split_parameters(model))


def _other_option(rank: int) -> ParallelMuon:
    model = _model()
    _backward(model, rank)
    return ParallelMuon(split_parameters(model, lr=0.03 if rank == 2 else 0.02))


def _other_order(rank: int) -> ParallelMuon:
    model: Any = _model()
    _backward(model, rank)
    named = list(model.named_parameters())
    matrices = [(name, param) for name, param in named if param.ndim == 2]
    return ParallelMuon(matrices[::-1] if rank == 1 else matrices)


def _fewer_parameters(rank: int) -> ParallelMuon:
    model: Any = _model()
    _backward(model, rank)
    matrices = [param for param in model.parameters() if param.ndim == 2]
    return ParallelMuon(matrices[: 2 if rank == 0 else 3])


def _other_clip(rank: int) -> ParallelMuon:
    model = _model()
    _backward(model, rank)
    return ParallelMuon(split_parameters(model), max_norm=1.0 if rank else None)


def _not_reduced(rank: int) -> ParallelMuon:
    model = _model()
    _backward(model, rank)
    return ParallelMuon(split_parameters(model), reduce_gradients=False)


def _reduced(rank: int) -> ParallelMuon:
    model = _model()
    _backward(model, 0)
    return ParallelMuon(split_parameters(model), reduce_gradients=False)


def _permuted_weight(rank: int) -> ParallelMuon:
    """The same numbers in another order."""
    model: Any = _model()
    if rank == 1:
        model["first"].weight.data = model["first"].weight.data.flip(0)
    _backward(model, rank)
    return ParallelMuon(split_parameters(model))


def _trained(rank: int) -> tuple[ParallelMuon, dict[str, Any]]:
    """A new optimizer, and the state of one that has taken a step."""
    optimizer = _alike(rank)
    optimizer.step()
    return _alike(rank), optimizer.state_dict()


def _same_state(rank: int) -> ParallelMuon:
    optimizer, state = _trained(rank)
    optimizer.load_state_dict(state)
    return optimizer


def _other_momentum(rank: int) -> ParallelMuon:
    optimizer, state = _trained(rank)
    state["state"][1]["momentum_buffer"] *= 2 if rank == 2 else 1
    optimizer.load_state_dict(state)
    return optimizer


def _other_moments(rank: int) -> ParallelMuon:
    optimizer, state = _trained(rank)
    state["state"][7]["exp_avg"] *= 2 if rank == 1 else 1
    optimizer.load_state_dict(state)
    return optimizer


def _loaded_by_one(rank: int) -> ParallelMuon:
    """`if rank == 0: optimizer.load_state_dict(...)`."""
    optimizer, state = _trained(rank)
    if rank == 0:
        optimizer.load_state_dict(state)
    return optimizer


def _other_step_count(rank: int) -> ParallelMuon:
    """A state that nobody loaded."""
    optimizer = _same_state(rank)
    optimizer._agreement = agreement.Agreement()
    if rank == 1:
        optimizer.state[optimizer.param_groups[-1]["params"][0]]["step"] += 1
    return optimizer


MISTAKES: dict[Callable[[int], ParallelMuon], str | None] = {
    _alike: None,
    _reduced: None,
    _other_weight: r"rank 1 differs from rank 0 in the weight of second.weight: .*broadcast the weights",
    _other_option: r"rank 2 differs from rank 0 in lr of group 0: 0.03, against 0.02; build the optimizer with the same",
    _other_order: r"rank 1 differs from rank 0 in parameter 0 of group 0: head.weight \(2, 6\).*against first.weight",
    _fewer_parameters: r"rank 0 differs from rank 1 in the number of parameters: \[2\], against \[3\]",
    _other_clip: r"rank 0 differs from rank 1 in max_norm: None, against 1.0",
    _permuted_weight: r"rank 1 differs from rank 0 in the weight of first.weight: .*broadcast the weights",
    _same_state: None,
    _other_momentum: r"rank 2 differs from rank 0 in the loaded state of second.weight: momentum_buffer: .*same checkpoint",
    _other_moments: r"rank 1 differs from rank 0 in the loaded state of head.bias: exp_avg: digest .*same checkpoint",
    _loaded_by_one: r"rank 0 differs from rank 1 in the loaded state of first.weight: .*, against nothing; load the same",
    _other_step_count: r"rank 1 differs from rank 0 in the state of .*: step: digest .*same checkpoint",
    _not_reduced: r"rank . differs from rank 0 in the gradient of .*: wrap the model in DistributedDataParallel",
}


def _run() -> dict[str, Any]:
    rank = dist.get_rank()
    said: dict[str, Any] = {}
    for scenario in MISTAKES:
        optimizer = scenario(rank)
        try:
            optimizer.step()
            said[scenario.__name__] = None
        except RankError as error:
            said[scenario.__name__] = str(error)
    said["parted"], said["reloaded"] = _part_later(rank), _reload_later(rank)
    shared = {"pickled": _pickle(rank), "mixed": _mix_dtypes([_gradient(n, rank) for n in range(3)])}
    shared["wide"] = _step_float64(_gradient(1, rank))
    dtypes = _default_dtypes(rank)
    saved = {"alone": _save_alone(rank), "warned": _save_too_soon(rank)}
    return {"said": said, **shared, "dtypes": dtypes, **saved, "added": _add_later(rank)}


def _pickle(rank: int) -> bytes:
    optimizer = _alike(rank)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    twin.step()  # a copy on the same rank has what it needs
    return pickle.dumps((optimizer, optimizer.state_dict()))


def _gradient(number: int, rank: int) -> Tensor | None:
    """A few bits, so that sums are exact in any dtype. The last rank has none for the second weight."""
    if number == 1 and rank == WORLD - 1:
        return None
    return torch.randint(-8, 9, (6, 6), generator=torch.Generator().manual_seed(10 * number + rank)).float() / 8


def _mix_dtypes(grads: list[Tensor | None]) -> list[Tensor]:
    """One batch with gradients of three dtypes (`param.grad_dtype`)."""
    params = [nn.Parameter(torch.eye(6) + n) for n in range(3)]
    for param, grad, dtype in zip(params, grads, (torch.float32, torch.bfloat16, torch.float16)):
        param.grad_dtype = dtype
        param.grad = None if grad is None else grad.to(dtype)
    ParallelMuon(params).step()
    return [param.detach() for param in params]


def _step_float64(grad: Tensor | None) -> Tensor:
    """AdamW on float64 weights, as a model of that dtype has them."""
    param = nn.Parameter(torch.ones(6, 6, dtype=torch.float64))
    param.grad = None if grad is None else grad.double()
    ParallelMuon([{"params": [param], "algorithm": "adamw"}]).step()
    return param.detach()


def _part_later(rank: int) -> str:
    """A schedule that looks at the loss of each rank, not at the mean of all."""
    agreement.INTERVAL = 4
    optimizer = _alike(rank)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    try:
        for step in range(9):
            optimizer.step()
            schedule.step(-step if rank == 1 else 1.0)
    except RankError as error:
        return f"{error} after {step} steps"
    return "trained on"


def _reload_later(rank: int) -> str:
    """One rank loads a checkpoint after the first step: the others, which do not know, must not hang."""
    optimizer, state = _trained(rank)
    try:
        for step in range(9):
            optimizer.step()
            if rank == 2 and step == 1:
                optimizer.load_state_dict(state)
    except RankError as error:
        return f"{error} after {step} steps"
    return "trained on"


def _save_alone(rank: int) -> dict[str, Any]:
    """DDP: rank 0 saves without the others, as HF Trainer does. Returns its state and the weights, and each rank's own."""
    model = _model()
    optimizer = ParallelMuon(_with_normuon(model), reduce_gradients=False, max_norm=1.0)
    for step in range(3):
        optimizer.zero_grad()
        _backward(model, step)
        optimizer.step()
    saved = optimizer.state_dict() if rank == 0 else None
    dist.barrier()
    return {"saved": saved, "state": optimizer.state_dict()["state"]}


def _with_normuon(model: nn.Module) -> list[dict[str, Any]]:
    return [{**group, "normuon": True, "num_heads": None} for group in split_parameters(model)]


@contextmanager
def _impatient() -> Iterator[None]:
    """Rank 0 soon says that it is alone. Only where no other rank comes: a busy machine may hold one up for longer."""
    usual = meeting.WARN_SECONDS, meeting.ALONE_SECONDS
    meeting.WARN_SECONDS, meeting.ALONE_SECONDS = 0.2, 0.5
    try:
        yield
    finally:
        meeting.WARN_SECONDS, meeting.ALONE_SECONDS = usual


def _save_too_soon(rank: int) -> str:
    """Without DDP, rank 0 saves without the others: it is told. Then all ranks save."""
    optimizer = _alike(rank)
    optimizer.step()
    said = ""
    if rank == 0:
        try:
            with _impatient():
                optimizer.state_dict()
        except RankError as error:
            said = str(error)
    dist.barrier()
    assert len(optimizer.state_dict()["state"]) == 8
    return said


def _add_later(rank: int) -> tuple[str, str]:
    """One rank adds a group alone, after the first step; then every rank adds one, and that of one rank differs."""
    optimizer = _alike(rank)
    optimizer.step()
    said = ""
    if rank == 0:
        try:
            with _impatient():
                optimizer.add_param_group({"params": [nn.Parameter(torch.eye(4))]})
        except RankError as error:
            said = str(error)
    dist.barrier()
    optimizer.add_param_group({"params": [nn.Parameter(torch.eye(4 + (rank == 1)))]})
    try:
        optimizer.step()
    except RankError as error:
        return said, str(error)
    return said, "trained on"


def _default_dtypes(rank: int) -> tuple[list[str], bool]:
    """The dtypes of the state, and whether weights are those of a run with float32 as default."""
    ends, kinds = [], []
    for default in (torch.float32, torch.bfloat16):
        model = _model()
        torch.set_default_dtype(default)
        try:
            optimizer = ParallelMuon(split_parameters(model), normuon=True, max_norm=1.0)
            for step in range(2):
                optimizer.zero_grad()
                for number, param in enumerate(model.parameters()):
                    generator = torch.Generator().manual_seed(100 * number + 10 * step + rank)
                    param.grad = torch.randn(param.shape, dtype=torch.float32, generator=generator)
                optimizer.step()
            saved = optimizer.state_dict()["state"]
        finally:
            torch.set_default_dtype(torch.float32)
        kinds += [str(v.dtype) for held in (*optimizer.state.values(), *saved.values()) for v in held.values()]
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return sorted(set(kinds)), torch.equal(*ends)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_distributed_test(_run, WORLD)


@pytest.mark.parametrize("scenario", MISTAKES, ids=lambda scenario: scenario.__name__)
def test_ranks_that_disagree_are_told_at_the_first_step(ranks: list[Any], scenario: Callable[..., Any]) -> None:
    message = MISTAKES[scenario]
    for result in ranks:
        said = result["said"][scenario.__name__]
        if message is None:
            assert said is None
        else:
            assert said is not None, "trained on"
            assert re.search(message, said), said


def test_ranks_whose_schedules_part_are_told_later(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        said = result["said"]["parted"]
        assert re.search("rank 1 differs from rank 0 in lr of group 0: .*mean loss of all ranks after 4 steps", said), (
            said
        )


def test_a_rank_that_loads_later_and_alone_is_told(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        said = result["said"]["reloaded"]
        assert re.search(
            "rank 2 differs from rank 0 in the loaded state of .* against nothing; .* after 4 steps", said
        ), said


def test_a_pickled_optimizer_that_holds_a_part_says_so(ranks: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(ranks):
        optimizer, whole = pickle.loads(result["pickled"])
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params:
            param.grad = torch.ones_like(param)
        with pytest.raises(ConfigError, match=rf"pickled on rank {rank} of 3 .*here is rank 0 of 1; save .*state_dict"):
            optimizer.step()
        optimizer.load_state_dict(whole)
        optimizer.step()


def test_gradients_of_several_dtypes(ranks: list[dict[str, Any]]) -> None:
    grads: list[Tensor | None] = []
    for number in range(3):
        parts = [grad for rank in range(WORLD) if (grad := _gradient(number, rank)) is not None]
        grads.append(torch.stack(parts).sum(0))  # not divided: the length of a gradient does not matter
    expected = _mix_dtypes(grads)
    for result in ranks:
        for a, b in zip(result["mixed"], expected):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
            assert not torch.equal(b, torch.eye(6))


def test_a_float64_weight_without_a_gradient_on_one_rank(ranks: list[dict[str, Any]]) -> None:
    """Every rank must send as many bytes as the others."""
    grads = [_gradient(1, rank) for rank in range(WORLD)]
    mean = torch.stack([torch.zeros(6, 6) if grad is None else grad for grad in grads]).double().mean(0)
    for result in ranks:
        assert torch.equal(result["wide"], _step_float64(mean))


def test_the_default_dtype_does_not_reach_the_state(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["dtypes"] == (["torch.float32"], True)


def test_one_rank_saves_alone_where_gradients_are_equal(ranks: list[dict[str, Any]]) -> None:
    """Every rank holds the same whole state, bit for bit, and it is that of one process."""
    model = _model()
    optimizer = ParallelMuon(_with_normuon(model), max_norm=1.0)
    for step in range(3):
        optimizer.zero_grad()
        _backward(model, step)
        optimizer.step()
    saved = ranks[0]["alone"]["saved"]
    for number, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(saved["state"][number][key], value, rtol=1e-5, atol=1e-6)
            for result in ranks:
                assert torch.equal(result["alone"]["state"][number][key], saved["state"][number][key]), (number, key)
    optimizer.load_state_dict(saved)


def test_a_group_that_one_rank_adds_alone_or_otherwise_is_told(ranks: list[dict[str, Any]]) -> None:
    assert "rank 1, 2 did not call it" in ranks[0]["added"][0]
    assert "add the group on every rank" in ranks[0]["added"][0]
    for result in ranks:
        assert "rank 1 differs from rank 0 in parameter 0 of group" in result["added"][1]


def test_saving_on_one_rank_alone_says_what_to_do(ranks: list[dict[str, Any]]) -> None:
    assert "rank 1, 2 did not call it" in ranks[0]["warned"]
    assert "call state_dict() on every rank and write the file on one" in ranks[0]["warned"]
