"""How the tests of the command line call it."""

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
