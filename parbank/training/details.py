"""details.json: facts for the page of a run beyond its summary, at its start and again at its end. A run ends well without
it."""

import os
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import parbank
from parbank.cores import count_cores

FORMAT = 1


def describe_place(when: str = "ended_at") -> dict[str, Any]:
    """The time, under the name `when`; the machine; and the commit of parbank, where it runs from a checkout."""
    return {
        "format": FORMAT,
        when: datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _find_commit(),
        "machine": {"processor": _find_processor(), "cores": count_cores(), "memory": _find_memory()},
    }


def _find_commit() -> str | None:
    root = Path(parbank.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()
    return None


def _find_processor() -> str | None:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return None


def _find_memory() -> int | None:
    with suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
