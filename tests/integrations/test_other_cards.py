"""The launch tables on cards that nobody tuned for: Ada (8.9) and consumer Blackwell (12.0) read Ampere's table.

`make test` compiles each table for the architecture that it is named after. Here the tests of the ops compile the sm80
table for the other cards that read it, and check registers, spills and shared memory.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("card", ["89", "120"])
def test_the_common_table_compiles_for_another_card(card: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "tests/ops",
        "-k",
        "compiles_without_spills",
    ]
    environment = {**os.environ, "PARBANK_TEST_CARD": card}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert "11 passed" in done.stdout, done.stdout[-1000:]
