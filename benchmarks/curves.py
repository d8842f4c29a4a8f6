"""Kernels and plain PyTorch train alike: the losses of one recipe by both, beside the noise of the seed.

    python benchmarks/curves.py --recipe sprint --data text:train=A,val=B [--ways on,off] [--steps 200] [--seeds 0,1]
        [--together] [--set a.b=v]...

`on` is the recipe as it is: Triton ops and CUDA graphs. `off` is plain PyTorch, launch by launch. A seed fixes the initial
weights and the order of the data, so `on` and `off` of one seed differ by rounding alone, which training amplifies. Two seeds
differ in everything. `fp8` and `fp8+head` are `on` with the MLP, or MLP and head, in 8 bits: other mathematics, and the rows
show how far off. They are compiled, because the compiler fuses the rounding.

Bound: the difference between two seeds, which `on` minus `off` must stay well below. Writes benchmarks/results/curves: losses,
differences, validation scores and, with matplotlib, curves.png.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402

WAYS: dict[str, dict[str, Any]] = {
    "on": {"environment": {}, "settings": []},
    "off": {
        "environment": {"PARBANK_OPS": "reference"},
        "settings": ["train.cuda_graph=false", "train.compile=false"],
    },
    "fp8": {"environment": {}, "settings": ["train.fp8=mlp", "train.compile=true"]},
    "fp8+head": {"environment": {}, "settings": ["train.fp8=mlp+head", "train.compile=true"]},
}
# Every step's loss; and a quick packing, because the file is not the point.
SHARED = ["train.log_every=1", "train.checkpoint_minutes=0", "quant.method=rows"]
MEASURED = ("parbank/model", "parbank/ops", "parbank/optim", "parbank/training", "benchmarks/curves.py")
TAIL = 20  # steps over which the end of a curve is averaged: one step's loss is mostly that of its batch

Run = dict[str, Any]


def train(arguments: argparse.Namespace, way: str, seed: int, out: Path) -> Run:
    """One run in a process of its own, because an op's backend is chosen when parbank is imported."""
    chosen = WAYS[way]
    settings = [*SHARED, *arguments.settings, *chosen["settings"], *(arguments.off_settings if way == "off" else [])]
    command = [sys.executable, "-m", "parbank", "train", "--recipe", arguments.recipe, "--data", arguments.data]
    command += ["--seed", str(seed), "--steps", str(arguments.steps), "--out", str(out)]
    command += [part for setting in settings for part in ("--set", setting)]
    environment = {name: value for name, value in os.environ.items() if name != "PARBANK_OPS"} | chosen["environment"]
    subprocess.run(command, check=True, cwd=HERE.parent, env=environment)
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [row["loss"] for row in rows]
    if len(losses) != arguments.steps or None in losses:
        raise SystemExit(
            f"{way}, seed {seed}: {len(losses)} losses for {arguments.steps} steps, some not finite: {losses}"
        )
    kept = ("device", "val_bpb_before_packing", "tokens_per_second", "setup_seconds", "skipped_steps", "memory_bytes")
    return {"way": way, "seed": seed, "settings": settings, "losses": losses} | {name: summary[name] for name in kept}


def differences(a: Run, b: Run) -> list[float]:
    return [abs(x - y) for x, y in zip(a["losses"], b["losses"], strict=True)]


def pairs(runs: list[Run]) -> dict[str, list[float]]:
    """Name -> the differences step by step: first of the first way and each other at equal seed, then of two seeds in the
    same way."""
    found = {}
    for a, b in itertools.combinations(runs, 2):
        if a["seed"] == b["seed"] and a["way"] == runs[0]["way"]:
            found[f"{a['way']} - {b['way']}, seed {a['seed']}"] = differences(a, b)
    for a, b in itertools.combinations(runs, 2):
        if a["way"] == b["way"]:
            found[f"seed {a['seed']} - {b['seed']}, {a['way']}"] = differences(a, b)
    return found


