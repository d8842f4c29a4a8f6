"""Searches launch configs on the GPU at hand and writes down what each one takes.

    python benchmarks/tune.py [--only symmetric,rms_norm] [--quick] [--out DIR]

What can be tuned is declared beside the benchmarks: an ops_*.py file may have a function `tunables()`. Kernels are
compiled first, by as many processes as there are cores, into Triton's cache; then this process times them one at a time,
in a CUDA graph of several calls, because that is how a step runs them. The winners go by hand into the tables of
parbank/ops: a table that changed itself could not be reviewed.
"""

import argparse
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402

from parbank.ops import configs  # noqa: E402
from parbank.ops.backend import use_backend  # noqa: E402

FINALISTS = 4  # of each case's candidates, timed again and longer


@dataclass(frozen=True)
class Tunable:
    """One op's table and what to try for it."""

    op: str
    """The name its table has in parbank.ops.configs."""
    candidates: Sequence[configs.Launch]
    cases: dict[str, Callable[[], Callable[[], Any]]]
    """Name -> a function that makes the inputs and returns the call to time."""
    calls: int = 10
    """How many calls one timed graph holds."""
    flops: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)
    """The work of each case, for its bound."""


def collect(only: Sequence[str]) -> list[Tunable]:
    found: list[Tunable] = []
    for file in sorted(HERE.glob("ops_*.py")):
        declared = getattr(importlib.import_module(file.stem), "tunables", None)
        found += declared() if declared else []
    return [tunable for tunable in found if not only or any(tunable.op.startswith(name) for name in only)]


def compile_share(only: Sequence[str], share: int, shares: int) -> dict[str, str]:
    """Runs every `shares`-th candidate once, for what that leaves in Triton's cache; returns what failed, and why.

    One process takes all cases of a candidate, since most of them are the same compiled kernel.
    """
    failed = {}
    for tunable in collect(only):
        calls: dict[str, Callable[[], Any]] = {}
        for launch in tunable.candidates[share::shares]:
            for case, build in tunable.cases.items():
                try:
                    calls[case] = calls.get(case) or build()
                    with use_backend("triton"), configs.force(tunable.op, launch):
                        calls[case]()
                    torch.cuda.synchronize()
                except Exception as error:
                    failed[_key(tunable, case, launch)] = f"{type(error).__name__}: {str(error)[:120]}"
    return failed


def _key(tunable: Tunable, case: str, launch: configs.Launch) -> str:
    return f"{tunable.op} {case} {describe(launch)}"


def describe(launch: configs.Launch) -> str:
    """A config in one word: its numbers in order, then the flags that are on."""
    sizes = "x".join(str(v) for v in launch.blocks.values() if not isinstance(v, bool))
    flags = [name.lower() for name, value in launch.blocks.items() if value is True]
    extra = [f"{name}={value}" for name, value in launch.options.items() if name != "launch_pdl"]
    return " ".join([sizes, f"w{launch.num_warps}", f"s{launch.num_stages}", *flags, *extra])


def compile_all(only: Sequence[str]) -> dict[str, str]:
    shares = min(14, os.cpu_count() or 1)  # each holds a CUDA context of half a gigabyte
    context = multiprocessing.get_context("spawn")
    failed: dict[str, str] = {}
    with ProcessPoolExecutor(shares, mp_context=context) as pool:
        for result in pool.map(compile_share, [only] * shares, range(shares), [shares] * shares):
            failed |= result
    return failed


def tune(tunable: Tunable, failed: dict[str, str], quick: bool) -> tuple[list[harness.Row], dict[str, str]]:
    rows, best = [], {}
    for case, build in tunable.cases.items():
        call = build()
        name = f"{tunable.op} {case}"
        bound = harness.bound_ms(tunable.flops.get(case, 0.0), tunable.bytes.get(case, 0.0))
        launches = [launch for launch in tunable.candidates if _key(tunable, case, launch) not in failed]
        timed = sorted(((_time(tunable, launch, call, 5), launch) for launch in launches), key=lambda pair: pair[0])
        longer = [(_time(tunable, launch, call, 10 if quick else 40), launch) for _, launch in timed[:FINALISTS]]
        for value, launch in sorted(longer, key=lambda pair: pair[0]) + timed[FINALISTS:]:
            rows.append(harness.Row(name, describe(launch), value, "ms", bound))
        if longer:
            value, launch = min(longer, key=lambda pair: pair[0])
            best[name] = describe(launch)
            print(f"{name:44} {value:8.4f} ms  bound {bound:.4f}  {describe(launch)}", flush=True)
    return rows, best


def _time(tunable: Tunable, launch: configs.Launch, call: Callable[[], Any], repeats: int) -> float:
    """The time of one call; infinity where the config cannot run."""

    def several() -> None:
        for _ in range(tunable.calls):
            call()

    settings = harness.Settings(quick=True)
    settings.warmup, settings.repeats = 1, repeats
    try:
        with use_backend("triton"), configs.force(tunable.op, launch):
            return harness.measure(several, settings=settings, graph=True) / tunable.calls
    except Exception as error:
        print(f"{tunable.op} {describe(launch)}: {type(error).__name__}: {str(error)[:100]}", flush=True)
        return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated tables, by the beginning of their names")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/tune.py needs a CUDA device")
    only = tuple(filter(None, arguments.only.split(",")))
    start = time.monotonic()
    failed = compile_all(only)
    print(f"compiled in {time.monotonic() - start:.0f} s; {len(failed)} candidates cannot run", flush=True)
    torch.manual_seed(0)
    rows: list[harness.Row] = []
    best: dict[str, str] = {}
    for tunable in collect(only):
        more, winners = tune(tunable, failed, arguments.quick)
        rows, best = rows + more, best | winners
        write(rows, best, failed, arguments.out)
    print(f"written: {write(rows, best, failed, arguments.out)} after {time.monotonic() - start:.0f} s")


def write(rows: list[harness.Row], best: dict[str, str], failed: dict[str, str], out: Path) -> Path:
    """The JSON holds every candidate; the table only the best of each case, since the columns would be hundreds."""
    finite = [row for row in rows if row.value != float("inf")]
    path = harness.write("tune", finite, out=out, extra={"best": best, "failed": failed})
    lines = [f"# tune: {harness.hardware()}", "", "| case | config | ms | bound |", "| --- | --- | --- | --- |"]
    for case in dict.fromkeys(row.case for row in finite):
        for row in [row for row in finite if row.case == case][:FINALISTS]:
            lines.append(f"| {case} | {row.provider} | {row.value:.4f} | {row.bound:.4f} |")
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return path


if __name__ == "__main__":
    main()
