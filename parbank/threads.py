"""How many threads compute on a CPU, and how they wait for each other.

The threads of one operation wait for each other many times in a step. On a busy machine one of them is often not
running, and the others wait. OpenMP waits by spinning for some milliseconds, which takes the time slice that the missing
thread needs. Two remedies:

    ShortWaits          a thread that waits sleeps almost at once, and its core is free
    fewer threads       no more than there are free cores

The first changes no result. The second changes how sums are split, and so the last bits of a result: only a run whose
budget is a clock does it while it runs (parbank.training.threads).
"""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from threading import Event, Thread
from typing import TypeVar

import torch

from parbank.cores import count_cores, cpus, had_to_wait
from parbank.errors import ConfigError

T = TypeVar("T")

MOST_THREADS = 1024
"""More than most machines have cores. Some ten thousand would make OpenMP abort the process."""

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Variables by which a user says how OpenMP's threads wait."""


def check_threads(threads: int | None) -> None:
    """Refuses a number of threads that makes no sense."""
    if threads is not None and not (isinstance(threads, int) and 1 <= threads <= MOST_THREADS):
        raise ConfigError(
            f"--threads is a number from 1 to {MOST_THREADS}, got {threads!r}; this process may use {count_cores()} cores. "
            "Leave it out to use the free cores"
        )


@contextlib.contextmanager
def use_threads(threads: int | None = None) -> Iterator[int]:
    """Computes with `threads` threads inside; None: with as many as torch would use and the process has cores for.

    So OMP_NUM_THREADS and torch.set_num_threads are upper limits. Ranks of one machine divide its cores.
    """
    check_threads(threads)
    before = torch.get_num_threads()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    chosen = threads or min(before, max(1, count_cores() // ranks))
    torch.set_num_threads(chosen)
    try:
        yield chosen
    finally:
        torch.set_num_threads(before)


def run_in_background(work: Callable[[], T], name: str) -> Future[T]:
    """The result of work in a daemon thread. The process may end before it, where a ThreadPoolExecutor would hold it up."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # any error must reach the caller
            result.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return result


class ShortWaits:
    """Lets OpenMP's threads sleep instead of spinning, from `begin` to `end`.

    OpenMP reads only once, when torch is imported, how its threads shall wait: too early to know the load. But its
    libraries spin a thousand times less while they manage more threads than there are CPUs. So a helper thread opens a
    parallel region of its own, just large enough, and stays alive: the threads of that region sleep and cost nothing.
    When the helper ends, they end, and OpenMP spins as before. Measured with libgomp, which PyTorch's wheels for Linux
    contain. Nothing happens without such an OpenMP, or if the user has said how to wait.
    """

    def __init__(self) -> None:
        self._end = Event()
        self._helper: Thread | None = None

    def begin(self, threads: int) -> None:
        """`threads`: the number of threads that compute, which OpenMP manages already. A second call does nothing."""
        if self._helper is not None or any(name in os.environ for name in _WAITING):
            return
        self._end.clear()
        begun = Event()
        size = max(2, len(cpus()) - threads + 2)  # the helper, and enough others for one more than there are CPUs
        self._helper = Thread(target=self._stay, args=(size, begun), name="parbank-short-waits", daemon=True)
        self._helper.start()
        begun.wait()

    def end(self) -> None:
        self._end.set()
        if self._helper is not None:
            self._helper.join()
        self._helper = None

    def _stay(self, size: int, begun: Event) -> None:
        with contextlib.suppress(AttributeError):  # no OpenMP, or one without this interface
            library = ctypes.CDLL(None)  # torch loads its OpenMP for all to see
            nothing = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)  # a function without effect
            library.GOMP_parallel(nothing, None, ctypes.c_uint(size), ctypes.c_uint(0))
        begun.set()
        self._end.wait()


@contextlib.contextmanager
def compute_with(threads: int | None) -> Iterator[None]:
    """`use_threads` for a whole command, with short waits if the machine has been busy so far."""
    waits = ShortWaits()
    with use_threads(threads) as chosen:
        if chosen > 1 and had_to_wait():
            waits.begin(chosen)
        try:
            yield
        finally:
            waits.end()
