"""Where a result comes from: the commit, the command, the versions, the machine and how busy it was.

    python benchmarks/provenance.py --stamp

A result is a claim about a commit. A copy of the tree on another machine may lack git, or have another commit checked out under
the copied files. So `--stamp`, run before the tree is copied, leaves benchmarks/STAMP.json: the commit, whether the code differed
from it, and a digest of the code. The copy computes the digest anew: where the two are equal, the stamp is believed, else git.
Git ignores the file, so a way of copying that leaves ignored files out must be told to take it.

"Dirty" speaks of the code that is measured: parbank/, benchmarks/ without its results, and pyproject.toml, untracked files
included. A changed README does not make a result dirty.
"""

import argparse
import datetime
import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
STAMP = HERE / "STAMP.json"
CODE = ("parbank", "benchmarks", "pyproject.toml", ":!benchmarks/results", ":!benchmarks/claims.toml")


def code_digest() -> str:
    """One hash of every file that can change a figure: names and contents."""
    digest = hashlib.sha256()
    for path in _code_files():
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(ROOT).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def digests(measured: Iterable[str]) -> dict[str, str]:
    """A hash for each measured file or folder. It tells whether a result is stale, whatever became of its commit."""
    return {name: _digest(ROOT / name) for name in sorted(measured)}


def _digest(path: Path) -> str:
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    digest = hashlib.sha256()
    for file in files:
        parts = file.relative_to(ROOT).parts
        if file.is_file() and not {"__pycache__", "results"} & set(parts):
            digest.update(f"{'/'.join(parts)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def _code_files() -> list[Path]:
    laws = (ROOT / "parbank").rglob("*.json")  # of plans
    return sorted([ROOT / "pyproject.toml", *(ROOT / "parbank").rglob("*.py"), *laws, *HERE.rglob("*.py")])


def read_git() -> dict[str, Any] | None:
    """The commit and whether the code differs from it; None where git or the repository is missing."""
    try:
        commit = _run("git", "rev-parse", "HEAD").strip()
        changed = _run("git", "status", "--porcelain", "--", *CODE)
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": bool(changed.strip())}


def read_commit() -> dict[str, Any]:
    """What a result says of the code: `commit`, `dirty`, and `source`, which says how that is known."""
    found = read_git()
    if found is not None and not found["dirty"]:
        return {**found, "source": "git"}
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        stamp = None
    if found is not None and (stamp is None or stamp["code"] != code_digest()):
        return {**found, "source": "git"}
    if stamp is None:
        return {"commit": "unknown", "dirty": True, "source": "neither git nor benchmarks/STAMP.json"}
    if stamp["code"] != code_digest():
        return {"commit": stamp["commit"], "dirty": True, "source": "stamp, and the code has changed since"}
    return {"commit": stamp["commit"], "dirty": stamp["dirty"], "source": "stamp"}


def write_stamp() -> dict[str, Any]:
    found = read_git()
    if found is None:
        raise SystemExit("--stamp needs git and a repository: run it where the tree is copied from")
    stamp = {**found, "code": code_digest()}
    STAMP.write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")
    return stamp


def command_line() -> str:
    """As it was typed, without this machine's folders."""
    return shlex.join(["python", *map(without_folders, sys.argv)])


def without_folders(text: str) -> str:
    """Absolute paths lose their folders: inside the repository they become relative, elsewhere the name stays."""
    text = text.replace(f"{ROOT}/", "")
    return re.sub(r"(?:(?<=[=,:])|^)/(?:[^/,=:]+/)*", ".../", text)


def machine() -> dict[str, Any]:
    """Processor and memory; the GPU's name, driver and limits where there is one."""
    import torch

    found: dict[str, Any] = {"cpu": _cpu_name(), "cores": os.cpu_count(), "memory_GB": _memory_gigabytes()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "driver": _ask_gpu("driver_version"),
            "power_limit": _ask_gpu("power.limit"),
        }
    return found


def load() -> dict[str, Any]:
    """How busy the machine is: run before a benchmark adds its own work."""
    try:
        average = [round(x, 2) for x in os.getloadavg()]
    except OSError:
        average = []
    found: dict[str, Any] = {"load_average": average}
    if not shutil.which("nvidia-smi"):
        return found
    from parbank.gpu import other_processes

    return found | {
        "other_gpu_processes": list(map(str, other_processes())),
        "gpu_used_share": _ask_gpu("utilization.gpu"),
        "gpu_used_memory": _ask_gpu("memory.used"),
        "gpu_temperature": _ask_gpu("temperature.gpu"),
    }


@functools.cache
def load_at_start() -> dict[str, Any]:
    """The load when this was first asked for. Benchmarks ask before they begin: `harness.start` does."""
    return load()


@functools.cache
def code_at_start() -> tuple[dict[str, Any], str]:
    """The commit and the digest of the code when this was first asked for. `harness.start` asks before anything is measured:
    a run takes minutes, and commits may be made meanwhile."""
    return read_commit(), code_digest()


def read_code() -> dict[str, Any]:
    """What a result says of the code: the commit at the start, dirty if a file of the code has changed since."""
    commit, digest = code_at_start()
    if code_digest() == digest:
        return commit
    return commit | {"dirty": True, "source": f"{commit['source']}; the code changed while it was measured"}


@functools.cache
def describe() -> dict[str, Any]:
    """What every result of this process says: when and how it began, with which code, on which machine."""
    from parbank.ops import flash
    from parbank.runtime import versions

    now = datetime.datetime.now(datetime.UTC)
    return {
        **code_at_start()[0],
        "date": now.date().isoformat(),
        "time": now.strftime("%H:%M UTC"),
        "command": command_line(),
        "versions": {**versions(), "attention": "FlashAttention 3" if flash.AVAILABLE else "PyTorch's own"},
        "machine": machine(),
        "load": load_at_start(),
    }


def missing_packages() -> list[str]:
    """parbank's own dependencies that cannot be imported: a tree that was copied to another machine may run without them until,
    minutes later, a run packs its model."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    names = [re.match(r"[\w-]+", line)[0] for line in listed]  # type: ignore[index]
    return [name for name in names if importlib.util.find_spec(name) is None]


def hardware() -> str:
    """A word for folder names: `h200`, `a100-sxm4-80gb`, `cpu`."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name(0).lower().removeprefix("nvidia ").replace(" ", "-")


def folder_name(about: dict[str, Any]) -> str:
    """<date>-<hardware>-<commit>, with a mark where the code was dirty."""
    commit = about["commit"][:9] + ("-dirty" if about["dirty"] else "")
    return f"{about['date']}-{hardware()}-{commit}"


def python_path(root: Path = ROOT) -> str:
    """PYTHONPATH for a process that runs the code of a tree: the tree first, then what this process was given, such as packages
    on a machine that cannot install any."""
    return os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=30).stdout


def _ask_gpu(field: str) -> str:
    """One field of nvidia-smi for the first GPU; "unknown" where it does not tell."""
    try:
        return _run("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader").splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gigabytes() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (ValueError, OSError, AttributeError):
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stamp", action="store_true", help="write benchmarks/STAMP.json before the tree is copied")
    arguments = parser.parse_args()
    print(json.dumps(write_stamp() if arguments.stamp else read_commit(), indent=1))


if __name__ == "__main__":
    main()
