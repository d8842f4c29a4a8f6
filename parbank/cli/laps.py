"""The seconds of each part of a command."""

import os
import time


class Laps:
    """Seconds by the name of a part. The first part begins with the process, if the system tells its start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic() - _process_age()

    def mark(self, name: str) -> None:
        """Everything since the last mark was `name`."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def _process_age() -> float:
    """Seconds since this process began; 0 where Linux's /proc is missing."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # after the program's name, which may hold anything
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
