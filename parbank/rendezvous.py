"""How the ranks of one start find each other.

torchrun keeps one store for all restarts of a run. It still has the keys of ranks that have ended, and a new rank would use
their addresses. So the ranks of each start use keys under a name of its own. Each rank writes a random word. The first
rank answers each word with the name, and waits until every rank has confirmed it. A rank that has ended cannot confirm.
"""

import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from parbank.errors import RankError

PATIENCE = timedelta(minutes=5)
"""Time for all ranks to start Python and to import torch, also from a slow network drive."""
_POLL_SECONDS = 0.05


def join(patience: timedelta = PATIENCE) -> tuple[dist.Store, int, int]:
    """The store of this start, the rank and the number of ranks, from the variables that torchrun sets."""
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=patience))
        return meet(store, rank, world, patience), rank, world
    except dist.DistError as error:
        raise RankError(
            f"the ranks have not found each other within {patience} ({str(error).partition(chr(10))[0]}); see why a rank did "
            "not start"
        ) from error


def meet(store: dist.Store, rank: int, world: int, patience: timedelta) -> dist.Store:
    """The part of a store that the ranks of this start use, and no ranks of earlier starts."""
    word = secrets.token_hex(8)
    if rank != 0:
        store.set(f"word/{rank}", word)
        name = store.get(f"answer/{word}").decode()
        store.set(f"{name}/here/{rank}", "")
        return dist.PrefixStore(name, store)
    deadline = time.monotonic() + patience.total_seconds()
    while missing := [other for other in range(1, world) if not store.check([f"{word}/here/{other}"])]:
        for other in missing:
            if store.check([f"word/{other}"]):
                store.set(f"answer/{store.get(f'word/{other}').decode()}", word)
        if time.monotonic() > deadline:
            raise RankError(f"rank {missing[0]} has not connected within {patience}; see why it did not start")
        time.sleep(_POLL_SECONDS)
    return dist.PrefixStore(word, store)
