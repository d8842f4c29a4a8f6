"""The threads of one run on a CPU: chosen when it starts and, if its budget is a clock, again while it runs.

A budget in minutes must make the best of the machine as it is, and no two such runs are equal to the last bit anyway. A
budget in steps or tokens promises the same bits each time. There the number does not depend on the load, and a
checkpoint keeps it.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from parbank.cores import LoadMeter, count_cores
from parbank.runtime import Runtime
from parbank.threads import MOST_THREADS, ShortWaits
from parbank.training.config import RunConfig

LOOK_SECONDS = 2.0
"""Between two looks at the load: some hundred time slices, enough for a mean. A look takes well under a millisecond."""

CALM_LOOKS = 2
"""Looks in a row that must find room for more threads. Fewer threads are taken at once: one too many costs more."""

NOT_BUSY = 0.5
"""Cores. Others that want less, such as a desktop, cost less than a thread would bring."""

LEAST_THREADS = 2
"""With short waits, two threads trained faster than one beside any number of busy processes (docs/log/cpu.md)."""


class Threads:
    """Chooses the number of threads by the load, and records both."""

    def __init__(
        self,
        most: int,
        *,
        adapts: bool = False,
        restores: bool = False,
        measures: bool = True,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    ) -> None:
        """`adapts`: take fewer than `most` while others are busy. `restores`: take the number of a checkpoint."""
        self.most = self.first = self.now = most
        self._adapts, self._restores, self._say = adapts, restores, say
        self._cores = count_cores()
        self._meter = LoadMeter(self._cores) if measures else None
        self._waits = ShortWaits()
        self._looks: list[tuple[int, float]] = []  # threads, and the cores that others wanted beside them
        self._calm = 0
        self._busy = 0
        self._warned = False

    def look(self, least_seconds: float = LOOK_SECONDS) -> None:
        """Measures the load since the last look, and takes the threads and the waiting that fit it. Does nothing
        before `least_seconds` have passed."""
        others = self._meter.measure(self.now, least_seconds) if self._meter else None
        if others is None:
            return
        self._looks.append((self.now, others))
        if self._adapts:
            self._fit(choose_threads(cores=self._cores, most=self.most, others=others))
        if self.now > 1 and is_busy(cores=self._cores, threads=self.now, others=others):
            self._waits.begin(self.now)
        else:
            self._waits.end()
        self._warn(others)

    def close(self) -> None:
        """Threads wait as before; their number is the caller's again (parbank.threads.use_threads)."""
        self._waits.end()

    def restore(self, threads: Any) -> None:
        """Continues with the number in a checkpoint. A checkpoint of an older version has None."""
        if not self._restores or threads is None:
            return
        if type(threads) is not int or not 1 <= threads <= MOST_THREADS:
            raise ValueError(f"{threads!r} threads")
        if threads == self.now:
            return
        self._set(threads)
        self.first = threads
        if threads > self._cores:
            self._say(
                f"note: this run began with {threads} threads and keeps them, so that its result stays the same to the last "
                f"bit. Here are {self._cores} cores: --threads {self._cores} is faster"
            )

    def describe(self) -> dict[str, Any]:
        """For summary.json. `load` is in cores that other processes wanted; None where it was not measured."""
        self.look(0.0)
        threads, others = zip(*self._looks) if self._looks else ((self.now,), ())
        load = {"mean": sum(others) / len(others), "peak": max(others)} if others else None
        mean = sum(threads) / len(threads)
        return {
            "threads": {"cores": self._cores, "first": self.first, "last": self.now, "mean": mean},
            "load": load,
        }

    def _fit(self, threads: int) -> None:
        self._calm = self._calm + 1 if threads > self.now else 0
        if threads < self.now or self._calm == CALM_LOOKS:
            self._calm = 0
            self._set(threads)

    def _set(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.now = threads

    def _warn(self, others: float) -> None:
        """Says once that the machine is busy: when two looks in a row found too little room for our threads."""
        wanted = self.most if self._adapts else self.now
        self._busy = self._busy + 1 if is_busy(cores=self._cores, threads=wanted, others=others) else 0
        if self._busy < 2 or self._warned:
            return
        self._warned = True
        found = f"warning: other processes want {others:.1f} of the {self._cores} cores of this machine"
        if self._adapts:
            fewer = f" {self.now} of {self.most} threads, and" if self.now < self.most else ""
            self._say(f"{found}. Until they end, training uses{fewer} short waits between its threads")
        else:
            self._say(
                f"{found}, so steps take longer. This run keeps its number of threads ({self.now}), which the last bits of its "
                "result depend on; --threads sets another one"
            )


def plan_threads(config: RunConfig, runtime: Runtime, most: int, *, given: bool, say: Callable[[str], None]) -> Threads:
    """The threads of a run. Only a clock on one CPU makes way for other processes: a number that was given stays, and
    ranks wait for each other, so that fewer threads on one of them would not help."""
    clock = config.budget.minutes is not None
    return Threads(
        most,
        adapts=clock and not given and not runtime.is_cuda and runtime.world == 1,
        restores=not clock and not given,
        measures=not runtime.is_cuda,
        say=say,
    )


def is_busy(*, cores: int, threads: int, others: float) -> bool:
    """Whether `threads` threads have to share cores with other processes that want `others` cores."""
    return others >= NOT_BUSY + max(0, cores - threads)


def choose_threads(*, cores: int, most: int, others: float) -> int:
    """The threads that fit on `cores` cores beside other processes that want `others` cores: at most `most`.

    On a busy machine `most` threads would get `most / (most + others)` of it. That share, rounded down, is the number, but
    at least LEAST_THREADS: a thread that shares its core holds up all of them.
    """
    if not is_busy(cores=cores, threads=most, others=others):
        return most
    return max(min(most, LEAST_THREADS), int(most * cores / (most + others)))
