"""Every write fails once, or from then on: disk full, read-only file system, no descriptors, no memory. For faults.py.

The command must end in success or with an error message. Files that were whole before must still be whole. The command again,
without the fault, must give the result of an undisturbed one.
"""

import builtins
import errno
import io
import itertools
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from faults_cases import RESUME, TRAIN, VOCABULARY, Outcome, Part, require, write_text
from faults_processes import Ended, run, run_first

from parbank.artifact.load import load_artifact
from parbank.data.dataset import describe
from parbank.training.checkpoint import find_checkpoint, list_checkpoints, load_checkpoint

FAULTS = {
    "disk full": ({"create", "mkdir", "write", "sync"}, errno.ENOSPC),
    "read-only": ({"create", "mkdir", "rename", "remove"}, errno.EROFS),
    "no descriptors": ({"create"}, errno.EMFILE),
    "no memory": ({"create", "write", "sync"}, 0),
}
"""The operations that each fault meets, and its error number; 0 for MemoryError."""
LASTING = {"once": False, "from then on": True}
STEPS = 2


class Injector:
    """Watches operations on files below a folder, and lets one of them, or all from one on, fail."""

    def __init__(self, root: Path, fault: str, number: int, lasting: bool, journal: Path | None = None) -> None:
        self.root = str(root)
        self.operations, self.error = FAULTS[fault]
        self.number, self.lasting, self.count = number, lasting, itertools.count()
        self.journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if journal else None

    def check(self, operation: str, path: Any) -> None:
        if operation not in self.operations or not self._is_below(path):
            return
        if self.journal is not None:
            os.write(self.journal, b".")
        count = next(self.count)
        if count == self.number or (self.lasting and count > self.number):
            raise OSError(self.error, os.strerror(self.error), str(path)) if self.error else MemoryError("injected")

    def _is_below(self, path: Any) -> bool:
        try:
            return os.path.abspath(os.fsdecode(path)).startswith(self.root)
        except (TypeError, ValueError):
            return False

    def install(self) -> None:
        """Opens, renames and the like are met by an audit hook; writes by files of our own; fsync by a function."""
        injector, plain_open, plain_sync = self, io.open, os.fsync

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                injector.check("write", self.name)
                return super().write(data)

        def open_file(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
            if not set(mode) & set("wax+") or isinstance(file, int):
                return plain_open(file, mode, buffering, *rest, **named)
            plain_mode = "".join(sorted(set(mode) - {"b", "t"}, key="rwxa+".index))
            raw = File(os.fspath(file), plain_mode, opener=named.pop("opener", None))
            if "b" in mode:
                return raw if buffering == 0 else (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
            return io.TextIOWrapper(io.BufferedWriter(raw), *rest, **named)

        def sync(handle: int) -> None:
            injector.check("sync", os.readlink(f"/proc/self/fd/{handle}"))
            plain_sync(handle)

        events = {"os.mkdir": "mkdir", "os.rename": "rename", "os.remove": "remove", "os.rmdir": "remove"}

        def watch(event: str, args: Any) -> None:
            if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR):
                injector.check("create", args[0])
            elif event in events:
                injector.check(events[event], args[0])

        builtins.open = io.open = open_file  # type: ignore[assignment]
        os.fsync = sync
        sys.addaudithook(watch)


@dataclass(frozen=True)
class Command:
    set_up: Callable[[Path], None]
    """Makes the last good state."""
    words: Callable[[Path], list[str]]
    again: Callable[[Path], list[str]]
    """Finishes the work after the fault."""
    check: Callable[[Path], object]
    """Raises where the last good state is lost."""
    result: Callable[[Path], Any]
    expected: Any = None


@dataclass(frozen=True)
class Shared:
    folder: Path
    cache: Path
    commands: dict[str, Command]
    cases: list[tuple[str, str, str, int]]
    """(command, fault, how long, number of the operation)."""


def prepare(folder: Path, seed: int) -> Shared:
    spec, cache, before = write_text(folder / "text"), folder / "cache", folder / "before"
    commands = make_commands(spec, before)
    shutil.rmtree(before, ignore_errors=True)
    require(run_first(commands["train"].words(before / "run"), folder / "before.log", cache=cache))
    earlier = [word if word != str(VOCABULARY) else "300" for word in commands["prepare"].words(before / "data")]
    require(run(earlier, folder / "before.log", cache=cache))
    done, cases = {}, []
    for name, command in commands.items():
        out = folder / "undisturbed"
        for fault in FAULTS:
            shutil.rmtree(out, ignore_errors=True)
            command.set_up(out)
            counted = Injector(out, fault, -1, False, folder / "operations")
            require(run(command.words(out), folder / "undisturbed.log", cache=cache, hook=counted.install))
            number = (folder / "operations").stat().st_size
            cases += [(name, fault, lasting, i) for i in range(number) for lasting in LASTING]
        done[name] = Command(
            command.set_up, command.words, command.again, command.check, command.result, command.result(out)
        )
        shutil.rmtree(out)
    # Neighbours are of different kinds, so that a part of the cases is a part of every kind.
    cases.sort(key=lambda case: (hash_case(case, seed), case))
    return Shared(folder, cache, done, cases)


def hash_case(case: tuple[str, str, str, int], seed: int) -> int:
    return zlib.crc32(f"{seed} {case}".encode())


def make_commands(spec: str, before: Path) -> dict[str, Command]:
    def train(out: Path) -> list[str]:
        words = [str(STEPS) if word == "6" else word for word in TRAIN]
        return [*words, "--data", spec, "--out", str(out)]

    def resume(out: Path) -> list[str]:
        return [*RESUME, "--out", str(out)]

    def go_on(out: Path) -> list[str]:
        return resume(out) if list_checkpoints(out / "checkpoint") else train(out)

    def set_up_resume(out: Path) -> None:
        shutil.copytree(before / "run", out)
        (out / "summary.json").unlink()

    def set_up_pack(out: Path) -> None:
        out.mkdir()
        shutil.copy(before / "run" / "model.pbk", out / "small.pbk")

    def pack(out: Path) -> list[str]:
        return ["pack", str(before / "run"), "--max-bytes", "40000", "--out", str(out / "small.pbk")]

    def prepare_data(out: Path) -> list[str]:
        return ["data", "prepare", spec, "--vocab", str(VOCABULARY), "--out", str(out / "shards")]

    def set_up_data(out: Path) -> None:
        shutil.copytree(before / "data", out)

    def read_run(out: Path) -> Any:
        return {"artifact": (out / "model.pbk").read_bytes(), "ended": (out / "summary.json").exists()}

    def read_data(out: Path) -> Any:
        return {path.name: path.read_bytes() for path in (out / "shards").iterdir()}

    return {
        "train": Command(lambda out: None, train, go_on, lambda out: None, read_run),
        "resume": Command(
            set_up_resume, resume, resume, lambda out: load_checkpoint(find_checkpoint(out)), read_run
        ),
        "prepare": Command(set_up_data, prepare_data, prepare_data, lambda out: describe(out / "shards"), read_data),
        "pack": Command(
            set_up_pack, pack, pack, lambda out: load_artifact(out / "small.pbk", torch.device("cpu")),
            lambda out: (out / "small.pbk").read_bytes(),
        ),
    }  # fmt: skip


def attempt(shared: Shared, index: int) -> Outcome:
    name, fault, lasting, number = shared.cases[index]
    command, out, log = shared.commands[name], shared.folder / f"case-{index}", shared.folder / "case.log"
    kind = f"{name}, {fault}"
    shutil.rmtree(out, ignore_errors=True)
    command.set_up(out)
    began = time.monotonic()
    injector = Injector(out, fault, number, LASTING[lasting])
    ended = run(command.words(out), log, cache=shared.cache, hook=injector.install)
    broken = judge(command, out, ended)
    if not broken and ended.code:
        again = run(command.again(out), log, cache=shared.cache)
        broken = f"without the fault it ended with {again.code}: {again.said[-1000:]}" if again.code else ""
    if not broken and command.result(out) != command.expected:
        broken = "the result differs from an undisturbed one"
    shutil.rmtree(out, ignore_errors=True)
    where = f"operation {number}, {lasting}: "
    ending = "success" if not ended.code else "a sentence"
    return Outcome(
        index, kind, "broken" if broken else ending, broken and where + broken, seconds=time.monotonic() - began
    )


def judge(command: Command, out: Path, ended: Ended) -> str:
    if ended.code not in (0, 2) or "Traceback" in ended.said:
        return f"it ended with {ended.code}: {ended.said[-1800:]}"
    if ended.code and "error: " not in ended.said:
        return f"it ended without a sentence: {ended.said[-800:]}"
    try:
        command.check(out)
    except Exception as error:
        return f"the last good state is lost: {type(error).__name__}: {error}; the command said {ended.said[-500:]}"
    return ""


PART = Part(
    prepare,
    attempt,
    ("benchmarks/faults_writes.py", "benchmarks/faults_cases.py"),
    total=lambda shared: len(shared.cases),
)
