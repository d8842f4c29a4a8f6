"""How often a small run crosses the borders between packages:

    python -m tests.crossings               # from the root of the repository
    python -m tests.crossings --root DIR    # the same run by another copy of parbank

The run is `parbank train --recipe nano --steps 4` on a few files of the standard library, from the command line to the
scored artifact. A crossing is a function of one package under parbank/ that is entered from another package: each function
counts once, however often it is called and from wherever. Code outside parbank, such as torch, is passed through: a method of
the model that torch calls for the trainer is entered from the trainer. Callbacks count, imports do not. The modules at the root of
parbank/ (config, runtime, files, graphs, ...) are common ground: calls to and from them are not counted.

The table at the end counts the same trace in other ways: by who calls, and with every module at the root as a package of its own.
"""

import argparse
import os
import runpy
import shutil
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

TEXT = ("argparse", "ast", "calendar", "difflib", "dis", "inspect", "os", "pathlib", "tarfile", "typing")

IMPORT = "<module>"  # the name of the code that an import runs

Function = tuple[str, str]
"""(module, qualified name)"""


class Tracer:
    """Notes every function of one part of parbank that is entered from another part."""

    def __init__(self, package: Path) -> None:
        self._prefix = str(package) + os.sep
        self.entered: set[tuple[Function, Function]] = set()
        """(caller, function) pairs that cross a border, modules at the root included."""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call":
            return
        here = self._function(frame)
        if here is None:
            return
        caller = frame.f_back
        while caller is not None and self._function(caller) is None:
            caller = caller.f_back
        before = None if caller is None else self._function(caller)
        if before is None or part_of(before) == part_of(here):
            return
        if IMPORT not in (before[1], here[1]):
            self.entered.add((before, here))

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


def trace_run(root: Path) -> set[tuple[Function, Function]]:
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
            with suppress(SystemExit):
                runpy.run_module("parbank", run_name="__main__")
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            os.chdir(root)
        assert Path(folder, "run", "summary.json").exists(), "the run did not end"
    return tracer.entered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    entered = trace_run(parser.parse_args().root.resolve())
    crossings = {(caller, here) for caller, here in entered if is_packaged(caller) and is_packaged(here)}
    by_border: dict[tuple[str, str], set[str]] = defaultdict(set)
    for caller, here in crossings:
        by_border[part_of(caller), part_of(here)].add(f"{here[0].split(os.sep, 1)[1]}.{here[1]}")
    for (caller_part, part), names in sorted(by_border.items(), key=lambda item: -len(item[1])):
        print(f"{caller_part} -> {part} ({len(names)}): {', '.join(sorted(names))}")
    print(f"{'counted once each':38}{'packages':>10}{'and root modules':>18}")
    for name, key in WAYS.items():
        print(f"{name:38}{len(set(map(key, crossings))):10}{len(set(map(key, entered))):18}")
    print(f"crossings: {len({here for _, here in crossings})}")


if __name__ == "__main__":
    main()
