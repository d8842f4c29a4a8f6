"""The time of a command before and after its real work: `parbank train` to its first step, and `parbank eval`.

    python benchmarks/startup.py [--only train] [--recipe sprint] [--data SPEC] [--steps 20] [--set a.b=v]...
    python benchmarks/startup.py --only train --profile stacks.txt; python benchmarks/stacks.py --show stacks.txt
    python benchmarks/startup.py --only eval --model ARTIFACT --data SPEC [--methods chunked,streaming,ttt,...] --claim startup_eval
    python benchmarks/startup.py --only eval --model runs/demo/model.pbk --claim startup_eval_cpu    (two CPU cores: 8 minutes)
    python benchmarks/startup.py --only eval --model ARTIFACT --data SPEC --claim startup_eval --before cf75d9b~1

Every command is a process of its own, as a user starts it, and runs twice. The first start finds PARBANK_CACHE empty: it
prepares the data, trains the tokenizer and compiles every kernel. The second finds what the first has left. On a GPU `train` has
a third start, "imported": an empty cache with nothing but the kernels of `warmup --export`, as on a fresh machine.
`eval` gets an empty cache for each method, so that no method finds another one's kernels. A method may have options, as in
`adaptive --lr 0.0003 --chunk 96 --set rows=256`: docs/design/adaptation.md calls that setting quick.

`--before COMMIT` unpacks the code of an earlier commit into a temporary folder and times the same `eval` commands there, as
providers of their own: all methods but `adaptive`, which is newer. `cf75d9b~1` is the last commit that scored through
torch.compile.

The parts of a training's setup, and of the time after its last step, are those of its summary.json. `imports` is the time from
the command to the start of the setup; with --recipe auto it contains the plan. `saving, exit` is the rest of the command: the
last checkpoint, and the end of the process. The parts of an `eval` are the `times` that `--json` prints.

Bound: none; the second start is what a user meets most. Writes benchmarks/results/startup, or the folder of --claim.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402
import provenance  # noqa: E402
import torch  # noqa: E402

from parbank.artifact.container import read_artifact, write_artifact  # noqa: E402
from parbank.model import ModelConfig  # noqa: E402

MEASURED = ("parbank", "benchmarks/startup.py")
STARTS = ("first start", "second start")
IMPORTED = "imported"
SUMS = ("whole command", "command to first step", "training", "after training")
"""Rows of a training that are sums of others, and the training itself."""
READY = "the clock starts now"
"""In the line that `parbank train` prints when setup ends."""
METHODS = "chunked,streaming,ttt,adaptive --rank 0,adaptive,adaptive --lr 0.0003 --chunk 96 --set rows=256"


def run(
    words: list[str], cache: Path, profile: Path | None = None, root: Path = HERE.parent
) -> tuple[float, list[tuple[float, str]]]:
    """Runs a command of the parbank in `root`; returns its seconds, and every line it printed with the seconds until then.
    `profile` gets the stacks of its threads."""
    # A user's own folders for compiled code would make the first start a warm one.
    hidden = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PARBANK_CACHE": str(cache), "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    environment["PYTHONPATH"] = provenance.python_path(root)
    began, lines = time.perf_counter(), []
    # -P: `root` is on the path, and the current folder must not come before it. Paths such as that of --data start there.
    sampled = ["-P", "-m", "parbank"] if profile is None else [str(HERE / "stacks.py"), str(profile.resolve())]
    command = [sys.executable, *sampled, *words]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **streams) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.perf_counter() - began, line.rstrip()))
            print(f"{lines[-1][0]:8.2f} s  {lines[-1][1]}", flush=True)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"parbank {' '.join(words)} failed with {process.returncode}: see its output above")
    return seconds, lines


def train_rows(
    start: str, seconds: float, lines: list[tuple[float, str]], summary: dict[str, Any]
) -> list[harness.Row]:
    """One start of `parbank train`, by part."""
    ready = next((moment for moment, line in lines if READY in line), None)
    if ready is None:
        raise SystemExit(f"parbank train printed no line with {READY!r}: without it nothing says when setup ended")
    after = seconds - ready - summary["train_seconds"]
    parts = {
        "whole command": seconds,
        "command to first step": ready,
        "imports": ready - summary["setup_seconds"],
        **summary["setup_parts"],
        "training": summary["train_seconds"],
        "after training": after,
        **{f"after training: {part}": value for part, value in summary["finish_parts"].items()},
        "after training: saving, exit": after - summary["finish_seconds"],
    }
    note = f"compiled code: {summary['compile_cache']}"
    return [
        harness.Row(f"train: {part}", start, value, "s", note=note if part == "warm-up" else "")
        for part, value in parts.items()
    ]


def carry_kernels(words: list[str], archive: Path, old: Path, new: Path) -> list[harness.Row]:
    """Exports the kernels of one cache and imports them into another, as for a fresh machine."""
    exported, _ = run(["warmup", *words, "--export", str(archive)], old)
    imported, _ = run(["warmup", "--import", str(archive)], new)
    note = f"{archive.stat().st_size:,} bytes"
    return [
        harness.Row("warmup --export", IMPORTED, exported, "s", note=note),
        harness.Row("warmup --import", IMPORTED, imported, "s"),
    ]


def unpack(commit: str, folder: Path) -> Path:
    """The package as it was at a commit."""
    folder.mkdir()
    packed = subprocess.run(
        ["git", "archive", commit, "parbank"], cwd=HERE.parent, stdout=subprocess.PIPE, check=True
    ).stdout
    subprocess.run(["tar", "x"], cwd=folder, input=packed, check=True)
    return folder


def strip_defaults(model: Path, copy: Path) -> Path:
    """A copy of an artifact that names no setting with its default value: an earlier version refuses settings that it does
    not know, whatever their values."""
    found = read_artifact(model)
    usual = json.loads(
        json.dumps({field.name: field.default for field in dataclasses.fields(ModelConfig)}, default=str)
    )
    own = {name: value for name, value in found.meta["model"].items() if value != usual.get(name)}
    write_artifact(copy, found.meta | {"model": own}, found.sections)
    return copy


def eval_rows(method: str, start: str, seconds: float, lines: list[tuple[float, str]]) -> list[harness.Row]:
    """One start of `parbank eval`: the command, and the scoring inside it. Earlier versions did not divide their time."""
    result = json.loads(next(line for _, line in lines if line.startswith("{")))
    times = result.get("times", {})
    parts = {name: value for name, value in times.items() if value >= 0.005}
    if times:
        parts["exit"] = seconds - sum(times.values())
    return [
        harness.Row(
            f"eval, {method}", start, seconds, "s", note=f"{result['bytes']:,} bytes, {result['tokens']:,} tokens"
        ),
        harness.Row(f"eval, {method}: scoring alone", start, result["seconds"], "s"),
        *(harness.Row(f"eval, {method}: {part}", start, value, "s") for part, value in parts.items()),
        harness.Row(f"eval, {method}: bits per byte", start, result["val_bpb"], "bits/byte"),
        *(
            harness.Row(f"eval, {method}: {name}", start, result["plain"][key], "bits/byte")
            for name, key in (("gain on streaming", "gain_bpb"), ("loss of the worst document", "worst_document_bpb"))
            if "plain" in result
        ),
    ]


def find_phases(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The seconds of each phase by start, from the rows of a result: parts that add up to the command, without training."""
    bars: dict[str, dict[str, float]] = {}
    for row in rows:
        case, start, value = row["case"], row["provider"], row["value"]
        if case.startswith("train: ") and case.removeprefix("train: ") not in SUMS:
            bars.setdefault(start, {})[case.removeprefix("train: ").removeprefix("after training: ")] = value
        elif case.startswith("eval, ") and ":" not in case:
            bars.setdefault(f"{case.removeprefix('eval, ')}, {start}", {})["loading and compiling"] = value
        elif case.endswith(": scoring alone"):
            bar = bars[f"{case.removeprefix('eval, ').removesuffix(': scoring alone')}, {start}"]
            bar["loading and compiling"] -= value
            bar["scoring"] = value
    return bars


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """One bar a start, stacked by phase."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = find_phases(rows)
    names = list(dict.fromkeys(name for bar in bars.values() for name in bar))
    figure, axes = pyplot.subplots(figsize=(10, 1.6 + 0.7 * len(bars)))
    for number, bar in enumerate(bars.values()):
        left = 0.0
        for index, name in enumerate(names):
            width = bar.get(name, 0.0)
            axes.barh(number, width, left=left, color=f"C{index}", label=name if number == 0 else None)
            if width > 0.04 * sum(bar.values()):
                axes.text(left + width / 2, number, f"{width:.1f}", ha="center", va="center", fontsize=8, color="white")
            left += width
        axes.text(left, number, f" {left:.1f} s", va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(sum(bar.values()) for bar in bars.values()))
    axes.set(xlabel="seconds", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=5, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.3))
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["train", "eval"], default=None, help="both if not given")
    parser.add_argument("--recipe", default="sprint")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--steps", type=int, default=20, help="of training; the setup is that of a whole run")
    parser.add_argument(
        "--minutes", type=float, default=None, help="instead of --steps: for --recipe auto, which plans"
    )
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="a.b=v")
    parser.add_argument("--model", type=Path, default=None, help="for eval; the one just trained if not given")
    parser.add_argument("--methods", default=METHODS, help="of eval, with their options, separated by commas")
    parser.add_argument("--before", metavar="COMMIT", help="also time eval by the code of this commit")
    parser.add_argument("--claim", default="startup", help="the result's folder")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="one more second start of train, sampled by stacks.py"
    )
    arguments = harness.start(parser)
    if arguments.only == "eval" and arguments.model is None:
        parser.error("--only eval trains no model: name one by --model")
    rows: list[harness.Row] = []

    def save() -> Path:
        """After every command, so that a run that is cut off leaves what it has."""
        options = harness.settings_of(arguments)
        return harness.write(arguments.claim, rows, out=arguments.out, settings=options, measured=MEASURED)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        recipe = ["--recipe", arguments.recipe]
        recipe += [part for setting in arguments.settings for part in ("--set", setting)]
        carries = torch.cuda.is_available() and arguments.recipe != "auto"  # a warm-up needs a recipe of fixed shape
        starts = [*STARTS, IMPORTED] if carries else [*STARTS]
        clock = arguments.minutes is not None
        budget = ["--minutes", str(arguments.minutes)] if clock else ["--steps", str(arguments.steps)]
        for start in starts if arguments.only != "eval" else ():
            out, cache = folder / start.replace(" ", "-"), folder / ("fresh" if start == IMPORTED else "cache")
            if start == IMPORTED:
                rows += carry_kernels(recipe, folder / "kernels.zip", folder / "cache", cache)
            words = ["train", *recipe, "--data", arguments.data, *budget, "--out", str(out)]
            seconds, lines = run(words, cache)
            rows += train_rows(start, seconds, lines, json.loads((out / "summary.json").read_text(encoding="utf-8")))
            save()
        if arguments.profile is not None and arguments.only != "eval":
            run([*words[:-1], str(folder / "profiled")], folder / "cache", arguments.profile)
        model = arguments.model or out / "model.pbk"
        versions = [("", HERE.parent, model)]
        if arguments.before is not None and arguments.only != "train":
            try:
                old = unpack(arguments.before, folder / "before")
            except (OSError, subprocess.CalledProcessError) as error:  # a copy of the tree without its history
                print(f"warning: {arguments.before} is not timed: {error}", file=sys.stderr)
            else:
                versions.append((f"{arguments.before}, ", old, strip_defaults(model, old / "model.pbk")))
        for number, method in enumerate(arguments.methods.split(",") if arguments.only != "train" else ()):
            for version, root, own in versions:
                for start in STARTS if not version or not method.startswith("adaptive") else ():
                    words = [
                        "eval",
                        str(own.resolve()),
                        "--data",
                        arguments.data,
                        "--method",
                        *method.split(),
                        "--json",
                    ]
                    rows += eval_rows(
                        method, version + start, *run(words, folder / f"cache-{number}{version}", root=root)
                    )
                    save()
    print(save().with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