def rows_of(runs: list[Run], together: bool = False) -> list[harness.Row]:
    rows = []
    for name, values in pairs(runs).items():
        rows.append(harness.Row("largest difference of one step's loss", name, max(values), "nats"))
        rows.append(harness.Row("mean difference of one step's loss", name, statistics.fmean(values), "nats"))
    for run in runs:
        name = f"{run['way']}, seed {run['seed']}"
        rows.append(
            harness.Row(f"mean loss of the last {TAIL} steps", name, statistics.fmean(run["losses"][-TAIL:]), "nats")
        )
        rows.append(harness.Row("validation", name, run["val_bpb_before_packing"], "bits/byte"))
        if not together:
            rows.append(harness.Row("speed", name, run["tokens_per_second"], "tokens/s"))
    return rows


def draw(runs: list[Run], recipe: str, path: Path) -> None:
    """The curves, and on a logarithmic axis what lies between them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.8))
    colours = {seed: f"C{n}" for n, seed in enumerate(dict.fromkeys(run["seed"] for run in runs))}
    others = dict.fromkeys(run["way"] for run in runs if run["way"] != runs[0]["way"])
    dashes = dict(zip(others, itertools.cycle(("--", ":", "-."))))
    for run in runs:
        # the dashes lie on the line where the ways agree
        style: dict[str, Any] = {"linewidth": 2.4, "alpha": 0.45}
        if run["way"] in dashes:
            style = {"linewidth": 1.0, "linestyle": dashes[run["way"]]}
        steps = range(1, len(run["losses"]) + 1)
        left.plot(steps, run["losses"], color=colours[run["seed"]], label=f"{run['way']}, seed {run['seed']}", **style)
    tints: dict[str, str] = {}  # one for all seeds of a pair of ways, grey for all pairs of seeds
    for name, values in pairs(runs).items():
        kind = "two seeds" if name.startswith("seed") else name.partition(",")[0]
        label = kind if kind not in tints else None
        tint = tints.setdefault(kind, "0.6" if kind == "two seeds" else f"C{2 + len(tints)}")
        # a difference of zero has no place on this axis: it leaves a gap
        shown = [value or float("nan") for value in values]
        right.plot(range(1, len(values) + 1), shown, linewidth=1.0, label=label, color=tint)
    left.set(xlabel="step", ylabel="training loss, nats per token", title=f"{recipe}: {runs[0]['device']}")
    right.set(xlabel="step", ylabel="difference of the losses, nats", yscale="log", title="two ways, beside two seeds")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="sprint")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ways", default="on,off", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="a.b=v", help="for every way")
    parser.add_argument(
        "--off-set", action="append", default=[], dest="off_settings", metavar="a.b=v",
        help="for off alone, e.g. batch.micro_batch_tokens=49152 where plain PyTorch does not fit the memory",
    )  # fmt: skip
    parser.add_argument(
        "--together", action="store_true", help="all runs at once: sooner done, but speeds mean nothing"
    )
    parser.add_argument("--claim", default="curves", help="the result's folder")
    arguments = harness.start(parser)
    ways = arguments.ways.split(",")
    if set(ways) - WAYS.keys():
        parser.error(f"--ways {arguments.ways}: there are {', '.join(WAYS)}")
    runs: list[Run] = []
    wanted = list(itertools.product(map(int, arguments.seeds.split(",")), ways))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(wanted) if arguments.together else 1) as pool:
        calls = [pool.submit(train, arguments, way, seed, Path(folder) / f"{way}-{seed}") for seed, way in wanted]
        for call in calls:
            runs.append(call.result())
            # after every run, so that a benchmark that is cut off still leaves what it has
            path = harness.write(
                arguments.claim,
                rows_of(runs, arguments.together),
                out=arguments.out,
                settings=harness.settings_of(arguments),
                seeds=list(dict.fromkeys(run["seed"] for run in runs)),
                measured=MEASURED,
                extra={"runs": runs},
            )
            if harness.can_draw():
                draw(runs, arguments.recipe, path.with_name("curves.png"))
    print(path.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
