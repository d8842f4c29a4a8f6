"""Faults on purpose, in large numbers, to check the promises of docs/design/files.md and ranks.md.

    python benchmarks/faults.py --part kills       SIGKILL at random moments over train, resume, prepare and pack
    python benchmarks/faults.py --part artifacts   mutated artifacts, half of them with sound checksums
    python benchmarks/faults.py --part files       mutated checkpoints, manifests, tokenizers, configs and shards
    python benchmarks/faults.py --part writes      disk full, read-only, no descriptors, no memory at every write
    python benchmarks/faults.py --part pairs       two commands on one folder at once
    python benchmarks/faults.py --part ranks       killed ranks, and ranks that differ

`--count` shortens a part, `--seed` draws other cases. Case N of a seed is always the same. Every case is written to runs/faults
as it ends, so a run that was cut off goes on where it stopped. A case that fails is printed with its number: `--only N` repeats
it alone. The exit code is 1 if a case failed.

Bound: no case may fail. A mutated file of up to 1 MB may take 1 s of CPU time and 64 MB. Writes
benchmarks/results/faults_PART: cases and failures by kind, and the most that a case took.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ["OMP_NUM_THREADS"] = "1"  # a process with threads cannot be forked safely; and the models here are tiny

import harness  # noqa: E402
import provenance  # noqa: E402
from faults_cases import Outcome, Part  # noqa: E402

COUNTS = {"kills": 300, "artifacts": 20_000, "files": 5_000, "writes": 0, "pairs": 20, "ranks": 62}
"""How many cases make the claim; 0 for all there are. Of `ranks`, 12 are differences and 50 are kills."""
WORK = HERE.parent / "runs" / "faults"  # git ignores it


def run(part: Part, folder: Path, seed: int, count: int, only: int | None = None) -> list[Outcome]:
    """The outcomes of cases 0 to count - 1, those of an earlier run from the journal."""
    journal = folder / "journal.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    done = {outcome.index: outcome for outcome in read_journal(journal)} if only is None else {}
    shared = part.prepare(folder, seed)
    if part.total is not None:
        count = min(count or part.total(shared), part.total(shared))
    began = said = time.monotonic()
    with open(journal if only is None else os.devnull, "a", encoding="utf-8") as file:
        for index in [only] if only is not None else [i for i in range(count) if i not in done]:
            done[index] = outcome = part.attempt(shared, index)
            print(json.dumps(asdict(outcome)), file=file, flush=True)
            if outcome.fault:
                print(f"case {index}, {outcome.kind}: {outcome.fault}", flush=True)
            if time.monotonic() - said > 60:
                said = time.monotonic()
                print(f"{len(done):,} of {count:,} cases after {said - began:.0f} s", flush=True)
    return [done[index] for index in sorted(done) if only is not None or index < count]


def read_journal(path: Path) -> Iterable[Outcome]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            yield Outcome(**json.loads(line))
        except ValueError:  # the last line of a run that was killed
            continue


def summarise(outcomes: list[Outcome]) -> list[harness.Row]:
    """Counts by kind and by ending, and the most that a case took."""
    faults = [outcome for outcome in outcomes if outcome.fault]
    rows = [
        harness.Row("all cases", "cases", len(outcomes), "cases"),
        harness.Row("all cases", "failed", len(faults), "cases"),
    ]
    for kind, number in sorted(Counter(outcome.kind for outcome in outcomes).items()):
        failed = sum(outcome.kind == kind for outcome in faults)
        rows += [harness.Row(kind, "cases", number, "cases"), harness.Row(kind, "failed", failed, "cases")]
    for ending, number in sorted(Counter(outcome.ending for outcome in outcomes).items()):
        rows.append(harness.Row(f"ended: {ending}", "cases", number, "cases"))
    for name in ("seconds", "megabytes"):
        values = [getattr(outcome, name) for outcome in outcomes]
        if any(values):
            rows.append(harness.Row(f"most {name} of a case", "cases", max(values), name))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=COUNTS, required=True)
    parser.add_argument("--count", type=int, default=None, help="cases; those of the claim if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, default=None, metavar="N", help="run case N alone, and write no result")
    parser.add_argument(
        "--work", type=Path, default=WORK, help="folder for cases and for the record of those that ended"
    )
    arguments = harness.start(parser)
    part: Part = importlib.import_module(f"faults_{arguments.part}").PART
    count = COUNTS[arguments.part] if arguments.count is None else arguments.count
    folder = arguments.work.resolve() / f"{arguments.part}-{arguments.seed}-{provenance.code_digest()[:12]}"
    began = time.monotonic()
    outcomes = run(part, folder, arguments.seed, count, arguments.only)
    faults = [asdict(outcome) for outcome in outcomes if outcome.fault]
    if arguments.only is not None:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    else:
        rows = [*summarise(outcomes), harness.Row("this run", "seconds", time.monotonic() - began, "s")]
        path = harness.write(
            f"faults_{arguments.part}",
            rows,
            out=arguments.out,
            settings=harness.settings_of(arguments),
            measured=("parbank", "benchmarks/faults.py", *part.measured),
            seeds=(arguments.seed,),
            extra={"faults": faults[:100]},
        )
        print(path.with_suffix(".md").read_text())
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
