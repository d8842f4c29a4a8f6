"""How often a small run crosses the borders between packages:

    python -m tests.crossings               # from the root of the repository
    python -m tests.crossings --root DIR    # the same run by another copy of parbank

The run is `parbank train --recipe nano --steps 4` on a few files of the standard library, from the command line to the
scored artifact. A crossing is a function of one package under parbank/ that is entered from another package: each function
counts once, however often it is called and from wherever. Code outside parbank, such as torch, is passed through: a method of
the model that torch calls for the trainer is entered from the trainer. The modules at the root of parbank/ (config, runtime,
files, graphs, ...) are common ground and passed through in the same way: a call to `config.require` is no crossing, but a
function of `model` that `graphs` calls for the trainer is one. A function that a thread runs is entered from the function that
started the thread, or submitted the work to a pool. Callbacks count, imports do not.

The table at the end counts the same trace in other ways: by who calls, and with every module at the root as a package of its
own, where the calls that an import makes count too.
"""

import argparse
import os
import runpy
import shutil
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

TEXT = ("argparse", "ast", "calendar", "difflib", "dis", "inspect", "os", "pathlib", "tarfile", "typing")

IMPORT = "<module>"  # the name of the code that an import runs

Function = tuple[str, str]
"""(module, qualified name)"""


class Tracer:
    """Notes every function of one part of parbank that is entered from another part."""

    def __init__(self, package: Path) -> None:
        self._prefix = str(package) + os.sep
        self.between_packages: set[tuple[Function, Function]] = set()
        """(caller, function) pairs that cross a border, modules at the root passed through."""
        self.with_root: set[tuple[Function, Function]] = set()
        """The same with each module at the root as a package of its own, and with the calls that imports make."""
        self._submitter = threading.local()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call" or self._function(frame) is None:
            return
        pair = self._find_pair(frame, is_packaged)
        if pair is not None and pair[0][1] != IMPORT:
            self.between_packages.add(pair)
        if (pair := self._find_pair(frame, lambda function: True)) is not None:
            self.with_root.add(pair)

    def _find_pair(self, frame: FrameType, is_counted: Callable[[Function], bool]) -> tuple[Function, Function] | None:
        """The caller and the function of this call, if it crosses a border between the functions that count. An import itself
        does not."""
        stack = self._functions(frame)
        here = next(stack)
        caller = next((function for function in stack if is_counted(function)), None)
        if not is_counted(here) or caller is None or part_of(caller) == part_of(here) or here[1] == IMPORT:
            return None
        return caller, here

    def _functions(self, frame: FrameType | None) -> Iterator[Function]:
        """The functions of parbank on the stack, from the inside out, and in a thread those of its starter or submitter."""
        while frame is not None:
            if (function := self._function(frame)) is not None:
                yield function
            frame = frame.f_back
        yield from getattr(self._submitter, "functions", ())

    @contextmanager
    def following_threads(self) -> Iterator[None]:
        """Inside, a thread keeps the functions that started it, and work in a pool the functions that submitted it."""
        submit, start = ThreadPoolExecutor.submit, threading.Thread.start

        def start_with_stack(thread: threading.Thread) -> None:
            functions, work = tuple(self._functions(sys._getframe(1))), thread.run

            def run() -> None:
                self._submitter.functions = functions
                work()

            thread.run = run  # type: ignore[method-assign]
            start(thread)

        def submit_with_stack(pool: ThreadPoolExecutor, work: Any, /, *args: Any, **kwargs: Any) -> Any:
            functions = tuple(self._functions(sys._getframe(1)))

            def run() -> Any:
                self._submitter.functions = functions
                return work(*args, **kwargs)

            return submit(pool, run)

        with (
            mock.patch.object(ThreadPoolExecutor, "submit", submit_with_stack),
            mock.patch.object(threading.Thread, "start", start_with_stack),
        ):
            yield

    def _function(self, frame: FrameType) -> Function | None:
        """The function of parbank that a frame runs; None for other code."""
        code = frame.f_code
        if not code.co_filename.startswith(self._prefix):
            return None
        return code.co_filename.removeprefix(self._prefix).removesuffix(".py"), code.co_qualname


def part_of(function: Function) -> str:
    """The package of a function, or its module where that lies at the root of parbank/."""
    return function[0].split(os.sep)[0]


def is_packaged(function: Function) -> bool:
    return os.sep in function[0]


WAYS: dict[str, Callable[[tuple[Function, Function]], object]] = {
    "functions entered": lambda pair: pair[1],
    "calling package and function entered": lambda pair: (part_of(pair[0]), pair[1]),
    "calling module and function entered": lambda pair: (pair[0][0], pair[1]),
    "calling function and function entered": lambda pair: pair,
    "calling module and module entered": lambda pair: (pair[0][0], pair[1][0]),
}
"""Ways to count (caller, function) pairs: each with the value that is counted once."""


def trace_run(root: Path) -> Tracer:
    """Trains in this process, with the parbank of `root`. Only one call a process: imports happen once."""
    sys.path.insert(0, str(root))
    import torch

    import parbank

    torch.set_num_threads(1)
    tracer = Tracer(Path(parbank.__file__).parent)
    library = Path(os.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PARBANK_CACHE"] = f"{folder}/cache"
        os.chdir(folder)
        Path("text").mkdir()
        for name in TEXT:
            shutil.copy(library / f"{name}.py", f"text/{name}.py")
        sys.argv = ["parbank", "train", "--recipe", "nano", "--data", "text:text", "--steps", "4", "--out", "run"]
        threading.setprofile(tracer)
        sys.setprofile(tracer)
        try:
            with suppress(SystemExit), tracer.following_threads():
                runpy.run_module("parbank", run_name="__main__")
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            os.chdir(root)
        assert Path(folder, "run", "summary.json").exists(), "the run did not end"
    return tracer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    tracer = trace_run(parser.parse_args().root.resolve())
    by_border: dict[tuple[str, str], set[str]] = defaultdict(set)
    for caller, here in tracer.between_packages:
        by_border[part_of(caller), part_of(here)].add(f"{here[0].split(os.sep, 1)[1]}.{here[1]}")
    for (caller_part, part), names in sorted(by_border.items(), key=lambda item: -len(item[1])):
        print(f"{caller_part} -> {part} ({len(names)}): {', '.join(sorted(names))}")
    print(f"{'counted once each':38}{'packages':>10}{'and root modules':>18}")
    for name, key in WAYS.items():
        print(f"{name:38}{len(set(map(key, tracer.between_packages))):10}{len(set(map(key, tracer.with_root))):18}")
    print(f"crossings: {len({here for _, here in tracer.between_packages})}")


if __name__ == "__main__":
    main()
