"""The hooks of pre-commit."""

import os
import subprocess
import sys
from pathlib import Path

TREE = Path(__file__).parents[2]


def test_hooks_pass_on_every_file(tmp_path: Path) -> None:
    """In a clone, because hooks mend what they find. mypy has its turn in `make check`, over the same files."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{TREE}", clone], check=True)
    (clone / ".venv").symlink_to(sys.prefix)
    env = os.environ | {"SKIP": "mypy", "PRE_COMMIT_HOME": str(tmp_path / "hooks")}
    command = [sys.executable, "-m", "pre_commit", "run", "--all-files"]
    done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Passed") == 2
