"""Compiles the kernels of the probe in processes of their own, one for each shape, while the text is read.

Triton's front end holds Python's lock: threads of one process compile some six kernels a second, however many cores there
are, and the shapes have about a hundred. The processes fill the cache of compiled code, where the probe finds the kernels.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO

from parbank.cores import count_cores
from parbank.data.progress import Say, say_nothing
from parbank.data.workers import child_environment
from parbank.ops.rehearsal import can_rehearse
from parbank.plan.probe import is_known, shapes_of
from parbank.runtime import Runtime

LEAST_CORES = 8
"""With fewer, one process keeps them busy."""
PATIENCE = 60.0
"""Seconds to wait for the processes. The probe compiles what they have not."""
_LONGEST = 200  # characters of a message that are repeated
_CODE = """\
from parbank import ahead
ahead.begin({device!r})
from parbank.plan.probe import rehearse_shape
rehearse_shape({shape}, {device!r}, threads={threads})
"""


@dataclass(frozen=True)
class _Child:
    """The process that compiles the kernels of one shape."""

    shape: int
    process: "subprocess.Popen[bytes]"
    messages: IO[bytes]
    """Its standard error: a file, since nobody reads while it runs."""

    def find_fault(self, patience: float) -> str | None:
        """Waits so many seconds for its end. Returns what went wrong, if anything did."""
        try:
            status = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return f"not done after {PATIENCE:g} s"
        if status == 0:
            return None
        self.messages.seek(0)
        lines = self.messages.read().decode("utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return last[:_LONGEST] or (f"ended by signal {-status}" if status < 0 else f"ended with status {status}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.messages.close()


@contextmanager
def compile_probe(place: Runtime, say: Say = say_nothing) -> Iterator[Callable[[], None]]:
    """Starts the processes on a single GPU that was not probed yet. Yields a function that waits for them. A process that
    fails costs time only, and one line of `say` tells why."""
    wanted = place.is_cuda and place.world == 1 and can_rehearse() and count_cores() >= LEAST_CORES
    children: list[_Child] = []
    faults: dict[int, str] = {}
    try:
        if wanted and not is_known(place):
            _start(place, children, faults)
        yield lambda: _wait(children, faults, say)
    finally:
        for child in children:
            child.end()


def _start(place: Runtime, children: list[_Child], faults: dict[int, str]) -> None:
    """Adds what it starts to `children`, and the reason for what does not start to `faults`, by shape."""
    environment, shapes = child_environment(), range(len(shapes_of(place)))
    threads = max(1, count_cores() // len(shapes))
    silent = subprocess.DEVNULL
    for shape in shapes:
        code = _CODE.format(shape=shape, device=str(place.device), threads=threads)
        command = [sys.executable, "-P", "-c", code]  # -P: files of the current folder are no modules
        with ExitStack() as stack:
            try:
                messages = stack.enter_context(tempfile.TemporaryFile())
                process = subprocess.Popen(command, env=environment, stdin=silent, stdout=silent, stderr=messages)
            except OSError as error:  # too little memory, too many processes, or no room for a file
                faults[shape] = f"cannot be started: {error.strerror or error}"
            else:
                children.append(_Child(shape, process, messages))
                stack.pop_all()  # the child closes it


def _wait(children: list[_Child], faults: dict[int, str], say: Say) -> None:
    count, deadline = len(children) + len(faults), time.monotonic() + PATIENCE
    for child in children:
        fault = child.find_fault(max(0.0, deadline - time.monotonic()))
        if fault is not None:
            faults[child.shape] = fault
    if faults:
        shape, fault = min(faults.items())
        say(
            f"note: {len(faults)} of {count} processes that compile the probe's kernels failed (shape {shape + 1}: {fault}); the "
            "probe compiles these kernels itself, so the start takes longer"
        )
