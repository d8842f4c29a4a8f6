"""`parbank train` beside other busy processes, as a user starts it."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_run_by_the_clock_makes_way(tmp_path: Path, text_spec: str) -> None:
    """Two busy processes for each CPU: at most half of the cores are left, but two threads stay. The summary says so."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    options = ["--recipe", "nano", "--data", text_spec, "--minutes", "0.2", "--out", str(tmp_path / "run")]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "parbank", "train", *options, "--device", "cpu"],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    threads, load = summary["threads"], summary["load"]
    assert threads["last"] <= max(2, threads["cores"] // 2)
    assert load["mean"] > 0.8 * threads["cores"]
    assert done.stdout.count("warning: other processes want") == 1
