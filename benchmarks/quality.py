"""Trains one recipe with several seeds, each in a process of its own: scores, sizes, speed and seconds of `parbank train`.

    python benchmarks/quality.py --recipe sprint --data text:train=A,val=B --seeds 0,1,2 [--out DIR] [--runs DIR]
                                [--minutes M] [--max-bytes B] [--streaming] [--set a.b=v]...

A run that --runs already holds, finished, is not run again: a benchmark that was cut off goes on with the next seed. A run
that was cut off is begun anew. One that compiled something while its clock ran fails.

The result holds every run's summary and loss curve. `command` is the whole of `parbank train`: data, compilation, training,
scores and packing. --streaming scores each artifact once more, by `parbank eval --method streaming`. With --recipe auto, give
the budget by --minutes and --max-bytes. Bound: none; zlib, xz and zstd on the same text are rows beside it. Writes
benchmarks/results/RECIPE, or the folder of --claim.
"""

import argparse
import json
import shutil
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
from provenance import without_folders  # noqa: E402

MEASURED = ("parbank", "benchmarks/quality.py")
UNITS = {
    "val_bpb_before_packing": "bits/byte",
    "val_bpb": "bits/byte",
    "val_bpb_streaming": "bits/byte",
    "tokens_per_second": "tokens/s",
    "artifact_bytes": "bytes",
    "code_bytes": "bytes",
    "matrix_q": "levels each side",
    "steps": "steps",
    "train_seconds": "s",
    "setup_seconds": "s",
    "command_seconds": "s",
    "data_wait_share": "of the time",
    "memory_bytes": "bytes",
}


PARBANK = (sys.executable, "-m", "parbank")


def budget_of(arguments: argparse.Namespace) -> list[str]:
    """The options of `parbank train` that say how long and how large."""
    given = {"--minutes": arguments.minutes, "--max-bytes": arguments.max_bytes}
    return [str(word) for pair in given.items() if pair[1] is not None for word in pair]


def train(recipe: str, data: str, seed: int, out: Path, more: list[str]) -> dict[str, Any]:
    """One run, or what an earlier call left of it; its summary with the loss curve in it."""
    command = [*PARBANK, "train", "--recipe", recipe, "--data", data, "--seed", str(seed), "--out", str(out), *more]
    timing = out / "command_seconds.json"
    if not (out / "summary.json").exists():
        shutil.rmtree(out, ignore_errors=True)  # a run that was cut off: its clock would not be one piece
        began = time.perf_counter()
        subprocess.run(command, check=True, cwd=HERE.parent)
        timing.write_text(json.dumps(time.perf_counter() - began))
    summary = json.loads((out / "summary.json").read_text())
    if built := summary.get("recompilations", 0):
        raise SystemExit(f"seed {seed} is no result: {built} kernels or graphs were compiled while its clock ran")
    summary["command_seconds"] = json.loads(timing.read_text())
    summary["data_wait_share"] = summary["data_wait_seconds"] / summary["train_seconds"]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary["curve"] = [[row["seconds"], row["step"], row["loss"]] for row in rows]
    return summary


def score_streaming(out: Path) -> float:
    """Bits per byte of a run's artifact by the streaming method."""
    command = [*PARBANK, "eval", str(out), "--method", "streaming", "--json"]
    said = subprocess.run(command, check=True, cwd=HERE.parent, stdout=subprocess.PIPE, text=True).stdout
    found: float = json.loads(next(line for line in said.splitlines() if line.startswith("{")))["val_bpb"]
    return found


def without_paths(run: dict[str, Any]) -> dict[str, Any]:
    return {name: without_folders(value) if isinstance(value, str) else value for name, value in run.items()}


def rows_of(runs: list[dict[str, Any]]) -> list[harness.Row]:
    rows = []
    for name, unit in UNITS.items():
        if name not in runs[0]:
            continue
        for run in runs:
            rows.append(harness.Row(name, f"seed {run['seed']}", run[name], unit))
        rows.append(harness.Row(name, "median", statistics.median(run[name] for run in runs), unit))
    others = runs[0]["compressors_bpb"].items()
    return rows + [harness.Row(f"{name} on the same text", "median", bpb, "bits/byte") for name, bpb in others]


def draw(runs: list[dict[str, Any]], recipe: str, path: Path) -> None:
    """The loss against the clock, and the score beside the compressors'."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), width_ratios=(3, 2))
    for run in runs:
        seconds, _, losses = zip(*run["curve"])
        left.plot(seconds, losses, linewidth=1.2, label=f"seed {run['seed']}")
    left.set(xlabel="training seconds", ylabel="training loss, nats per token", title=f"{recipe}: {runs[0]['device']}")
    left.grid(alpha=0.3)
    left.legend(frameon=False)
    scores = {**runs[0]["compressors_bpb"], f"parbank {recipe}": statistics.median(r["val_bpb"] for r in runs)}
    bars = right.barh(list(scores), list(scores.values()), color=["#b8b8b8"] * (len(scores) - 1) + ["#2a6f97"])
    right.bar_label(bars, fmt="%.3f", padding=3)
    right.set(xlabel="bits per byte of the validation text, lower is better", xlim=(0, 1.15 * max(scores.values())))
    right.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="sprint")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--minutes", type=float, default=None)
    parser.add_argument("--max-bytes", default=None)
    parser.add_argument("--streaming", action="store_true", help="score by the streaming method too")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="a.b=v")
    parser.add_argument("--claim", default=None, help="the result's folder; the recipe's name if not given")
    parser.add_argument("--runs", type=Path, default=None, help="keep the runs' folders here; else they are deleted")
    arguments = harness.start(parser)
    more = budget_of(arguments) + [word for setting in arguments.settings for word in ("--set", setting)]
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in map(int, arguments.seeds.split(",")):
            out = (arguments.runs or Path(folder)) / str(seed)
            runs.append(train(arguments.recipe, arguments.data, seed, out, more))
            if arguments.streaming:
                runs[-1]["val_bpb_streaming"] = score_streaming(out)
            # after every seed, so that a run that is cut off still leaves what it has
            path = harness.write(
                arguments.claim or arguments.recipe,
                rows_of(runs),
                out=arguments.out,
                settings=harness.settings_of(arguments),
                seeds=[run["seed"] for run in runs],
                measured=MEASURED,
                extra={"runs": [without_paths(run) for run in runs]},
            )
            if harness.can_draw():
                draw(runs, arguments.recipe, path.with_name("curve.png"))
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
