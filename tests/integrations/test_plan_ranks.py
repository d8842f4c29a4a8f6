"""A plan under torchrun: the first rank probes, plans and remembers the run, alone, and all ranks train the same config."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.plan.test_plan_history import write_text

ROOT = Path(__file__).resolve().parents[2]


def test_two_ranks_train_the_plan_of_the_first(tmp_path: Path) -> None:
    """The text ends the run after 142 steps."""
    spec = write_text(tmp_path / "text", "argparse")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "parbank", "train",
        "--data", spec, "--minutes", "1", "--max-bytes", "300kB", "--out", str(tmp_path / "run"), "--device", "cpu",
        "--set", "model.width=64",
    ]  # fmt: skip
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PARBANK_CACHE": str(tmp_path / "cache"),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "planned: " in done.stdout + done.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["recipe"], config["model"]["width"]) == ("auto", 64)
    assert config["batch"]["batch_tokens"] % (2 * config["batch"]["sequence_length"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (kept,) = (tmp_path / "cache" / "plan").glob("runs-*.json")
    (entry,) = json.loads(kept.read_text())
    assert entry["bpb"] == summary["val_bpb_before_packing"]
    assert entry["sizes"]["tokens"] == summary["tokens"]
