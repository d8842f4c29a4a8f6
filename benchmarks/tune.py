"""Searches launch configs on the GPU at hand and writes down what each one takes.

    python benchmarks/tune.py [--only symmetric,rms_norm] [--skip 1536] [--without tma] [--quick] [--out DIR]

What can be tuned is declared beside the benchmarks: an ops_*.py file may have a function `tunables()`. Kernels are
compiled first, by as many processes as there are cores, into Triton's cache. Then this process times them one at a time,
in a CUDA graph of several calls, because that is how a step runs them. The output of a candidate is compared with plain PyTorch,
or with that of the table's own config, which the tests compare with plain PyTorch. Put the winners by hand into the tables of
parbank/ops: a table that changed itself could not be reviewed.

Bound: that of the case in ops_*.py, where it has one. Writes benchmarks/results/tune.
"""

import argparse
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402

from parbank.ops import configs  # noqa: E402
from parbank.ops.backend import use_backend  # noqa: E402

TOLERANCE = (
    0.005  # relative error, or share of integers that differ, past which a candidate is wrong: bfloat16 has 0.004
)
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
    exact: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """What a case's call must give, from the same random numbers; without it, what the table's own config gives."""


@dataclass(frozen=True)
class Choice:
    """What to tune: ops by the beginning of their names, less the cases and candidates that have a word in theirs."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    without: str = ""


def collect(choice: Choice) -> list[Tunable]:
    found: list[Tunable] = []
    for file in sorted(HERE.glob("ops_*.py")):
        declared = getattr(importlib.import_module(file.stem), "tunables", None)
        found += declared() if declared else []
    found = [
        replace(
            tunable,
            candidates=[x for x in tunable.candidates if not choice.without or choice.without not in describe(x)],
            cases={name: build for name, build in tunable.cases.items() if not any(x in name for x in choice.skip)},
        )
        for tunable in found
        if not choice.only or any(tunable.op.startswith(name) for name in choice.only)
    ]
    return [tunable for tunable in found if tunable.cases]


def compile_share(choice: Choice, share: int, shares: int) -> dict[str, str]:
    """Runs every `shares`-th candidate once, for what that leaves in Triton's cache; returns what failed, and why.

    One process takes all cases of a candidate, since most of them are the same compiled kernel.
    """
    failed = {}
    for tunable in collect(choice):
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
    return " ".join([*filter(None, [sizes]), f"w{launch.num_warps}", f"s{launch.num_stages}", *flags, *extra])


def compile_all(choice: Choice) -> dict[str, str]:
    shares = min(14, os.cpu_count() or 1)  # each holds a CUDA context of half a gigabyte
    context = multiprocessing.get_context("spawn")
    failed: dict[str, str] = {}
    with ProcessPoolExecutor(shares, mp_context=context) as pool:
        for result in pool.map(compile_share, [choice] * shares, range(shares), [shares] * shares):
            failed |= result
    return failed


def tune(tunable: Tunable, failed: dict[str, str], quick: bool) -> tuple[list[harness.Row], dict[str, str]]:
    rows, best = [], {}
    for case, build in tunable.cases.items():
        torch.manual_seed(0)
        call = build()
        torch.manual_seed(0)
        with use_backend("triton"):
            expected = outputs(tunable.exact.get(case, call)())
        name = f"{tunable.op} {case}"
        bound = harness.bound_ms(tunable.flops.get(case, 0.0), tunable.bytes.get(case, 0.0))
        launches = []
        for launch in tunable.candidates:
            if (key := _key(tunable, case, launch)) not in failed:
                wrong = compare(tunable, launch, call, expected)
                if wrong:
                    failed[key] = wrong
                else:
                    launches.append(launch)
        timed = sorted(((_time(tunable, launch, call, 5), launch) for launch in launches), key=lambda pair: pair[0])
        longer = [(_time(tunable, launch, call, 10 if quick else 40), launch) for _, launch in timed[:FINALISTS]]
        for value, launch in sorted(longer, key=lambda pair: pair[0]) + timed[FINALISTS:]:
            rows.append(harness.Row(name, describe(launch), value, "ms", bound))
        if longer:
            value, launch = min(longer, key=lambda pair: pair[0])
            best[name] = describe(launch)
            print(f"{name:44} {value:8.4f} ms  bound {bound:.4f}  {describe(launch)}", flush=True)
            for row in [row for row in rows if row.case == name][1:]:
                print(f"{'':44} {row.value:8.4f} ms  {row.provider}", flush=True)
    return rows, best


def outputs(found: Any) -> list[torch.Tensor]:
    """Copies: a call may write into the same tensors again."""
    found = [found] if isinstance(found, torch.Tensor) else found or []
    return [tensor.clone() for tensor in found]


def compare(tunable: Tunable, launch: configs.Launch, call: Callable[[], Any], expected: list[torch.Tensor]) -> str:
    """What is wrong with a candidate's results, if anything: another order of sums moves a few last bits, no more."""
    try:
        with use_backend("triton"), configs.force(tunable.op, launch):
            found = outputs(call())
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            if a.is_floating_point():
                error = ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()
            else:
                error = (a != b).double().mean().item()
            if not error <= TOLERANCE:
                return f"wrong: output {index} is off by {error:.2g}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return ""


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
    parser.add_argument("--skip", default="", help="comma-separated words: leave out cases with one in their names")
    parser.add_argument("--without", default="", help="leave out candidates with this in their descriptions")
    parser.add_argument("--quick", action="store_true")
    arguments = harness.start(parser)
    if not torch.cuda.is_available():
        sys.exit("benchmarks/tune.py needs a CUDA device")
    only, skip = (tuple(filter(None, words.split(","))) for words in (arguments.only, arguments.skip))
    choice = Choice(only, skip, arguments.without)
    start = time.monotonic()
    failed = compile_all(choice)
    print(f"compiled in {time.monotonic() - start:.0f} s; {len(failed)} candidates cannot run", flush=True)
    torch.manual_seed(0)
    rows: list[harness.Row] = []
    best: dict[str, str] = {}
    for tunable in collect(choice):
        more, winners = tune(tunable, failed, arguments.quick)
        rows, best = rows + more, best | winners
        write(rows, best, failed, arguments)
    for key, reason in failed.items():
        print(f"failed: {key}: {reason}")
    print(f"written: {write(rows, best, failed, arguments)} after {time.monotonic() - start:.0f} s")


def write(rows: list[harness.Row], best: dict[str, str], failed: dict[str, str], arguments: argparse.Namespace) -> Path:
    """The JSON holds every candidate; the table only the best of each case, since the columns would be hundreds."""
    finite = [row for row in rows if row.value != float("inf")]
    path = harness.write(
        "tune",
        finite,
        out=arguments.out,
        settings=harness.settings_of(arguments),
        measured=("parbank/ops",),
        extra={"best": best, "failed": failed},
    )
    lines = [f"# tune: {harness.hardware()}", "", "| case | config | ms | bound |", "| --- | --- | --- | --- |"]
    for case in dict.fromkeys(row.case for row in finite):
        for row in [row for row in finite if row.case == case][:FINALISTS]:
            lines.append(f"| {case} | {row.provider} | {row.value:.4f} | {row.bound:.4f} |")
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return path


if __name__ == "__main__":
    main()
