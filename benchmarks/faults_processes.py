"""Commands of parbank as processes of their own, forked from one that has imported everything.

A fork starts in milliseconds where an import takes seconds, so hundreds of kills fit into minutes. A forked command is a real
process: it has its own memory and files, and SIGKILL ends it as it ends any other.
"""

import importlib
import io
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import parbank.cli.main
from parbank.errors import ParbankError

Hook = Callable[[], None]
LIMIT_SECONDS = 120.0  # no command here takes a tenth of it, even on a busy machine


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    """The exit code; minus the number of the signal that ended it."""
    said: str
    seconds: float


def start(words: list[str], log: Path, *, cache: Path, hook: Hook | None = None, modules: Path | None = None) -> int:
    """Starts `parbank WORDS...`; returns its process id. `hook` runs in the new process before the command. The names of all
    modules that it has imported at its end go to the file `modules`."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        _redirect(log)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
        os.environ["PARBANK_CACHE"] = str(cache)
        os.environ["COLUMNS"] = "200"
        sys.argv = ["parbank", *words]
        if hook is not None:
            hook()
        parbank.cli.main.main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 70
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            if modules is not None:
                modules.write_text("\n".join(sys.modules))
        finally:
            os._exit(code)


def wait(pid: int, log: Path, began: float) -> Ended:
    _, status = os.waitpid(pid, 0)
    said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return Ended(os.waitstatus_to_exitcode(status), said, time.monotonic() - began)


def run(words: list[str], log: Path, *, cache: Path, hook: Hook | None = None) -> Ended:
    """Runs a command to its end."""
    began = time.monotonic()
    return wait(start(words, log, cache=cache, hook=hook), log, began)


def run_first(words: list[str], log: Path, *, cache: Path) -> Ended:
    """Runs a command, and imports into this process what the command has imported: those forked later need not."""
    began, modules = time.monotonic(), log.with_suffix(".modules")
    ended = wait(start(words, log, cache=cache, modules=modules), log, began)
    for name in modules.read_text().splitlines():
        if name not in sys.modules and not name.startswith("__"):
            with suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)
    return ended


def run_and_kill(words: list[str], log: Path, *, cache: Path, after: float) -> Ended:
    """Runs a command and kills it after so many seconds, unless it has ended."""
    began = time.monotonic()
    pid = start(words, log, cache=cache)
    time.sleep(after)
    os.kill(pid, signal.SIGKILL)  # a process that has ended and was not waited for yet takes no harm
    return wait(pid, log, began)


def _redirect(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number in (1, 2):
        os.dup2(handle, number)
    sys.stdout = io.TextIOWrapper(os.fdopen(os.dup(1), "wb"), line_buffering=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(os.dup(2), "wb"), line_buffering=True)


@dataclass(frozen=True)
class Measured:
    """What one call in a process of its own did and took."""

    ending: str
    """`success`, `error` (one of parbank's own), or `fault: ...`, which no input may cause."""
    said: str
    seconds: float
    """Processor time, so that other programs on the machine do not count."""
    megabytes: float
    """Peak resident memory above that of the idle process."""


def measure(action: Callable[[], object]) -> Measured:
    """Calls `action` in a fork of this process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
        idle, began = _resident_bytes(), time.process_time()
        ending, said = _attempt(action)
        seconds = time.process_time() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        report = f"{ending}\0{said}\0{seconds}\0{(peak - idle) / 1e6}"
        os.write(writer, report.encode("utf-8", "replace")[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        report = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    if not report:
        return Measured(f"fault: the process ended with {os.waitstatus_to_exitcode(status)}", "", 0.0, 0.0)
    ending, said, seconds, megabytes = report.split("\0")
    return Measured(ending, said, float(seconds), float(megabytes))


def _attempt(action: Callable[[], object]) -> tuple[str, str]:
    try:
        action()
        return "success", ""
    except ParbankError as error:
        return "error", f"{type(error).__name__}: {error}".replace("\0", "\\0")[:2000]
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))[-3000:].replace("\0", "\\0")
        return f"fault: {type(error).__name__}", trace


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
