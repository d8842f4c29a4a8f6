"""Ranks as real processes, and the loss of one of them: for tests and for benchmarks/faults.py.

loss = lose_rank("text:folder", Path("work"), world=3, victim=1, delay=1.5)
assert loss.complaint() == ""
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 60.0
"""Every other rank must have ended this long after one is lost."""
SLACK_SECONDS = 120.0
"""How much longer a test waits for them: a busy machine may stall any process."""
LAST_HOLD = "scoring the packed model"
"""The last line before which no rank has ended."""


@dataclass(frozen=True)
class Rank:
    """A process of `python -m parbank`, and the files that it prints to."""

    process: "subprocess.Popen[bytes]"
    out: Path
    err: Path

    def said(self) -> str:
        return self.out.read_text(encoding="utf-8", errors="replace")

    def complained(self) -> list[str]:
        """The lines of its standard error."""
        return self.err.read_text(encoding="utf-8", errors="replace").splitlines()


@contextmanager
def start_ranks(
    folder: Path,
    arguments: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]] = (),
    hold: Path | None = None,
) -> Iterator[list[Rank]]:
    """Starts one process per list of arguments, as torchrun would, and kills what is left of them at the end. `hold` is the
    file of tests/faults/held.py."""
    folder.mkdir(parents=True, exist_ok=True)
    program = ["-m", "parbank"] if hold is None else ["-m", "tests.faults.held", str(hold)]
    port, ranks = find_port(), []
    try:
        for number, words in enumerate(arguments):
            places = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": len(arguments), "MASTER_PORT": port}
            environment = os.environ | {key: str(value) for key, value in places.items()}
            path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # packages may come from there
            environment |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
            environment |= environments[number] if environments else {}
            out, err = folder / f"rank{number}.out", folder / f"rank{number}.err"
            with out.open("wb") as stdout, err.open("wb") as stderr:
                command = [sys.executable, *program, *words]
                process = subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr)
            ranks.append(Rank(process, out, err))
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()


def find_port() -> int:
    """A free port for a server that starts later. The system gives ports from 32768 on to whoever asks for any, so that one
    of those may be taken by then."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return int(probe.getsockname()[1])


def wait_for(rank: Rank, text: str, seconds: float = 300.0) -> None:
    """Until a rank has printed a text."""
    deadline = time.monotonic() + seconds
    while text not in rank.said():
        assert rank.process.poll() is None, f"ended before it said {text!r}: {rank.said()} {rank.complained()}"
        assert time.monotonic() < deadline, f"no {text!r} within {seconds} s: {rank.said()}"
        time.sleep(0.02)


def join(ranks: Sequence[Rank], seconds: float) -> list[int]:
    """The exit codes, once all have ended."""
    deadline = time.monotonic() + seconds
    return [rank.process.wait(timeout=max(0.1, deadline - time.monotonic())) for rank in ranks]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What the other ranks did after one was lost."""

    victim: int
    moment: str
    """The last line that the first rank had printed."""
    seconds: float
    """Until the last of the others had ended; infinite if it had not after all that time."""
    codes: dict[int, int | None]
    errors: dict[int, list[str]]

    def complaint(self) -> str:
        """Empty if every other rank ended in time, by one sentence that names the lost rank, with exit code 2."""
        for rank, lines in self.errors.items():
            named = [line for line in lines if f"rank {self.victim} was lost" in line]
            if self.codes[rank] != 2 or len(named) != 1 or len(lines) != 1:
                return f"rank {rank} ended with {self.codes[rank]} after {self.moment!r} and said {lines}"
        return ""


def lose_rank(
    spec: str,
    folder: Path,
    *,
    world: int = 2,
    victim: int = 1,
    delay: float = 0.0,
    after: str = "training tokens",
    steps: int = 60,
    number: int = signal.SIGKILL,
    device: str = "cpu",
    environments: Sequence[Mapping[str, str]] = (),
) -> Loss:
    """Trains on several ranks, sends one of them a signal some seconds after the first rank has printed a text, and waits for
    the others. The run does not end before the signal."""
    out, hold = folder / "run", folder / "hold"
    folder.mkdir(parents=True, exist_ok=True)
    hold.write_text(LAST_HOLD, encoding="utf-8")
    words = ["train", "--recipe", "nano", "--data", spec, "--out", str(out), "--device", device, "--steps", str(steps)]
    with start_ranks(folder, [words] * world, environments, hold) as ranks:
        wait_for(ranks[0], after)
        time.sleep(delay)
        moment = ranks[0].said().splitlines()[-1]
        assert all(rank.process.poll() is None for rank in ranks), f"the run has ended before the signal: {moment}"
        ranks[victim].process.send_signal(number)
        hold.unlink()
        began = time.monotonic()
        others = {n: rank for n, rank in enumerate(ranks) if n != victim}
        try:
            join(list(others.values()), LIMIT_SECONDS + SLACK_SECONDS)
            seconds = time.monotonic() - began
        except subprocess.TimeoutExpired:
            seconds = float("inf")
        codes = {n: rank.process.poll() for n, rank in others.items()}
        errors = {n: rank.complained() for n, rank in others.items()}
    return Loss(victim=victim, moment=moment, seconds=seconds, codes=codes, errors=errors)
