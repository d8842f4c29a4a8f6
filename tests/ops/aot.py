"""Compiles kernels ahead of time for GPUs that are not here, and reads what they take: registers, spills, shared memory.

`build` runs in processes of its own, because the tests' process interprets its kernels and Triton decides that when a
kernel is decorated.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


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
    """Compiles every job on all cores; an error names the job."""
    workers = min(os.cpu_count() or 1, len(jobs), 8)
    shares = [jobs[index::workers] for index in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        parts = list(pool.map(_build_share, shares))
    return [parts[index % workers][index // workers] for index in range(len(jobs))]


def _build_share(jobs: Sequence[Job]) -> list[Built]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{env.get('PYTHONPATH', '')}"
    run = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([asdict(job) for job in jobs]),
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"ahead-of-time compilation failed:\n{run.stdout[-2000:]}\n{run.stderr[-6000:]}")
    return [Built(**built) for built in json.loads(run.stdout.splitlines()[-1])]


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


def _main() -> None:
    results = []
    for values in json.load(sys.stdin):
        job = Job(**values)
        try:
            results.append(asdict(_compile(job)))
        except Exception as error:
            raise RuntimeError(f"{job} does not compile: {error}") from error
    print(json.dumps(results))


if __name__ == "__main__":
    _main()
