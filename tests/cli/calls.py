"""How the tests of the command line call it."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Answer(NamedTuple):
    code: Any
    out: str
    err: str


Call = Callable[..., Answer]


def train_arguments(spec: str, out: Path, steps: int = 4) -> list[str]:
    return ["train", "--recipe", "nano", "--data", spec, "--steps", str(steps), "--out", str(out), "--device", "cpu"]


def next_commands(out: str) -> list[list[str]]:
    """The arguments of the commands that an answer ends with, as a shell would split them."""
    lines = out.splitlines()
    first = max(number for number, line in enumerate(lines) if line.startswith("next  parbank "))
    return [shlex.split(line.removeprefix("next"))[1:] for line in lines[first:]]
