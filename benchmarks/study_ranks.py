"""Whether short schedules rank changes as long ones do: the rank correlation of two studies over the arms that both have.

    python benchmarks/study_ranks.py SHORT LONG [--claim study_ranks] [--out DIR]

SHORT and LONG are folders of studies, or result.json files that benchmarks/studies.py has written. Arms are ranked by their
mean difference from the base at equal seeds. Bound: chance, the share of all orders of the arms that agree as well as these two
do. Writes benchmarks/results/study_ranks.
"""

import argparse
import json
import math
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402
from provenance import without_folders  # noqa: E402

from parbank.statistics import rank_correlation  # noqa: E402
from parbank.study.study import describe_budget  # noqa: E402
from parbank.training.config import read_config  # noqa: E402

MEASURED = ("parbank/statistics.py", "benchmarks/study_ranks.py")
FEWEST = 3  # arms
MOST = 8  # arms whose orders are all counted: 40,320


def read_study(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "result.json" if path.is_dir() else path).read_bytes())
    return found


def differences(study: dict[str, Any]) -> dict[str, float]:
    """The mean difference of every arm that has one."""
    return {name: arm["mean"] for name, arm in study["arms"].items() if arm["pairs"]}


def describe(study: dict[str, Any]) -> str:
    seeds = len(study["study"]["seeds"])
    return f"{describe_budget(read_config(study['study']['base']))}, {seeds} seed{'s' * (seeds > 1)}"


def chance_of(first: list[float], second: list[float]) -> float:
    """The share of all orders of `second` whose correlation with `first` is at least as high."""
    found = rank_correlation(first, second)
    orders = [rank_correlation(first, list(order)) for order in permutations(second)]
    return sum(value >= found - 1e-9 for value in orders) / len(orders)


def rows_of(short: dict[str, Any], long: dict[str, Any]) -> list[harness.Row]:
    found = [differences(short), differences(long)]
    both = [arm for arm in found[0] if arm in found[1]]
    if len(both) < FEWEST:
        sys.exit(f"the studies share {len(both)} arms with pairs of runs; a rank correlation needs {FEWEST}")
    values = [[one[arm] for arm in both] for one in found]
    names = [describe(short), describe(long)]
    if names[0] == names[1]:
        names = [f"first: {names[0]}", f"second: {names[1]}"]
    rows = [
        harness.Row(f"difference of {arm}", name, one[arm], "bits/byte")
        for arm in both
        for name, one in zip(names, found)
    ]
    correlation = rank_correlation(*values)
    if math.isnan(correlation):
        sys.exit("all arms of one study differ by the same amount from its base: they have no order")
    rows.append(harness.Row(f"rank correlation of {len(both)} arms (Spearman)", "both", correlation, ""))
    if len(both) <= MOST:
        rows.append(harness.Row("chance of a random order to agree as well", "both", 100 * chance_of(*values), "%"))
    return rows


def source_of(path: Path, study: dict[str, Any]) -> dict[str, Any]:
    """Where the numbers come from. A folder of a study has no commit of its own."""
    about = {name: study[name] for name in ("claim", "commit", "date") if name in study}
    devices = sorted({run["device"] for run in study["runs"].values() if "device" in run})
    return {"path": without_folders(str(path)), "name": study["study"]["name"], "devices": devices, **about}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("short", type=Path)
    parser.add_argument("long", type=Path)
    parser.add_argument("--claim", default="study_ranks", help="the result's folder")
    arguments = harness.start(parser)
    paths = (arguments.short, arguments.long)
    studies = [read_study(path) for path in paths]
    path = harness.write(
        arguments.claim,
        rows_of(*studies),
        out=arguments.out,
        settings=harness.settings_of(arguments),
        seeds=sorted({seed for study in studies for seed in study["study"]["seeds"]}),
        measured=MEASURED,
        extra={"sources": [source_of(path, study) for path, study in zip(paths, studies)]},
    )
    print(path.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
