"""The cores that a process may use, and the cores that other processes want.

Nothing here imports torch: a process that only prepares text starts in a fraction of the time.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

CONTENDED = 0.9
"""A thread that got less than this share of the time it wanted has to share its core."""


def count_cores() -> int:
    """The cores that this process may use: its CPU affinity, and the quota of its cgroups rounded to whole cores."""
    quota = read_quota()
    return len(cpus()) if quota is None else min(len(cpus()), max(1, int(quota + 0.5)))


def read_quota(root: Path = Path("/")) -> float | None:
    """The cores that cgroups (v1 or v2) allow this process; None without a limit. The tightest of all levels counts."""
    limits = map(_read_limit, group_folders("cpu", root))
    return min((cores for cores in limits if cores is not None), default=None)


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """The folders, whether they exist or not, of the cgroups (v1 or v2) that limit this process: all levels."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for mount in (controllers, controller) if controllers else ("", "unified"):
            # A container sees its own group as the root of the mount, whatever path the kernel names.
            yield from (root / "sys/fs/cgroup" / mount / level for level in (inside, *inside.parents))


def _read_limit(group: Path) -> float | None:
    """cpu.max of v2 holds quota and period, in microseconds; v1 has a file for each. "max" or -1 is no limit."""
    words = _read(group / "cpu.max").split()
    words = words or [*_read(group / "cpu.cfs_quota_us").split(), *_read(group / "cpu.cfs_period_us").split()]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def estimate_others(*, cores: int, threads: int, ran: float, waited: float, used: float) -> float:
    """The cores that other processes want.

    `used` is the number of cores that they got. They want more if this process has to wait: a thread that is ready for
    `ran + waited` seconds and runs for `ran` of them shares its core evenly, so that `cores * (ran + waited) / ran` threads
    are ready.
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
    """CPU time of all work on the CPUs that this process may use, and time that a hypervisor gave to other machines."""


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
            used=used - (len(cpus()) - self._cores),  # a quota leaves the other CPUs to them anyway
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
    """From lines of /proc/stat: cpuN user nice system idle iowait irq softirq steal ..., in ticks. Processes with a
    nice value above zero count only if this process has one, too: otherwise they make way for it."""
    own = {f"cpu{number}" for number in cpus()}
    rows = [list(map(int, line.split()[1:9])) for line in table.splitlines() if line.partition(" ")[0] in own]
    if not rows or any(len(row) < 8 for row in rows):
        return None
    nice = os.getpriority(os.PRIO_PROCESS, 0) > 0
    ticks = sum(row[0] + nice * row[1] + row[2] + sum(row[5:]) for row in rows)
    return ticks / os.sysconf("SC_CLK_TCK")


def cpus() -> set[int]:
    """The CPUs that this process may run on, by number."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
