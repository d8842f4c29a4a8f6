"""The logger of Weights & Biases with its real package, offline."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

CODE = """
import sys
from pathlib import Path
from parbank.training.loggers import LOGGERS
logger = LOGGERS["wandb"](Path(sys.argv[1]), resume_step=0)
logger.write({"step": 1, "loss": 0.8125, "val_bpb": None})
logger.write({"step": 2, "loss": 0.40625, "val_bpb": 1.203125})
details = {"samples": [{"prompt": "The", "text": " sea"}], "bits_histogram": {"width": 0.5, "counts": [3, 1]}}
logger.write_details(2, details)
logger.close()
"""


def test_rows_and_details_are_on_disk_offline(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    environment |= {"WANDB_MODE": "offline", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (stored,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    data = stored.read_bytes()
    for part in (b"0.8125", b"0.40625", b"1.203125", b"The sea", b"bits_of_a_token", b"histogram"):
        assert part in data
