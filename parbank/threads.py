"""How many threads compute on a CPU, and how they wait for each other.

The threads of one operation wait for each other many times in a step. On a busy machine one of them is often not
running, and the others wait. OpenMP waits by spinning for some milliseconds, which takes the time slice that the missing
thread needs. Two remedies:

    ShortWaits          a thread that waits sleeps almost at once, and its core is free
    choose_threads      no more threads than there are free cores

The first changes no result. The second changes how sums are split, and so the last bits of a result: only a run whose
budget is a clock does it while it runs (parbank.training.threads).
"""

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Event, Thread

import torch

from parbank.errors import ConfigError

MOST_THREADS = 1024
"""More than most machines have cores. Some ten thousand would make OpenMP abort the process."""

NOT_BUSY = 0.5
"""Cores. Others that want less, such as a desktop, cost less than a thread would bring."""

CONTENDED = 0.9
"""A thread that got less than this share of the time it wanted has to share its core."""

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Variables by which a user says how OpenMP's threads wait."""


def check_threads(threads: int | None) -> None:
    """Refuses a number of threads that makes no sense."""
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ConfigError(
            f"--threads is a number from 1 to {MOST_THREADS}, got {threads}; this process may use {count_cores()} cores. "
            "Leave it out to use what is free"
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
        """`threads`: those that compute, and are managed already. A second call does nothing."""
        if self._helper is not None or any(name in os.environ for name in _WAITING):
            return
        self._end.clear()
        begun = Event()
        size = max(2, len(_cpus()) - threads + 2)  # the helper, and enough others for one more than there are CPUs
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


def is_busy(*, cores: int, threads: int, others: float) -> bool:
    """Whether `threads` threads have to share cores with other processes that want `others` cores."""
    return others >= NOT_BUSY + max(0, cores - threads)


@contextlib.contextmanager
def compute_with(threads: int | None) -> Iterator[None]:
    """For a command of its own process: `use_threads`, with short waits if it found a busy machine so far."""
    waits = ShortWaits()
    with use_threads(threads) as chosen:
        if chosen > 1 and had_to_wait():
            waits.begin(chosen)
        try:
            yield
        finally:
            waits.end()


def choose_threads(*, cores: int, most: int, others: float) -> int:
    """The threads that fit on `cores` cores beside other processes that want `others` cores: at most `most`.

    On a busy machine `most` threads would get `most / (most + others)` of it. That share, rounded down, is the number:
    a thread that shares its core holds up all of them.
    """
    if not is_busy(cores=cores, threads=most, others=others):
        return most
    return max(1, int(most * cores / (most + others)))


def count_cores() -> int:
    """The cores that this process may use: its CPU affinity, and the quota of its cgroups rounded to whole cores."""
    quota = read_quota()
    return len(_cpus()) if quota is None else min(len(_cpus()), max(1, int(quota + 0.5)))


def read_quota(root: Path = Path("/")) -> float | None:
    """The cores that cgroups (v1 or v2) allow this process; None without a limit. The tightest of all levels counts."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for mount in (controllers, "cpu") if controllers else ("", "unified"):
            # A container sees its own group as the root of the mount, whatever path the kernel names.
            folders = [root / "sys/fs/cgroup" / mount / level for level in (inside, *inside.parents)]
            found += [cores for folder in folders if (cores := _read_limit(folder)) is not None]
    return min(found, default=None)


def _read_limit(group: Path) -> float | None:
    """cpu.max of v2 holds quota and period, in microseconds; v1 has a file for each. "max" or -1 is no limit."""
    words = _read(group / "cpu.max").split()
    words = words or [*_read(group / "cpu.cfs_quota_us").split(), *_read(group / "cpu.cfs_period_us").split()]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def estimate_others(*, cores: int, threads: int, ran: float, waited: float, used: float) -> float:
    """The cores that other processes want.

    `used` is what they got. They want more if this process has to wait: a thread that is ready for `ran + waited`
    seconds and runs for `ran` of them shares its core evenly, so that `cores * (ran + waited) / ran` threads are ready.
    """
    if ran > 0 and ran < CONTENDED * (ran + waited):
        return max(used, cores * (ran + waited) / ran - threads)
    return max(used, 0.0)


def had_to_wait() -> bool:
    """Whether this thread had to share its core since it began: for a process that has just started."""
    ran, waited = _thread_times() or (1.0, 0.0)
    return ran < CONTENDED * (ran + waited)


@dataclass(frozen=True)
class _Moment:
    """Counters in seconds. All but `wall` grow only with work."""

    wall: float
    ran: float
    """CPU time of this thread."""
    waited: float
    """Time in which this thread was ready and another one had its core."""
    own: float
    """CPU time of all threads of this process."""
    busy: float
    """CPU time of everything on the CPUs that this process may use, also what a hypervisor gave to other machines."""


class LoadMeter:
    """Measures the cores that other processes want, from one call to the next, on Linux.

    The load average of the system follows a change within minutes only, and counts this process.
    """

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._last = _look()

    def measure(self, threads: int, least_seconds: float = 0.0) -> float | None:
        """The mean since the last measurement, during which this process used `threads` threads. None before
        `least_seconds` have passed, or where the system does not say. Call it from the thread that computes."""
        if self._last is None or time.perf_counter() - self._last.wall < least_seconds or (now := _look()) is None:
            return None
        last, self._last = self._last, now
        seconds = max(now.wall - last.wall, 1e-9)
        used = (now.busy - last.busy - (now.own - last.own)) / seconds
        return estimate_others(
            cores=self._cores,
            threads=threads,
            ran=now.ran - last.ran,
            waited=now.waited - last.waited,
            used=used - (len(_cpus()) - self._cores),  # a quota leaves the other CPUs to them anyway
        )


def _look() -> _Moment | None:
    times, busy = _thread_times(), _busy_seconds(_read(Path("/proc/stat")))
    if times is None or busy is None:
        return None
    return _Moment(time.perf_counter(), *times, time.process_time(), busy)


def _thread_times() -> tuple[float, float] | None:
    """Seconds in which this thread ran, and in which it was ready and another thread had its core."""
    words = _read(Path("/proc/thread-self/schedstat")).split()
    return (int(words[0]) / 1e9, int(words[1]) / 1e9) if len(words) == 3 else None


def _busy_seconds(table: str) -> float | None:
    """From lines of /proc/stat: cpuN user nice system idle iowait irq softirq steal ..., in ticks. Processes of a higher
    nice value than ours do not count: they make way."""
    cpus = {f"cpu{number}" for number in _cpus()}
    rows = [list(map(int, line.split()[1:9])) for line in table.splitlines() if line.partition(" ")[0] in cpus]
    if not rows or any(len(row) < 8 for row in rows):
        return None
    nice = os.getpriority(os.PRIO_PROCESS, 0) > 0
    ticks = sum(row[0] + nice * row[1] + row[2] + sum(row[5:]) for row in rows)
    return ticks / os.sysconf("SC_CLK_TCK")


def _cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
