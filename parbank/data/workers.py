"""Processes that work on text, since threads of one process wait for Python's lock.

SentencePiece gives the lock away. Case operators, the proof and the conversion of tokens hold it most of the time, so that
more than a few cores gain nothing (docs/log/startup.md). Each worker is started as a command. Forking could break CUDA in
this process, and the module `multiprocessing` would import the user's script a second time.

    python -m parbank.data.workers

A worker says which parbank it imported, reads pickled calls from its standard input, and writes pickled results to what
was its standard output. It ends with its input: none outlives the process that started it by more than a call.
"""

import fcntl
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, BinaryIO, ParamSpec, TypeVar

import parbank
from parbank.data.progress import Say
from parbank.errors import DataError

P = ParamSpec("P")
T = TypeVar("T")
_Process = subprocess.Popen[bytes]
_READY = b"parbank worker of "


class Workers:
    """Calls functions of modules in `count` processes; with 0, or where they cannot start, in threads of this one.

    A call that is not done when the block ends is given up.
    """

    def __init__(self, count: int, say: Say) -> None:
        self._say = say
        self._processes: list[_Process] = []
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None
        self._here = ThreadPoolExecutor(2, "parbank-here")  # one thread prepares a call while another encodes
        try:
            for _ in range(count):
                self._processes.append(_start())
        except OSError as error:  # too little memory, or too many processes
            self._end_processes()
            say(f"note: processes cannot be started ({error.strerror or error}); one process prepares the text")
        except BaseException:
            self._end_processes()
            raise

    @cached_property
    def count(self) -> int:
        """The number of processes that take calls. Waits until they have started: the first call can only be made then."""
        faults = {process: fault for process in self._processes if (fault := _find_fault(process))}
        if faults:
            found, *_ = faults.values()
            self._say(
                f"note: {len(faults)} of {len(self._processes)} processes that prepare text cannot be used (the first {found}); "
                "the text is prepared without them"
            )
        self._end_processes(list(faults))
        for process in self._processes:
            self._idle.put(process)
        # A thread for each process, so that none waits for an idle one: the first to take it could be a later call.
        self._threads = ThreadPoolExecutor(max(1, len(self._processes)), "parbank-workers")
        return len(self._processes)

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The coming result of a call in a process that is free for it. An error there becomes an error here."""
        if self.count:
            assert self._threads is not None  # by `count`
            return self._threads.submit(self._call, (function, args, kwargs))
        return self.submit_here(function, *args, **kwargs)

    def submit_here(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The coming result of a call in a thread of this process."""
        return self._here.submit(function, *args, **kwargs)

    def _call(self, call: Any) -> Any:
        process = self._idle.get()
        try:
            result, error = _ask(process, call)
        finally:
            self._idle.put(process)  # also a dead one: the next call fails as well
        if error is not None:
            raise error
        return result

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_processes()  # before the threads, which wait for results
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._here.shutdown(cancel_futures=True)

    def _end_processes(self, ended: list[_Process] | None = None) -> None:
        """Ends these processes, or all."""
        ended = self._processes if ended is None else ended
        for process in ended:
            process.kill()
        for process in ended:
            with suppress(OSError), process:  # what is left to write cannot be written
                pass
        self._processes = [process for process in self._processes if process not in ended]


def _start() -> _Process:
    # NumPy's BLAS would start threads that nothing here uses.
    environment = child_environment() | {"OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "parbank.data.workers"]  # -P: files of the current folder are no modules
    # In a process group of its own, since Ctrl-C at a terminal is for this process, which then ends the others.
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)


def child_environment() -> dict[str, str]:
    """The environment of a Python process that imports this parbank."""
    paths = [str(Path(parbank.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _find_fault(process: _Process) -> str | None:
    """Waits until a process has started: what it did instead, or none. Python finds other packages, or another parbank, in a
    process that does not share changes of `sys.path`, or whose folder cannot be in PYTHONPATH since its name has a colon."""
    assert process.stdout is not None
    for line in process.stdout:  # words of a file that Python runs at its start may come before
        if line.startswith(_READY):
            return None if line == _name_parbank() else f"imported {line[len(_READY) :].decode().strip()}"
    return _describe_end(process)


def _name_parbank() -> bytes:
    return _READY + ascii(os.path.realpath(parbank.__file__)).encode() + b"\n"


def _describe_end(process: _Process) -> str:
    status = process.wait()
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def _ask(process: _Process, call: Any) -> tuple[Any, Exception | None]:
    assert process.stdin is not None
    assert process.stdout is not None
    message = pickle.dumps(call, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        process.stdin.write(message)
        process.stdin.flush()
        answer: tuple[Any, Exception | None] = pickle.load(process.stdout)
        return answer
    except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
        if isinstance(error, pickle.UnpicklingError):  # half an answer, or no answer
            process.kill()
        raise DataError(
            f"a process that prepares text {_describe_end(process)}; if the memory was used up, free some, or allow fewer cores "
            "(taskset), and give the same command again"
        ) from None


def _answer(calls: BinaryIO, answers: BinaryIO) -> None:
    """Answers one call."""
    function, args, kwargs = pickle.load(calls)
    try:
        answer = _dump(function(*args, **kwargs), None)
    except Exception as error:
        if not isinstance(error, DataError):
            error.add_note(f"In a process that prepares text:\n{traceback.format_exc()}")
        answer = _dump(None, error)
    answers.write(answer)
    answers.flush()


def _dump(result: Any, error: Exception | None) -> bytes:
    return pickle.dumps((result, error), protocol=pickle.HIGHEST_PROTOCOL)


def main() -> None:
    import_module("parbank.data.encode")  # the functions that are called, before the first call
    answers = os.fdopen(
        fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3), "wb"
    )  # not 2, which may be free: libraries write there
    try:
        os.fstat(2)
    except OSError:  # closed in the other process
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)  # a library's own words must not lie between answers
    try:
        answers.write(b"\n" + _name_parbank())
        answers.flush()
        while True:
            _answer(sys.stdin.buffer, answers)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):  # the other process is gone
        os._exit(0)  # nobody reads what is left


if __name__ == "__main__":
    main()
