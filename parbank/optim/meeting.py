"""Checks, before a collective call, that every rank makes it: otherwise it would hang until a timeout of many minutes.

Ranks count their calls in the store that the process group was made with. This costs some messages to the store, and is for
rare calls: saving, not stepping.
"""

import logging
import time
from typing import ClassVar

import torch.distributed as dist

from parbank.errors import RankError
from parbank.optim.communication import Ranks

WARN_SECONDS = 5.0
ALONE_SECONDS = 60.0
"""If rank 0 is alone after this time, the call stands under `if rank == 0`. Other ranks may wait longer for rank 0: it may
evaluate or write files first."""
PAUSE_SECONDS = 0.02

_log = logging.getLogger("parbank")


class Meeting:
    """The ranks at one kind of call."""

    _calls: ClassVar[dict[str, int]] = {}
    """The number of times this process has made each call."""

    def __init__(self, ranks: Ranks, call: str, remedy: str) -> None:
        self._ranks, self._call, self._remedy = ranks, call, remedy
        members = dist.get_process_group_ranks(ranks.group) if ranks.group is not None else []
        self._key = f"parbank/{call}/{'-'.join(map(str, members))}"
        self._store = dist.distributed_c10d._get_default_store()

    def wait(self) -> None:
        """Returns when every rank has made the call."""
        number = self._calls[self._key] = self._calls.get(self._key, 0) + 1
        self._store.add(f"{self._key}/{self._ranks.rank}", 1)
        started, warned = time.monotonic(), False
        while missing := self._find_missing(number):
            waited = time.monotonic() - started
            here = self._ranks.world - len(missing)
            text = f"{self._call} needs every rank, and rank {', '.join(map(str, missing))} did not call it for "
            if self._ranks.rank == 0 and here == 1 and waited > ALONE_SECONDS:
                self._calls[self._key] -= 1  # so that a later call of all ranks can succeed
                self._store.add(f"{self._key}/{self._ranks.rank}", -1)
                raise RankError(f"{text}{waited:.0f} s; {self._remedy}")
            if waited > WARN_SECONDS and not warned:
                _log.warning("%s%.0f s; %s", text, waited, self._remedy)
                warned = True
            time.sleep(PAUSE_SECONDS)

    def _find_missing(self, number: int) -> list[int]:
        """The ranks that have made fewer calls."""
        counts = [self._store.add(f"{self._key}/{rank}", 0) for rank in range(self._ranks.world)]
        return [rank for rank, count in enumerate(counts) if count < number]
