"""`parbank doctor`: checks this machine, and says what to do about each problem."""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from parbank.data.sources import SOURCES
from parbank.files import default_cache
from parbank.gpu import other_processes
from parbank.ops import backend, flash

Status = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. `remedy` is empty if nothing needs to be done."""

    subject: str
    status: Status
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Runs every check. A check that fails itself is reported, not raised."""
    checks: list[Callable[[], Finding]] = [
        _python,
        _torch,
        _gpu,
        _gpu_processes,
        _triton,
        _attention,
        _compiler,
        _memory,
        _disk,
        _cache,
        _extras,
    ]
    findings = []
    for check in checks:
        try:
            findings.append(check())
        except Exception as error:
            findings.append(Finding(check.__name__.strip("_"), "note", f"could not be checked: {error}"))
    return findings


def _python() -> Finding:
    return Finding(
        "Python", "ok", f"{platform.python_version()} on {platform.platform(terse=True)} ({platform.machine()})"
    )


def _torch() -> Finding:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    found = f"{torch.__version__} ({build}), threads: {torch.get_num_threads()}"
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11):
        return Finding("PyTorch", "bad", found, "parbank needs torch 2.11 or newer: pip install -U torch")
    return Finding("PyTorch", "ok", found)


def _gpu() -> Finding:
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        names = ", ".join(f"{d.name} {d.total_memory / 2**30:.0f} GiB (sm_{d.major}{d.minor})" for d in devices)
        driver = _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0] or "unknown"
        works = torch.ones(8, device="cuda").sum().item() == 8
        if not works:
            return Finding("GPU", "bad", f"{names}, but a sum on it is wrong", "reboot, or check the driver")
        return Finding("GPU", "ok", f"{names}; driver {driver}")
    if not torch.version.cuda:
        if shutil.which("nvidia-smi"):
            return Finding(
                "GPU", "bad", "there is a GPU driver, but this PyTorch is a CPU build", "install a CUDA build of torch"
            )
        return Finding(
            "GPU", "note", "none; training runs on the CPU", "small recipes work: parbank train --recipe demo"
        )
    return Finding("GPU", "bad", "this PyTorch has CUDA, but sees no GPU", "check nvidia-smi and CUDA_VISIBLE_DEVICES")


def _gpu_processes() -> Finding:
    if not shutil.which("nvidia-smi"):
        return Finding("GPU processes", "ok", "no GPU to hold")
    others = other_processes()
    if others:
        return Finding("GPU processes", "bad", "; ".join(map(str, others)), "end them before measuring or training")
    return Finding("GPU processes", "ok", "no other process holds the GPU")


def _triton() -> Finding:
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return Finding(
            "Triton", "note", "not installed: plain PyTorch is used instead", "on Linux with a GPU: pip install triton"
        )
    if not torch.cuda.is_available():
        return Finding("Triton", "note", f"{version}, idle without a GPU")
    if torch.cuda.get_device_capability() == flash.CAPABILITY and not backend.HAS_GLUON:
        tried = " or ".join(backend.GLUON_VERSIONS)
        return Finding("Triton", "note", f"{version}, without the MLP's kernels for Hopper", f"those take {tried}")
    return Finding("Triton", "ok", version)


def _attention() -> Finding:
    if flash.AVAILABLE:
        return Finding("Attention", "ok", "FlashAttention 3")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != flash.CAPABILITY:
        return Finding("Attention", "ok", "PyTorch's own")
    remedy = "with FlashAttention 3 a step takes 7% less: install flash-attn-3 as built for this PyTorch and CUDA"
    return Finding("Attention", "note", "PyTorch's own (cuDNN)", remedy)


def _compiler() -> Finding:
    found = next(
        (path for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (path := shutil.which(name))), None
    )
    if found:
        return Finding("C compiler", "ok", (_ask(found, "--version").splitlines() or [found])[0])
    if not torch.cuda.is_available():
        return Finding("C compiler", "note", "none found; long runs on a CPU are a quarter slower")
    return Finding(
        "C compiler", "bad", "none found", "torch.compile needs one: install gcc, or --set train.compile=false"
    )


def _memory() -> Finding:
    try:
        available, total = _free_memory()
    except (ValueError, OSError, KeyError):
        return Finding("Memory", "note", "unknown on this system")
    found = f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB free, {os.cpu_count()} cores"
    if torch.cuda.is_available():
        free, whole = torch.cuda.mem_get_info()
        found += f"; GPU {free / 2**30:.1f} of {whole / 2**30:.1f} GiB free"
    if available < 2**30:
        return Finding("Memory", "note", found, "PyTorch and the demo recipe take about 1 GiB: end something else")
    return Finding("Memory", "ok", found)


def _free_memory() -> tuple[int, int]:
    """Available bytes, and the total. Linux counts reclaimable caches; a container has less."""
    table = Path("/proc/meminfo")
    if not table.exists():
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    lines = (line.split() for line in table.read_text(encoding="ascii").splitlines())
    kilobytes = {fields[0].rstrip(":"): int(fields[1]) for fields in lines}
    available, total = 1024 * kilobytes["MemAvailable"], 1024 * kilobytes["MemTotal"]
    try:
        limit, used = (
            int(Path("/sys/fs/cgroup", name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current")
        )
    except (OSError, ValueError):  # no limit, or an older kernel
        return available, total
    return min(available, max(0, limit - used)), min(total, limit)


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    found = f"{free / 2**30:.1f} GiB free here"
    if free < 2 * 2**30:
        return Finding(
            "Disk", "note", found, "a golf checkpoint takes about 0.5 GiB: free some, or use --out elsewhere"
        )
    return Finding("Disk", "ok", found)


def _cache() -> Finding:
    folder = default_cache()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding(
            "Cache", "bad", f"{folder} cannot be written: {error.strerror}", "set PARBANK_CACHE to a folder that can"
        )
    return Finding("Cache", "ok", str(folder))


def _extras() -> Finding:
    uses = {
        "constriction": "packing and reading models",
        "safetensors": "export and import",
        "zstandard": ".zst files",
        "tensorboard": "training curves",
        "uvicorn": "parbank serve and watch",
    } | {source.package: f"--data {source.name}" for source in SOURCES.values() if source.package}
    missing = []
    for package, use in uses.items():
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            missing.append(f"{package} ({use})")
    if missing:
        return Finding("Extras", "note", "missing: " + ", ".join(missing), "pip install what you want to use")
    return Finding("Extras", "ok", ", ".join(uses))


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
