"""Several ranks: the same result as one, whatever divides what; state that moves between numbers of ranks; no hanging.

Starting processes is what costs here, so one set of four ranks runs every scenario, on its first 1, 2, 3 and 4 members.
"""

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbank.errors import ConfigError
from parbank.optim import ParallelMuon, bank
from tests.distributed import DistributedTestError, run_distributed_test

STEPS = 10
BATCH = 12  # divided by 1, 2, 3 and 4 ranks


class Banked(nn.Module):
    """A bank that 2 to 4 ranks don't divide, its mirror shape, single matrices, and small parameters."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def make(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) / shape[-1] ** 0.5)

        self.bank = make(7, 8, 8)
        self.up = make(5, 12, 8)
        self.down = nn.ParameterList([make(8, 12) for _ in range(2)])
        self.head = make(6, 8)
        self.gain = make(8)
        self.bias = make(6)

    def forward(self, x: Tensor) -> Tensor:
        for w in self.bank:
            x = x + torch.tanh(x * self.gain @ w.T)
        for i, w in enumerate(self.up):
            x = x + torch.tanh(x @ w.T) @ self.down[i % 2].T
        return x @ self.head.T + self.bias

    def groups(self) -> list[dict[str, Any]]:
        flags = (True, False, True, False, False)
        return [
            {"params": [self.bank, *self.down], "lr": 0.02, "weight_decay": 0.1},
            {"params": [self.up], "lr": 0.03, "transposed": flags, "normuon": True},
            {"params": [self.head, self.gain, self.bias], "algorithm": "adamw", "lr": 0.01},
        ]


def _backward(model: nn.Module, step: int, rank: int, world: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    x, y = torch.randn(BATCH, 8, generator=generator), torch.randn(BATCH, 6, generator=generator)
    (model(x.chunk(world)[rank]) - y.chunk(world)[rank]).square().mean().backward()


def _train(
    model: nn.Module, optimizer: ParallelMuon, rank: int, world: int, first: int = 0, last: int = STEPS
) -> list[float]:
    norms = []
    for step in range(first, last):
        optimizer.zero_grad()
        _backward(model, step, rank, world)
        optimizer.step()
        norms.append(optimizer.last_grad_norm.item())
    return norms


def _vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# --- scenarios: (rank, world, group, folder) -> what the tests look at -------------------------------------------------


def _plain(rank: int, world: int, group: Any, folder: Path) -> dict[str, Any]:
    model = Banked()
    optimizer = ParallelMuon(model.groups(), process_group=group, max_norm=0.5)
    norms = _train(model, optimizer, rank, world)
    owned = {len(optimizer.state[model.bank]["momentum_buffer"]), len(optimizer.state[model.up]["momentum_buffer"])}
    state = optimizer.state_dict()
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": state}, folder / f"plain-{world}.pt")
    return {"weights": _vector(model), "norms": norms, "state": state, "owned": owned}


def _unclipped(rank: int, world: int, group: Any, folder: Path) -> dict[str, Any]:
    model = Banked()
    optimizer = ParallelMuon(model.groups(), process_group=group)
    return {"norms": _train(model, optimizer, rank, world), "weights": _vector(model)}


def _order(rank: int, world: int, group: Any, folder: Path) -> dict[str, list[str]]:
    """What happens in a step without a clip and with one: AdamW on the small parameters, and waiting for the batches."""
    from parbank.optim import collect
    from parbank.optim.algorithms.adamw import AdamW

    step, wait, found = AdamW.update, collect.wait, {}
    for name, clip in (("free", None), ("clipped", 0.5)):
        events: list[str] = []

        def stepping(*args: Any, seen: list[str] = events) -> None:
            seen.append("adamw")
            step(*args)

        def waiting(works: Any, seen: list[str] = events) -> None:
            if len(works) > 1:  # the flat sum is one
                seen.append("batches")
            wait(works)

        model = Banked()
        optimizer = ParallelMuon(model.groups(), process_group=group, max_norm=clip)
        AdamW.update, collect.wait = stepping, waiting  # type: ignore[assignment, method-assign]
        try:
            _train(model, optimizer, rank, world, 0, 1)
        finally:
            AdamW.update, collect.wait = step, wait  # type: ignore[method-assign]
        found[name] = list(dict.fromkeys(events))
    return found


def _equal_gradients(rank: int, world: int, group: Any, folder: Path) -> Tensor:
    """DDP: every rank has the mean gradient of the whole batch already."""
    from torch.nn.parallel import DistributedDataParallel

    model = Banked()
    wrapped = DistributedDataParallel(model, process_group=group) if world > 1 else model
    optimizer = ParallelMuon(model.groups(), process_group=group, max_norm=0.5, reduce_gradients=False)
    _train(wrapped, optimizer, rank, world)
    return _vector(model)


def _banked(rank: int, world: int, group: Any, folder: Path) -> tuple[Tensor, Tensor, bool]:
    """The same layers as plain Linears, once as they are and once as views of banks."""
    results = []
    for banked in (False, True):
        torch.manual_seed(5)
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)], nn.Linear(8, 6))
        banks = bank(model) if banked else []
        matrices = [layer.weight for layer in model[:5]]  # type: ignore[index, union-attr]
        rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
        groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw", "lr": 0.01}]
        optimizer = ParallelMuon(groups, process_group=group)
        _train(model, optimizer, rank, world)
        results.append(_vector(model))
    in_place = all(layer.weight.data_ptr() == banks[0].weights[i].data_ptr() for i, layer in enumerate(model[:5]))  # type: ignore[index, union-attr, arg-type]
    return results[0], results[1], in_place


def _missing(rank: int, world: int, group: Any, folder: Path) -> dict[str, Any]:
    """The last rank has no gradient for some parameters, and nobody has one for others."""
    model = Banked()
    optimizer = ParallelMuon(model.groups(), process_group=group)
    for step in range(3):
        optimizer.zero_grad()
        _backward(model, step, rank, world)
        if rank == world - 1 and world > 1:
            model.bank.grad = model.head.grad = None
        model.up.grad = model.bias.grad = None
        optimizer.step()
    start = Banked()
    return {
        "weights": _vector(model),
        "untouched": torch.equal(model.up, start.up) and torch.equal(model.bias, start.bias),
        "moved": not torch.equal(model.head, start.head) and not torch.equal(model.bank, start.bank),
        "steps": optimizer.state[model.head]["step"].item(),
        "bias_steps": optimizer.state[model.bias]["step"].item() if "step" in optimizer.state[model.bias] else 0.0,
    }


def _nothing(rank: int, world: int, group: Any, folder: Path) -> Tensor:
    """One rank has no gradient at all."""
    model = Banked()
    optimizer = ParallelMuon(model.groups(), process_group=group)
    if rank != world - 1:
        _backward(model, 0, rank, world)
    optimizer.step()
    return _vector(model)


def _not_finite(rank: int, world: int, group: Any, folder: Path) -> dict[str, Any]:
    """One element on one rank is not finite, once in a matrix and once in a small parameter."""
    model = Banked()
    optimizer = ParallelMuon(model.groups(), process_group=group)
    _train(model, optimizer, rank, world, 0, 2)
    weights, state = _vector(model), optimizer.state_dict()
    before = [v.clone() for values in state["state"].values() for v in values.values()]
    counts = []
    for target, value in ((model.bank, math.nan), (model.bias, math.inf)):
        optimizer.zero_grad()
        _backward(model, 2, rank, world)
        if rank == world - 1:
            assert target.grad is not None
            target.grad.view(-1)[3] = value
        optimizer.step()
        counts.append(int(optimizer.skipped_in_a_row))
    after = [v for values in optimizer.state_dict()["state"].values() for v in values.values()]
    same = torch.equal(weights, _vector(model)) and all(torch.equal(a, b) for a, b in zip(before, after))
    _train(model, optimizer, rank, world, 2, 3)
    return {
        "same": same,
        "counts": counts,
        "after": int(optimizer.skipped_in_a_row),
        "skipped": bool(optimizer.last_skipped),
    }


def _restore(rank: int, world: int, group: Any, folder: Path) -> dict[int, bool]:
    """Loads what every number of ranks has written, and writes it again."""
    same = {}
    for other in (1, 2, 3, 4):
        saved = torch.load(folder / f"plain-{other}.pt")
        model = Banked()
        model.load_state_dict(saved["model"])
        optimizer = ParallelMuon(model.groups(), process_group=group)
        optimizer.load_state_dict(saved["optimizer"])
        found = optimizer.state_dict()["state"]
        same[other] = _same_states(found, saved["optimizer"]["state"])
        _train(model, optimizer, rank, world, STEPS, STEPS + 1)
    return same


def _same_states(found: dict[int, Any], expected: dict[int, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        found[n].keys() == expected[n].keys()
        and all(torch.equal(v, expected[n][k]) and v.dtype == expected[n][k].dtype for k, v in found[n].items())
        for n in found
    )


def _save_distributed(rank: int, world: int, group: Any, folder: Path) -> Any:
    """Written through torch.distributed.checkpoint..."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = Banked()
    optimizer = ParallelMuon(model.groups(), process_group=group)
    _train(model, optimizer, rank, world, 0, 3)
    state = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": state}, checkpoint_id=folder / f"dcp-{world}", process_group=group, no_dist=world == 1)
    return state["state"]


