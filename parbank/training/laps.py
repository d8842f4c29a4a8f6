"""The seconds of each part of a sequence of work."""

import time


class Laps:
    """Seconds by the name of a part, measured from now on or from some seconds ago. A part may come more than once."""

    def __init__(self, ago: float = 0.0) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter() - ago

    def end(self, part: str) -> None:
        """Counts the time since the end of the last part as `part`."""
        now = time.perf_counter()
        self._add(part, now - self._last)
        self._last = now

    def move(self, seconds: float, part: str, to: str) -> None:
        """Counts seconds of a part as those of another."""
        self._add(part, -seconds)
        self._add(to, seconds)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def _add(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
