"""Stops a process where it is, so that a test can see how far it has come before it acts.

freeze(pid)
if claim.exists():                 # it still holds the job, and nothing can change that
    os.kill(pid, signal.SIGKILL)
else:
    os.kill(pid, signal.SIGCONT)   # it was faster than this test
"""

import os
import signal
import time
from pathlib import Path


def freeze(pid: int) -> None:
    """Returns when no thread of the process runs any more."""
    os.kill(pid, signal.SIGSTOP)
    while any(_state(thread) not in "TZX" for thread in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return "X"
