"""While the updates of one batch travel, the next batch is worked on: a rank that is late holds nobody up. Two ranks are
enough to see that, and that they clip by one norm."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbank.optim import ParallelMuon
from parbank.optim.algorithms import muon
from tests.distributed import run_distributed_test

PATIENCE_SECONDS = 20.0  # beside other work on the machine; the other rank needs milliseconds
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


def _step_every_case(folder: Path) -> dict[str, tuple[Tensor, float]]:
    return {case: _step(case, folder) for case in CASES}


def test_updates_travel_while_the_next_batch_is_worked_on(tmp_path: Path) -> None:
    first, second = run_distributed_test(_step_every_case, 2, args=(tmp_path,))
    for case in CASES:
        assert (tmp_path / case).exists(), "the step went through the code that was watched"
        assert torch.equal(first[case][0], second[case][0])
        means = [(a + b) / 2 for a, b in zip(_make_gradients(case, 0), _make_gradients(case, 1))]
        norm = torch.cat([mean.flatten() for mean in means]).norm().item()
        assert [first[case][1], second[case][1]] == pytest.approx([norm, norm]), "one norm, of the mean over the ranks"
