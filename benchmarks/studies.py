"""Runs a study inside a time limit, and writes its table as a result of this project.

    python benchmarks/studies.py --claim study_published --seconds 540 [--out DIR] -- published-training --budget 30s
                                 --seeds 4 --data text:train=A,val=B --out runs/study-published

Everything after `--` goes to `parbank study run`, which must be told its folder by --out. After --seconds the study is
stopped as by Ctrl-C; the same command goes on where it stopped. The exit code is 1 while runs are left.
benchmarks/studies/QUEUE.md has the commands of the studies that wait for a GPU.

Bound: the base of the study, with an interval for each difference. Each call writes benchmarks/results/CLAIM with the runs that
have ended.
"""

import argparse
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402
from provenance import without_folders  # noqa: E402

from parbank.study.kinds import KINDS  # noqa: E402
from parbank.study.report import Report, make_report  # noqa: E402
from parbank.study.study import BASE  # noqa: E402

MEASURED = ("parbank", "benchmarks/studies.py")


def rows_of(report: Report) -> list[harness.Row]:
    """The table, number by number."""
    unit, rows = KINDS[report.study.kind].unit, []
    difference = report.unit or unit
    for name in (BASE, *(arm.name for arm in report.study.arms)):
        runs = report.runs(name)
        if not runs:
            continue
        values = [run["value"] for run in runs]
        rows.append(harness.Row("mean", name, report.mean(name), unit))
        if len(values) > 1:
            rows.append(harness.Row("standard deviation", name, statistics.stdev(values), unit))
        if "against" in runs[0]:
            replaced = statistics.fmean(run["against"] for run in runs)
            rows.append(harness.Row("mean of what it would replace", name, replaced, unit))
        if name != BASE and report.comparisons[name].pairs > 1:
            found, verdict = report.comparisons[name], report.verdict(name)
            rows.append(harness.Row("difference", name, found.mean, difference, note=verdict))
            rows += [harness.Row(*row, difference) for row in (("from", name, found.low), ("to", name, found.high))]
    return rows


def without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    return without_folders(value) if isinstance(value, str) else value


def main() -> None:
    own, given = sys.argv[1:], []
    if "--" in own:
        cut = own.index("--")
        own, given = own[:cut], own[cut + 1 :]
    if "--out" not in given:
        sys.exit("give the study and its folder after --, as in: -- seeds --budget 30s --out runs/study-seeds")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claim", required=True, help="the result's folder")
    parser.add_argument("--seconds", type=float, default=540)
    sys.argv[1:], whole = own, sys.argv[1:]
    arguments = harness.start(parser)
    sys.argv[1:] = whole  # the result names the whole command
    process = subprocess.Popen([sys.executable, "-m", "parbank", "study", "run", *given], cwd=HERE.parent)
    try:
        process.wait(arguments.seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait()
    if process.returncode == 2:
        sys.exit(
            "the study was refused, see above; nothing is written, since its folder may hold the runs of another study"
        )
    report = make_report(HERE.parent / given[given.index("--out") + 1])
    if not report.results:
        sys.exit("no run has ended: there is no result to write; the same command goes on")
    settings = harness.settings_of(arguments) | {"study": [without_folders(word) for word in given]}
    path = harness.write(
        arguments.claim,
        rows_of(report),
        out=arguments.out,
        settings=settings,
        seeds=report.study.seeds,
        measured=MEASURED,
        extra=without_paths(report.to_dict()),
    )
    page = path.with_suffix(".md")
    table = harness.wrap_prose(without_data_path(report))
    page.write_text(page.read_text(encoding="utf-8") + "\n" + table, encoding="utf-8")
    print("written:", path)
    if not report.is_complete:
        left = sum(state in ("waiting", "running") for state in report.states.values())
        sys.exit(f"{left} of {len(report.states)} runs are left: give the same command again")


def without_data_path(report: Report) -> str:
    return report.text().replace(report.study.base.data, without_folders(report.study.base.data))


if __name__ == "__main__":
    main()
