"""The time of a run's page: `parbank report` as a command, and the share of `parbank train` that the page takes.

    python benchmarks/report.py [--recipe demo] [--minutes 3] [--data stdlib]
    python benchmarks/report.py --run RUN [--run RUN ...] [--study STUDY]
    python benchmarks/report.py --untrained VAL.jsonl.xz [--run RUN ...]

The first form trains, and times the whole command. The second form takes runs that have ended. The time of their command is
that of quality.py, or else the sum of setup, training and the time after it, without imports. The page's seconds are the two
parts of `finish_parts` in summary.json that only the page needs: `details for the page` (bits by document and token,
errors and cost by tensor, the second sample, the machine, details.json) and `page` (report.html). The entropy of tensors is
counted as packing.

The third form is for machines that cannot train a sprint. It makes a folder of a sprint's size with random weights (see
report_folder.py), and times its page. The page's share of training is not measured then: only some of its work is.

`parbank report` starts a new process for every repeat, imports included. The machine must be idle. Bound: none. Writes
benchmarks/results/report, or the folder of --claim.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402

MEASURED = ("parbank", "benchmarks/report.py", "benchmarks/report_folder.py")
PARTS = ("details for the page", "page")
REPEATS = 5


def run(*words: str) -> float:
    """The seconds of a command of parbank."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(HERE.parent), os.environ.get("PYTHONPATH", "")))}
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "parbank", *words], env=environment, check=True)
    return time.perf_counter() - began


def share_rows(name: str, summary: dict[str, Any], command: float | None = None) -> list[harness.Row]:
    """The page's share of a run. `command`: the seconds of the whole command; if None, those that the summary has."""
    known = sum(summary[part] for part in ("setup_seconds", "train_seconds", "finish_seconds"))
    whole, note = (known, "without imports") if command is None else (command, "")
    parts = summary["finish_parts"]
    rows = [harness.Row("train: whole command", name, whole, "s", note=note)]
    if not all(part in parts for part in PARTS):
        reason = "the run is older than these parts of its summary"
        return [*rows, harness.Row("train: the page's share", name, None, "%", note=reason)]
    rows += [harness.Row(f"train: {part}", name, parts[part], "s") for part in PARTS]
    seconds = sum(parts[part] for part in PARTS)
    return [*rows, harness.Row("train: the page's share", name, 100 * seconds / whole, "%")]


def report_rows(name: str, kind: str, folders: list[Path], repeats: int) -> list[harness.Row]:
    """`parbank report` of these folders: the median of its seconds, and the bytes of the page."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "page.html")
        seconds = [run("report", *map(str, folders), "-o", str(out)) for _ in range(repeats)]
        size = out.stat().st_size
    note = f"{min(seconds):.2f} to {max(seconds):.2f} s in {repeats} starts"
    return [
        harness.Row(f"report of {kind}", name, statistics.median(seconds), "s", note=note),
        harness.Row(f"size of the page of {kind}", name, float(size), "bytes"),
    ]


def train(arguments: argparse.Namespace, out: Path) -> list[harness.Row]:
    words = ["--recipe", arguments.recipe, "--data", arguments.data, "--minutes", str(arguments.minutes)]
    changes = [word for setting in arguments.settings for word in ("--set", setting)]
    seconds = run("train", *words, *changes, "--out", str(out))
    return share_rows(arguments.recipe, read_summary(out), seconds)


def make_untrained(text: Path, out: Path) -> list[harness.Row]:
    """A folder of a sprint's size, and the seconds of that part of its details which is the same code on every machine."""
    import report_folder

    made = report_folder.make_folder(out, text)
    return [harness.Row(f"details: {part}", out.name, seconds, "s") for part, seconds in made.seconds.items()]


def name_runs(folders: list[Path]) -> list[str]:
    """The recipe of each run; with the folder's name where a recipe comes twice."""
    recipes = [read_summary(folder)["recipe"] for folder in folders]
    pairs = zip(recipes, folders)
    return [f"{name}, {folder.name}" if recipes.count(name) > 1 else name for name, folder in pairs]


def read_command_seconds(folder: Path) -> float | None:
    """The seconds of the whole command, which quality.py leaves in the folder of a run."""
    path = folder / "command_seconds.json"
    return float(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def read_summary(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text(encoding="utf-8")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="a.b=v")
    parser.add_argument("--run", action="append", default=[], type=Path, dest="runs", help="a run that has ended")
    parser.add_argument("--study", action="append", default=[], type=Path, dest="studies")
    parser.add_argument("--untrained", type=Path, metavar="TEXT", help="a validation text: .jsonl or .jsonl.xz")
    parser.add_argument("--claim", default="report", help="the result's folder")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="starts of parbank report; the median counts")
    arguments = harness.start(parser)
    rows: list[harness.Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        runs: list[Path] = list(arguments.runs)
        names = name_runs(runs)
        for name, folder in zip(names, runs):
            rows += share_rows(name, read_summary(folder), read_command_seconds(folder))
        if arguments.untrained is not None:
            runs.append(Path(temporary, "a sprint's size, random weights"))
            names.append(runs[-1].name)
            rows += make_untrained(arguments.untrained, runs[-1])
        if not runs:
            runs.append(Path(temporary, arguments.recipe))
            names.append(arguments.recipe)
            rows += train(arguments, runs[0])
        for name, folder in zip(names, runs):
            rows += report_rows(name, "a run", [folder], arguments.repeats)
        two = [*runs, *runs][:2]  # a run beside itself takes as long as two runs
        rows += report_rows(names[0], "two runs", two, arguments.repeats)
        for folder in arguments.studies:
            rows += report_rows(folder.name, "a study", [folder], arguments.repeats)
    options = harness.settings_of(arguments)
    if arguments.untrained is not None or arguments.runs:  # nothing was trained
        options = {key: value for key, value in options.items() if key not in ("recipe", "data", "minutes", "settings")}
    path = harness.write(arguments.claim, rows, out=arguments.out, settings=options, measured=MEASURED)
    print(path.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
