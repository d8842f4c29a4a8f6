"""Progress of long work over bytes: a bar on a terminal, occasional lines elsewhere."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

Say = Callable[[str], None]

_SECONDS_BETWEEN_LINES = 5.0
# Of a stream that cannot be written: the disk is full or the terminal is gone (OSError), or it is closed (ValueError).
_LOST = (OSError, ValueError)


def say_on_stderr(line: str) -> None:
    """Says a line. If it cannot be written, the work goes on without it."""
    if sys.stderr is not None:  # print would take standard output instead
        with suppress(*_LOST):
            print(line, file=sys.stderr, flush=True)


def say_nothing(line: str) -> None:
    """Silence: a Meter that says nothing shows no bar either."""


class Meter:
    """Counts bytes of one phase. `total` may be unknown (None)."""

    def __init__(self, label: str, say: Say, *, total: int | None = None) -> None:
        self._label, self._say, self._total = label, say, total
        self._done = 0
        self._bar: Any = None

    def __enter__(self) -> "Meter":
        self._began = self._spoke = time.monotonic()
        if self._say is not say_nothing and sys.stderr is not None:
            with suppress(*_LOST):
                self._show_bar()
        return self

    def _show_bar(self) -> None:
        if sys.stderr.isatty():
            bar = _bar()
            self._task = bar.add_task(self._label, total=self._total)
            bar.start()
            self._bar = bar

    def advance(self, count: int) -> None:
        self._done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif time.monotonic() - self._spoke >= _SECONDS_BETWEEN_LINES:
            self._spoke = time.monotonic()
            of_all = f" of {self._total / 1e6:.1f}" if self._total else ""
            self._say(f"{self._label}: {self._done / 1e6:.1f}{of_all} MB{self._time_left()}")

    def _time_left(self) -> str:
        """At the mean rate so far."""
        if not self._total or not 0 < self._done < self._total:
            return ""
        seconds = round((self._spoke - self._began) * (self._total - self._done) / self._done)
        return f", {seconds // 60}:{seconds % 60:02d} left"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with suppress(*_LOST):
                self._bar.stop()
        if kind is None:
            self._say(f"{self._label}: {self._done / 1e6:.1f} MB in {time.monotonic() - self._began:.1f} s")


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
