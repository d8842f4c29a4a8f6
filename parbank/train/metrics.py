"""What a run says while it runs: metrics.jsonl, TensorBoard events, and a progress bar or plain lines."""

import json
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class MetricsWriter:
    """Appends rows to metrics.jsonl and scalars to TensorBoard. A resumed run drops the rows its checkpoint never saw."""

    def __init__(self, out: Path, *, resume_step: int = 0) -> None:
        path = out / "metrics.jsonl"
        kept = _rows_up_to(path, resume_step) if resume_step else []
        self._file = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 (open for the whole run)
        self._file.writelines(json.dumps(row) + "\n" for row in kept)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside tensorboard's own imports
            from torch.utils.tensorboard import SummaryWriter
        self._board = SummaryWriter(str(out / "tensorboard"), purge_step=resume_step or None)

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        for name, value in row.items():
            if name != "step":
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
            except json.JSONDecodeError:  # the last line of a killed run
                continue
            if row["step"] <= step:
                rows.append(row)
    return rows


def memory_bytes(device: torch.device) -> int:
    """Peak memory so far: the device's on CUDA, the process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux, bytes on macOS


class Display:
    """A rich progress bar on a terminal, plain lines when piped, silence on every rank but the first."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.console = Console(file=sys.stdout, quiet=not enabled, highlight=False)
        self._bar: Progress | None = None

    def say(self, text: str) -> None:
        if self.enabled and self.console.is_terminal:
            self.console.print(text, markup=False)
        elif self.enabled:
            print(text, flush=True)

    def start(self, title: str) -> None:
        if self.enabled and self.console.is_terminal:
            columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}")]
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(title, total=1.0, status="")

    def update(self, share: float, status: str) -> None:
        """Moves the bar; does nothing when piped."""
        if self._bar is not None:
            self._bar.update(self._task, completed=min(share, 1.0), status=status)

    def line(self, text: str) -> None:
        """A progress line when piped; does nothing on a terminal, where the bar shows it."""
        if self.enabled and self._bar is None:
            print(text, flush=True)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def format_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
