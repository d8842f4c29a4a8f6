"""While the updates of one batch travel, the next batch is worked on: a rank that is late holds nobody up. And while backward
runs, gradients that are complete travel already. Two ranks are enough to see that, and that they clip by one norm."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbank.errors import ConfigError
from parbank.optim import ParallelMuon
from parbank.optim.algorithms import muon
from tests.distributed import run_distributed_test

PATIENCE_SECONDS = 60.0  # beside other work on the machine; the other rank needs milliseconds
# Two batches each, the larger first. Even: both ranks own blocks of both batches, and an all-gather shares the updates. Left
# over: each batch is one block, owned by one rank, which broadcasts its update; the ranks own one batch each.
CASES = {"even": ((4, 8, 8), (4, 6, 6)), "left over": ((8, 8), (6, 6))}


def _make_gradients(case: str, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [10 * rank + torch.randn(shape, generator=generator) for shape in CASES[case]]


def _step(case: str, folder: Path) -> tuple[Tensor, float]:
    """One step in which one rank stays in Newton-Schulz of the first batch until the other has come to the second: the
    weights, and the norm that was clipped by."""
    rank = dist.get_rank()
    late = 1 if case == "even" else 0  # left over, the first rank owns the first batch
    iterate, began = muon.iterate_in_parts, folder / case

    def watched(X: Tensor, *args: Any, **options: Any) -> Tensor:
        if X.shape[-1] == 6 and rank != late:
            began.touch()
        if X.shape[-1] == 8 and rank == late:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not began.exists():
                assert time.monotonic() < deadline, "the other rank waits for this batch and does not go on to the next"
                time.sleep(0.001)
        return iterate(X, *args, **options)

    weights = [nn.Parameter(torch.ones(shape)) for shape in CASES[case]]
    for weight, grad in zip(weights, _make_gradients(case, rank)):
        weight.grad = grad
    optimizer = ParallelMuon(weights, max_norm=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "iterate_in_parts", watched)
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in weights]), float(optimizer.last_grad_norm)


class Net(nn.Module):
    """A bank, five matrices with a joint one among them, and a gain."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.bank = nn.Parameter(torch.randn(3, 8, 8, generator=generator) / 3)
        self.layers = nn.ParameterList([torch.randn(8, 8, generator=generator) / 3 for _ in range(4)])
        self.joint = nn.Parameter(torch.randn(8, 8, generator=generator) / 3)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, used: int = 4) -> Tensor:
        for w in self.bank:
            x = x + torch.tanh(x @ w.T)
        for number in range(used):
            x = x + torch.tanh(x @ self.layers[number].T)
        return (x * self.gain) @ self.joint.T

    def optimizer(self, clip: float | None) -> ParallelMuon:
        groups = [
            {"params": [self.bank, *self.layers]},
            {"params": [self.joint], "split_sizes": (5, 3)},
            {"params": [self.gain], "algorithm": "adamw", "lr": 0.01},
        ]
        return ParallelMuon(groups, max_norm=clip)


def _train(during_backward: bool, clip: float | None) -> Tensor:
    """The first rank leaves out the last layer, one step is not taken, and one gradient is not finite."""
    rank, model = dist.get_rank(), Net()
    optimizer = model.optimizer(clip)
    for step in range(5):
        optimizer.zero_grad()
        x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(step))
        model(x[rank] / 2).sum().backward()  # a first part of the batch, which stays on this rank
        with optimizer.reducing() if during_backward else nullcontext():
            loss = model(x[rank], used=4 - (rank == 0)).square().mean()
            (loss * torch.nan if step == 3 and rank == 1 else loss).backward()
        if step != 1:
            optimizer.step()
        assert bool(optimizer.last_skipped) == (step == 3)
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def _find_order(folder: Path) -> list[str]:
    """When the reductions start, and when the last gradient is found."""
    events: list[str] = []
    model = Net()
    optimizer = model.optimizer(None)
    start = optimizer.ranks.reduce_to

    def watched(block: Tensor, owner: int) -> list[Any]:
        events.append(f"reduce {tuple(block.shape)}")
        return start(block, owner)

    optimizer.ranks.reduce_to = watched  # type: ignore[method-assign]
    model.bank.register_post_accumulate_grad_hook(lambda param: events.append("last gradient"))
    with optimizer.reducing():
        model(torch.ones(2, 8), used=4 - dist.get_rank()).sum().backward()
    optimizer.step()
    return events


def _make_mistakes() -> list[str]:
    """Gradients that change while they are being summed: by a second backward, and by a clip of the caller's."""
    said = []
    for mistake in ("a second backward", "a clip"):
        model = Net()
        optimizer = model.optimizer(None)
        try:
            with optimizer.reducing():
                for _ in range(1 + (mistake == "a second backward")):
                    model(torch.ones(2, 8)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            said.append("trained on")
        except ConfigError as error:
            said.append(str(error))
        dist.barrier()
    return said


def _run(folder: Path) -> dict[str, Any]:
    trained = {(during, clip): _train(during, clip) for during in (False, True) for clip in (None, 0.5)}
    steps = {case: _step(case, folder) for case in CASES}
    return {**steps, "trained": trained, "order": _find_order(folder), "mistakes": _make_mistakes()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("overlap")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_distributed_test(_run, 2, args=(folder,))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_reducing_during_backward_changes_nothing(ranks: list[dict[str, Any]], clip: float | None) -> None:
    for rank in ranks:
        torch.testing.assert_close(rank["trained"][True, clip], rank["trained"][False, clip], rtol=1e-5, atol=1e-6)
        assert torch.equal(rank["trained"][True, clip], ranks[0]["trained"][True, clip])


def test_gradients_travel_while_backward_runs(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["order"] for rank in ranks)
    assert first.index("last gradient") >= 6, "the joint matrix's blocks and four layers are on their way by then"
    assert second.index("last gradient") == 2, "the last layer has no gradient here, and all others wait for its turn"
    without = [[event for event in events if event != "last gradient"] for events in (first, second)]
    assert without[0] == without[1], "one order on all ranks"
    assert len(without[0]) == 9


def test_gradients_that_change_while_they_travel_are_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        second, clip = rank["mistakes"]
        assert "a second backward inside reducing()" in second
        assert "gradients were changed between reducing() and step()" in clip


def test_updates_travel_while_the_next_batch_is_worked_on(ranks: list[dict[str, Any]], folder: Path) -> None:
    first, second = ranks
    for case in CASES:
        assert (folder / case).exists(), "the step went through the code that was watched"
        assert torch.equal(first[case][0], second[case][0])
        means = [(a + b) / 2 for a, b in zip(_make_gradients(case, 0), _make_gradients(case, 1))]
        norm = torch.cat([mean.flatten() for mean in means]).norm().item()
        assert [first[case][1], second[case][1]] == pytest.approx([norm, norm]), "one norm, of the mean over the ranks"
