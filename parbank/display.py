"""Progress on the screen: a bar on a terminal, plain lines when piped."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

END = "\u220e\n"  # stands for the end of a document
_SECONDS_BETWEEN_LINES = 10.0  # of work that has no natural lines, when piped


class _Output:
    """A text stream that stays quiet once it cannot be written: a closed pipe or a full disk must not stop the run."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self._lost = file is None  # so is sys.stdout in a process that was started without one

    def write(self, text: str) -> int:
        return self._try("write", text)

    def flush(self) -> None:
        self._try("flush")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _try(self, name: str, *arguments: Any) -> Any:
        if self._file is None or self._lost:
            return None
        work = getattr(self._file, name)
        try:
            return work(*arguments)
        except UnicodeEncodeError:  # such as a path that is no UTF-8
            return work(*(text.encode("ascii", "replace").decode() for text in arguments))
        except (OSError, ValueError) as error:  # ValueError: the file was closed
            self._lost = True
            with suppress(OSError, ValueError):  # drop buffered output, so that there is no error at exit
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._file.fileno())
                os.close(nowhere)
            with suppress(OSError, ValueError):
                print(f"the output cannot be written any more ({error}); the run continues", file=sys.stderr)


class Display:
    """A rich progress bar on a terminal, plain lines when piped, silence on every rank but the first."""

    def __init__(self, *, enabled: bool = True, file: TextIO | None = None) -> None:
        self.enabled = enabled
        self.file = cast(TextIO, _Output(file or sys.stdout))
        self.console = Console(file=self.file, quiet=not enabled, highlight=False)
        self._bar: Progress | None = None

    def say(self, text: str) -> None:
        if self.enabled and self.console.is_terminal:
            self.console.print(text, markup=False, soft_wrap=True)
        elif self.enabled:
            self._print(text)

    def _print(self, text: str) -> None:
        print(text, flush=True, file=self.file)

    def start(self, title: str) -> None:
        if self.enabled and self.console.is_terminal:
            columns = [
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[status]}", markup=False),
            ]
            # Four times a second is smooth enough, and leaves the interpreter to the training loop.
            self._bar = Progress(*columns, console=self.console, transient=True, expand=True, refresh_per_second=4)
            self._bar.start()
            self._task = self._bar.add_task(title, total=1.0, status="")

    def update(self, share: float, status: str, *, line: bool = False) -> None:
        """Moves the bar. When piped, `line` prints the status as a line of its own."""
        if self._bar is not None:
            self._bar.update(self._task, completed=min(share, 1.0), status=status)
        elif self.enabled and line:
            self._print(status)

    @contextmanager
    def progress(self, title: str) -> Iterator[Callable[[float], None]]:
        """A bar, or occasional lines, for work that reports only the share that is done. Both show the time left."""
        began = spoke = time.monotonic()

        def move(share: float) -> None:
            nonlocal spoke
            now = time.monotonic()
            due = now - spoke >= _SECONDS_BETWEEN_LINES
            left = f"{format_seconds((now - began) * (1 - share) / share)} left" if share > 0 else ""
            self.update(share, left if self._bar else f"{title}: {share:.0%}, {left}", line=due)
            spoke = now if due else spoke

        if not self.console.is_terminal:
            self.say(title)
        self.start(title)
        try:
            yield move
        finally:
            self.stop()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def format_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def plural(number: float, noun: str) -> str:
    """1 step, 1,200 steps, 2.5 cores."""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:.1f}"
    return f"{shown} {noun}{'' if shown == '1' else 's'}"