def _load_distributed(rank: int, world: int, group: Any, folder: Path) -> dict[int, Any]:
    """... and read by other numbers of ranks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    found = {}
    for other in {1: (3,), 2: (), 3: (2,), 4: (1,)}[world]:
        model = Banked()
        before = _vector(model)
        optimizer = ParallelMuon(model.groups(), process_group=group)
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder / f"dcp-{other}", process_group=group, no_dist=world == 1)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        found[other] = get_optimizer_state_dict(model, optimizer)["state"]
        assert torch.equal(before, _vector(model)), "making the state must not move a weight"
    return found


def _regroup(rank: int, world: int, group: Any, folder: Path) -> Tensor:
    """Half the matrices join later, so that blocks change their owners with momentum in them; then an option changes too."""
    model = Banked()
    optimizer = ParallelMuon([{"params": [model.down[0], model.bank]}], process_group=group)
    _train(model, optimizer, rank, world, 0, 3)
    optimizer.add_param_group({"params": [model.up, model.down[1]], "transposed": None})
    _train(model, optimizer, rank, world, 3, 5)
    optimizer.param_groups[0]["ns_steps"] = 4
    _train(model, optimizer, rank, world, 5, 7)
    return _vector(model)


def _scaler(rank: int, world: int, group: Any, folder: Path) -> str:
    model = Banked()
    optimizer = ParallelMuon(model.groups(), process_group=group)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)  # type: ignore[attr-defined]
    _backward(model, 0, rank, world)
    try:
        optimizer.step()
    except ConfigError as error:
        return str(error)
    return "fine"


def _late_group(rank: int, world: int, group: Any, folder: Path) -> str:
    """Made when there was one rank, used when there are more."""
    model = Banked()
    optimizer = ParallelMuon(model.groups())
    optimizer.ranks.world = 1  # what it would have found before init_process_group
    _backward(model, 0, rank, world)
    with pytest.raises(ConfigError, match="init_process_group first"):
        optimizer.step()
    return "refused"


SCENARIOS: list[Callable[..., Any]] = [
    _plain, _unclipped, _order, _equal_gradients, _banked, _missing, _nothing, _not_finite, _restore,
    _save_distributed, _load_distributed, _regroup, _scaler, _late_group,
]  # fmt: skip


def _run_all(folder: Path) -> dict[str, list[Any]]:
    """{scenario: [result on 1 rank, on 2, 3 and 4]}; None where this rank takes no part."""
    rank = dist.get_rank()
    groups = [dist.new_group(range(world)) for world in range(1, dist.get_world_size() + 1)]
    results: dict[str, list[Any]] = {}
    for scenario in SCENARIOS:
        found = []
        for world, group in enumerate(groups, 1):
            found.append(scenario(rank, world, group, folder) if rank < world else None)
            dist.barrier()
        results[scenario.__name__] = found
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Any]]]:
    """[rank][scenario][world - 1]."""
    return run_distributed_test(_run_all, 4, args=(tmp_path_factory.mktemp("ranks"),), timeout=500)


Ranks = list[dict[str, list[Any]]]
several = pytest.mark.parametrize("world", [2, 3, 4])


def _weights(ranks: Ranks, scenario: str, world: int) -> Tensor:
    """What all ranks of a world agree on, to the last bit."""
    found = [ranks[rank][scenario][world - 1] for rank in range(world)]
    vectors = [f["weights"] if isinstance(f, dict) else f for f in found]
    assert all(torch.equal(vectors[0], other) for other in vectors[1:]), "ranks drifted apart"
    return vectors[0]


@several
@pytest.mark.parametrize("scenario", ["_plain", "_unclipped", "_regroup"])
def test_equals_one_rank(ranks: Ranks, scenario: str, world: int) -> None:
    torch.testing.assert_close(_weights(ranks, scenario, world), _weights(ranks, scenario, 1), rtol=1e-4, atol=1e-5)


@several
def test_norm_is_global(ranks: Ranks, world: int) -> None:
    norms = ranks[0]["_plain"][0]["norms"]
    assert max(norms) > 0.5, "the clip must have been at work"
    for rank in range(world):
        torch.testing.assert_close(ranks[rank]["_plain"][world - 1]["norms"], norms, rtol=1e-4, atol=0)


@several
def test_norm_without_a_clip(ranks: Ranks, world: int) -> None:
    """AdamW has then scaled the small gradients before the norm is taken."""
    expected = ranks[0]["_unclipped"][0]["norms"]
    for rank in range(world):
        torch.testing.assert_close(ranks[rank]["_unclipped"][world - 1]["norms"], expected, rtol=1e-4, atol=0)


@several
def test_adamw_runs_while_the_batches_fly_unless_a_clip_makes_it_wait(ranks: Ranks, world: int) -> None:
    for rank in range(world):
        found = ranks[rank]["_order"][world - 1]
        assert found == {"free": ["adamw", "batches"], "clipped": ["batches", "adamw"]}


@several
def test_equal_gradients_are_not_reduced_again(ranks: Ranks, world: int) -> None:
    torch.testing.assert_close(
        _weights(ranks, "_equal_gradients", world), _weights(ranks, "_plain", 1), rtol=1e-4, atol=1e-5
    )


@several
def test_banked_model(ranks: Ranks, world: int) -> None:
    for rank in range(world):
        plain, banked, in_place = ranks[rank]["_banked"][world - 1]
        assert in_place
        torch.testing.assert_close(banked, plain, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(plain, ranks[0]["_banked"][0][0], rtol=1e-4, atol=1e-5)


@several
def test_shares_differ_by_at_most_one(ranks: Ranks, world: int) -> None:
    for rank in range(world):
        for count in ranks[rank]["_plain"][world - 1]["owned"]:
            assert count <= math.ceil(7 / world)


@several
def test_gradients_missing_on_some_ranks(ranks: Ranks, world: int) -> None:
    for rank in range(world):
        found = ranks[rank]["_missing"][world - 1]
        assert found["untouched"]
        assert found["moved"]
        assert (found["steps"], found["bias_steps"]) == (3.0, 0.0)
    _weights(ranks, "_missing", world)


@several
def test_a_rank_without_gradients(ranks: Ranks, world: int) -> None:
    assert not torch.equal(_weights(ranks, "_nothing", world), _vector(Banked()))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_not_finite_on_one_rank_skips_on_all(ranks: Ranks, world: int) -> None:
    for rank in range(world):
        assert ranks[rank]["_not_finite"][world - 1] == {"same": True, "counts": [1, 2], "after": 0, "skipped": False}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_restores_what_any_number_of_ranks_wrote(ranks: Ranks, world: int) -> None:
    for rank in range(world):
        assert ranks[rank]["_restore"][world - 1] == {1: True, 2: True, 3: True, 4: True}


@pytest.mark.parametrize(("written", "read"), [(2, 3), (3, 1), (1, 4)])
def test_restores_through_distributed_checkpoint(ranks: Ranks, written: int, read: int) -> None:
    expected = ranks[0]["_save_distributed"][written - 1]
    assert expected
    for rank in range(read):
        assert _same_states(ranks[rank]["_load_distributed"][read - 1][written], expected)


@several
def test_scaler_is_refused_where_scales_could_differ(ranks: Ranks, world: int) -> None:
    assert "bfloat16" in ranks[0]["_scaler"][world - 1]
    assert ranks[0]["_scaler"][0] == "fine"


def test_a_group_started_too_late_is_refused(ranks: Ranks) -> None:
    assert ranks[0]["_late_group"][3] == "refused"


# --- a rank that dies -------------------------------------------------------------------------------------------------


def _die_at_step_two() -> str:
    model = Banked()
    optimizer = ParallelMuon(model.groups())
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        for step in range(100):
            if step == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            _backward(model, step, rank, world)
            optimizer.step()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def test_a_killed_rank_ends_the_others_with_an_error() -> None:
    """Long before a collective gives up: the helper waits no longer than `GRACE_SECONDS` for their words."""
    with pytest.raises(DistributedTestError) as caught:
        run_distributed_test(_die_at_step_two, 3)
    assert caught.value.exit_codes[1] == -signal.SIGKILL
    assert set(caught.value.results) == {0, 2}, caught.value
    assert all("Error" in said for said in caught.value.results.values())
