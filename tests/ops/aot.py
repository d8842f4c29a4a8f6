"""Compiles kernels ahead of time for GPUs that are not here, and reads what they take: registers, spills, shared memory.

`build` runs in processes of its own, because the tests' process interprets its kernels and Triton decides that when a
kernel is decorated. They serve until the tests end: starting one takes longer than most compilations.
"""

import atexit
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MAX_STACK = 128
"""Bytes. No kernel may spill more than 32 registers on any card; the tests of the ops allow none where it matters."""


@dataclass(frozen=True)
class Job:
    """One kernel in one config for one architecture."""

    kernel: str
    """`package.module:function`."""
    signature: Mapping[str, str]
    """Every runtime argument and its Triton type (`*bf16`, `i32`, `fp32`, `tensordesc<bf16[1,128,64]>`)."""
    constexprs: Mapping[str, Any]
    capability: int = 90
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    aligned: Sequence[str] | None = None
    """Arguments known to be multiples of 16, as Triton would find at launch; None: all pointers and i32/i64."""


@dataclass(frozen=True)
class Built:
    registers: int
    stack: int
    """Bytes of stack a thread takes: Triton code has no arrays, so these are spilled registers."""
    shared: int


def build(jobs: Sequence[Job]) -> list[Built]:
    """Compiles every job on all cores that are this process's share; an error names the job."""
    share = (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    workers = [_worker(number) for number in range(max(1, min(share, len(jobs), 8)))]
    with ThreadPoolExecutor(len(workers)) as pool:
        parts = list(pool.map(_build_share, workers, [jobs[n :: len(workers)] for n in range(len(workers))]))
    found = [parts[index % len(workers)][index // len(workers)] for index in range(len(jobs))]
    for job, built in zip(jobs, found, strict=True):
        assert built.stack <= MAX_STACK, (job, built)
    return found


@cache
def _worker(number: int) -> "subprocess.Popen[str]":
    """A process that reads lists of jobs, one a line, and writes their results likewise. It ends with its input."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{env.get('PYTHONPATH', '')}"
    command, pipe = [sys.executable, __file__], subprocess.PIPE
    worker = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)
    atexit.register(worker.communicate)  # which closes its input
    return worker


def _build_share(worker: "subprocess.Popen[str]", jobs: Sequence[Job]) -> list[Built]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    print(json.dumps([asdict(job) for job in jobs]), file=worker.stdin, flush=True)
    results = json.loads(worker.stdout.readline() or '"the process has ended"')
    if isinstance(results, str):
        raise RuntimeError(f"ahead-of-time compilation failed: {results}")
    return [Built(**built) for built in results]


def _compile(job: Job) -> Built:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    module, name = job.kernel.split(":")
    kernel = getattr(importlib.import_module(module), name)
    signature = {n: job.signature.get(n, "constexpr") for n in kernel.arg_names}
    aligned = job.aligned
    if aligned is None:
        aligned = [n for n, kind in signature.items() if kind.startswith("*") or kind in ("i32", "i64")]
    attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, signature, constexprs=dict(job.constexprs), attrs=attributes)
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages, **job.options}
    built = triton.compile(source, target=GPUTarget("cuda", job.capability, 32), options=options)
    return Built(*_resources(built.asm["cubin"]), shared=built.metadata.shared)


def _resources(cubin: bytes) -> tuple[int, int]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text.stdout)
    assert found, text.stdout
    return int(found[1]), int(found[2])


def _build_here(jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, int]] | str:
    """What the jobs take, or which one does not compile, and why."""
    results = []
    for job in jobs:
        try:
            results.append(asdict(_compile(Job(**job))))
        except Exception as error:
            return f"{job} does not compile: {type(error).__name__}: {error}"
    return results


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(_build_here(json.loads(line))), flush=True)
