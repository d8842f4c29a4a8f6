"""benchmarks/faults.py in a shortened count: every part runs, and no case fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COUNTS = {"kills": 8, "artifacts": 500, "files": 150, "writes": 16, "pairs": 6, "ranks": 14}


@pytest.mark.parametrize("part", COUNTS)
def test_a_part_of_the_long_form(part: str, tmp_path: Path) -> None:
    words = [sys.executable, "benchmarks/faults.py", "--part", part, "--count", str(COUNTS[part])]
    words += ["--out", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-2000:]}"
    (result,) = (tmp_path / "results").glob("*/*/result.json")
    rows = {(row["case"], row["provider"]): row["value"] for row in json.loads(result.read_text())["rows"]}
    assert rows["all cases", "cases"] == COUNTS[part]
    assert rows["all cases", "failed"] == 0
