"""Ranks find those of their own start, also in a store that an earlier start has left its keys in."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from parbank.errors import RankError
from parbank.rendezvous import join, meet

SOON = timedelta(seconds=60)


def start(store: dist.Store, world: int) -> list[dist.Store]:
    """The ranks of one start, as threads; the first comes first, when it can see only what earlier starts have left."""
    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(lambda rank: meet(store, rank, world, SOON), range(world)))


def test_each_start_has_a_part_of_the_store_for_itself() -> None:
    shared = dist.HashStore()
    shared.set_timeout(SOON)
    for attempt in range(3):
        first, second, third = start(shared, 3)
        assert not first.check(["address"]), "that of a rank of an earlier start"
        second.set("address", str(attempt))
        assert first.get("address") == third.get("address") == str(attempt).encode()


def test_a_rank_that_does_not_come_is_named() -> None:
    shared = dist.HashStore()
    start(shared, 3)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(meet, shared, 2, 3, SOON)
        with pytest.raises(RankError, match=r"rank 1 has not connected within 0:00:01; see why it did not start"):
            meet(shared, 0, 3, timedelta(seconds=1))


def test_no_store_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match=r"have not found each other within 0:00:01 .*see why a rank did not start"):
        join(timedelta(seconds=1))
