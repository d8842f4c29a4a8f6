"""parbank seen by a program that is checked with `mypy --strict`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".mypy_cache" / "strict"  # kept: the first check takes half a minute, later ones a second


def check(*arguments: str) -> tuple[int, str]:
    """Only the program is reported on, as where parbank is an installed package."""
    command = [
        sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent", f"--cache-dir={CACHE}",
        "--python-version=3.11", *arguments,
    ]  # fmt: skip
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=ROOT / "tests", check=False, timeout=600
    )
    return done.returncode, done.stdout + done.stderr


def test_a_consumer_passes() -> None:
    code, output = check("consumer.py")
    assert code == 0, output


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import parbank; parbank.nonsense", 'Module has no attribute "nonsense"'),
        ("import parbank; parbank.load(3)", "incompatible type"),
        ("import parbank; parbank.train(minuets=3)", "Unexpected keyword argument"),
        ("import parbank; x: int = parbank.load('m').sample('p')", "Incompatible types in assignment"),
    ],
)
def test_mistakes_are_seen(program: str, message: str) -> None:
    code, output = check("-c", program)
    assert code == 1
    assert message in output
