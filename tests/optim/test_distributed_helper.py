"""The helper that runs ranks: it must report a child's own words, and it must end."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import DistributedTestError, run_distributed_test


def _sum_of_ranks(offset: int) -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def _one_raises_one_dies() -> str:
    dist.barrier()  # all are connected: a rank that dies before that takes the others' connecting with it
    store = dist.distributed_c10d._get_default_store()
    store.set(f"out of the barrier/{dist.get_rank()}", "")
    store.wait([f"out of the barrier/{rank}" for rank in range(3)])  # nor would these get out of it
    if dist.get_rank() == 0:
        raise ValueError("words of the child")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "fine"


def _sleep() -> None:
    time.sleep(600)


def test_returns_results_in_order_of_rank() -> None:
    assert run_distributed_test(_sum_of_ranks, 2, args=(10,)) == [(0, 21.0), (1, 21.0)]


def test_reports_the_traceback_and_the_death() -> None:
    with pytest.raises(DistributedTestError, match="words of the child") as caught:
        run_distributed_test(_one_raises_one_dies, 3)
    assert caught.value.exit_codes[1] == -signal.SIGKILL
    assert caught.value.results == {2: "fine"}


def test_ends_at_its_limit() -> None:
    started = time.monotonic()
    with pytest.raises(DistributedTestError, match="no result"):
        run_distributed_test(_sleep, 1, timeout=4.0)
    assert time.monotonic() - started < 300
