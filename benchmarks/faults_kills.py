"""Kills: SIGKILL at a random moment, or at a random operation on a file; then the command again, to the end. For faults.py.

The result must be, bit by bit, that of an undisturbed command, and no file may be left over.
"""

import itertools
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults_cases import VOCABULARY, Outcome, Part, Reference, differ, make_reference, read_result, require
from faults_processes import Ended, run, run_and_kill

from parbank.training.checkpoint import list_checkpoints

KINDS = ("train", "resume", "prepare", "pack")
# Events of the interpreter for operations that change files. A kill before one is a kill after the one before.
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree", "fcntl.flock"}
HALF = 3  # steps of the checkpoint that `resume` begins from


@dataclass(frozen=True)
class Shared:
    folder: Path
    seed: int
    reference: Reference
    commands: dict[str, "Command"]


@dataclass(frozen=True)
class Command:
    """One kind of command that is killed."""

    set_up: Callable[[Path], None]
    words: Callable[[Path], list[str]]
    again: Callable[[Path], list[str]]
    """The command that finishes the work, given what the kill has left."""
    result: Callable[[Path], Any]
    expected: Any
    seconds: float
    """How long it takes undisturbed."""
    changes: int
    """How many operations on files it makes."""


def prepare(folder: Path, seed: int) -> Shared:
    reference = make_reference(folder)
    spec, cache = reference.spec, reference.cache

    def go_on(out: Path) -> list[str]:
        return reference.resume(out) if list_checkpoints(out / "checkpoint") else reference.train(out)

    def set_up_resume(out: Path) -> None:
        """A run that was stopped half way: the folder of the reference as it was then."""
        shutil.copytree(folder / "half", out)

    def pack(out: Path) -> list[str]:
        return ["pack", str(reference.out), "--max-bytes", "40000", "--out", str(out / "small.pbk")]

    def set_up_pack(out: Path) -> None:
        """An older artifact lies where the new one goes."""
        out.mkdir()
        shutil.copy(reference.out / "model.pbk", out / "small.pbk")

    def words_prepare(out: Path) -> list[str]:
        return ["data", "prepare", spec, "--vocab", str(VOCABULARY), "--out", str(out / "shards")]

    make_half(folder, reference)
    kinds = {
        "train": (lambda out: None, reference.train, go_on, read_result),
        "resume": (set_up_resume, reference.resume, go_on, read_result),
        "prepare": (lambda out: out.mkdir(), words_prepare, words_prepare, read_files),
        "pack": (set_up_pack, pack, pack, read_files),
    }
    commands = {}
    for kind, (set_up, words, again, result) in kinds.items():
        out = folder / f"undisturbed-{kind}"
        shutil.rmtree(out, ignore_errors=True)
        set_up(out)
        counted = folder / "changes"
        ended = run(
            words(out), folder / f"{kind}.log", cache=cache, hook=lambda counted=counted: count_changes(counted)
        )
        require(ended)
        commands[kind] = Command(set_up, words, again, result, result(out), ended.seconds, len(counted.read_bytes()))
        shutil.rmtree(out)
    for kind in ("train", "resume"):
        if fault := differ(commands[kind].expected, reference.result):
            raise SystemExit(f"an undisturbed {kind} is not like the reference: {fault}")
    return Shared(folder, seed, reference, commands)


def make_half(folder: Path, reference: Reference) -> None:
    """The run as it is when it is stopped at half of its steps, by a kill at that moment."""
    half = folder / "half"
    for attempt in itertools.count():
        if [path.name for path in list_checkpoints(half / "checkpoint")][-1:] == [f"step_{HALF:08d}.pt"]:
            return
        if attempt == 20:
            raise SystemExit("no kill has left the checkpoint of half the steps")
        shutil.rmtree(half, ignore_errors=True)
        run(
            reference.train(half), folder / "half.log", cache=reference.cache,
            hook=lambda: kill_when(lambda event, args: event == "os.rename" and f"step_{HALF + 1:08d}" in str(args)),
        )  # fmt: skip


def read_files(out: Path) -> dict[str, bytes]:
    """Every file, temporary ones included."""
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def attempt(shared: Shared, index: int) -> Outcome:
    draw = random.Random(f"{shared.seed} {index}")
    kind = KINDS[index % len(KINDS)]
    command = shared.commands[kind]
    out, log = shared.folder / f"case-{index}", shared.folder / "case.log"
    by_time = draw.random() < 0.5
    for _ in range(50):  # a command that was faster than the kill is no case
        shutil.rmtree(out, ignore_errors=True)
        command.set_up(out)
        if by_time:
            moment = draw.uniform(0, 1.1 * command.seconds)
            ended, where = kill_at_moment(command.words(out), log, shared, moment), f"after {moment:.3f} s"
        else:
            number = draw.randrange(command.changes)
            ended, where = kill_at_change(command.words(out), log, shared, number), f"at change {number} of a file"
        if ended.code == -signal.SIGKILL:
            break
    else:
        return Outcome(index, kind, "not killed", "50 kills came too late")
    began = time.monotonic()
    again = run(command.again(out), log, cache=shared.reference.cache)
    if again.code:
        fault = f"killed {where}; then the command ended with {again.code}: {again.said[-1500:]}"
        return Outcome(index, kind, "not finished", fault)
    fault = differ(command.result(out), command.expected)
    shutil.rmtree(out)
    ending = f"identical, killed at a {'moment' if by_time else 'change of a file'}"
    return Outcome(index, kind, ending, fault and f"killed {where}: {fault}", seconds=time.monotonic() - began)


def kill_at_moment(words: list[str], log: Path, shared: Shared, moment: float) -> Ended:
    return run_and_kill(words, log, cache=shared.reference.cache, after=moment)


def kill_at_change(words: list[str], log: Path, shared: Shared, number: int) -> Ended:
    counter = itertools.count()

    def is_due(event: str, args: Any) -> bool:
        return changes_file(event, args) and next(counter) == number

    return run(words, log, cache=shared.reference.cache, hook=lambda: kill_when(is_due))


def kill_when(is_due: Callable[[str, Any], bool]) -> None:
    """Kills this process before the first operation for which `is_due` is true."""

    def watch(event: str, args: Any) -> None:
        if is_due(event, args):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def count_changes(path: Path) -> None:
    """Appends a byte to a file for every operation that `kill_at_change` may kill at."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def watch(event: str, args: Any) -> None:
        if changes_file(event, args):
            os.write(handle, b".")

    sys.addaudithook(watch)


def changes_file(event: str, args: Any) -> bool:
    return event in CHANGES or (event == "open" and bool(args[2] & (os.O_WRONLY | os.O_RDWR)))


PART = Part(prepare, attempt, ("benchmarks/faults_kills.py", "benchmarks/faults_cases.py"))
