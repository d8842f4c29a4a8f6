"""What a run says while it runs: metrics.jsonl, TensorBoard events, and a progress bar or plain lines."""

import json
import math
import os
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

_SECONDS_BETWEEN_LINES = 10.0  # of work that has no natural lines, when piped


class MetricsWriter:
    """Appends rows to metrics.jsonl and scalars to TensorBoard. A resumed run drops the rows its checkpoint never saw."""

    def __init__(self, out: Path, *, resume_step: int = 0) -> None:
        path = out / "metrics.jsonl"
        kept = _rows_up_to(path, resume_step) if resume_step else []
        fresh = path.with_suffix(".tmp")  # renamed when complete: a kill here loses no row
        fresh.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        fresh.replace(path)
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (open for the whole run)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside tensorboard's own imports
            from torch.utils.tensorboard import SummaryWriter
        # Events of an earlier attempt from this step on are void. A new start has none at all: event files of one second
        # are read in no certain order.
        if not resume_step:
            shutil.rmtree(out / "tensorboard", ignore_errors=True)
        self._board = SummaryWriter(str(out / "tensorboard"), purge_step=resume_step + 1)

    def write(self, row: dict[str, Any]) -> None:
        """A number that is not finite (the loss of a skipped step) becomes null: NaN is no JSON."""
        row = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self._file.write(json.dumps(row) + "\n")
        for name, value in row.items():
            if name != "step" and value is not None:
                self._board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._file.close()
        self._board.close()


def _rows_up_to(path: Path, step: int) -> list[dict[str, Any]]:
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
                if row["step"] <= step:
                    rows.append(row)
            except (ValueError, KeyError, TypeError):  # the last line of a killed run
                continue
    return rows


def memory_bytes(device: torch.device) -> int:
    """Peak memory so far: the device's on CUDA, the process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux, bytes on macOS


class Display:
    """A rich progress bar on a terminal, plain lines when piped, silence on every rank but the first."""

    def __init__(self, *, enabled: bool = True, file: TextIO | None = None) -> None:
        self.enabled = enabled
        self.file = file or sys.stdout
        self.console = Console(file=self.file, quiet=not enabled, highlight=False)
        self._bar: Progress | None = None

    def say(self, text: str) -> None:
        if self.enabled and self.console.is_terminal:
            self.console.print(text, markup=False, soft_wrap=True)
        elif self.enabled:
            self._print(text)

    def _print(self, text: str) -> None:
        try:
            print(text, flush=True, file=self.file)
        except BrokenPipeError:  # `| head`: who stops reading does not ask the run to stop
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
            print("nobody reads the output any more; the run goes on", file=sys.stderr)

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
        """A bar, or now and then a line, for work that only says which share of it is done."""
        spoke = time.monotonic()

        def move(share: float) -> None:
            nonlocal spoke
            due = time.monotonic() - spoke >= _SECONDS_BETWEEN_LINES
            self.update(share, "" if self._bar else f"{title}: {share:.0%}", line=due)
            spoke = time.monotonic() if due else spoke

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
