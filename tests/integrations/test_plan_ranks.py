"""A plan under torchrun: the first rank probes and plans, alone, and all ranks train the same config."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_two_ranks_train_the_plan_of_the_first(text_spec: str, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "parbank", "train",
        "--data", text_spec, "--minutes", "0.02", "--max-bytes", "300kB", "--out", str(tmp_path / "run"), "--device", "cpu",
        "--set", "quant.calibration_tokens=0", "--set", "model.width=64",
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
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] >= 1
