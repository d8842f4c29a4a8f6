"""Runs the benchmarks behind the claims one after another, inside a time limit.

    python benchmarks/run_all.py --list
    python benchmarks/run_all.py --only sprint,peer_golf --data SPEC --minutes 9 --out DIR [--seed 7]

Each benchmark is a process of its own. Before one starts, its estimate must fit what is left of --minutes; one that does
not fit is left out, and the end says so. After each, everything written so far goes into DIR/results.tar.gz, so that a run
that is cut off leaves what it has. `sprint` also leaves its artifact there. `python benchmarks/claims.py --unpack FILE` puts
the results in their place and writes the texts; seeds that were run one by one become results of their own.

`quantisation` takes the weights that `sprint` has trained in the same call, or an earlier one on the same machine, and
`report_sprint` its folder. Benchmarks of scores take the artifact of --model, of `auto` or of `sprint`, the first that is there.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE)]

import provenance  # noqa: E402

WORK = ROOT / "runs"  # git ignores it


@dataclass(frozen=True)
class Benchmark:
    command: str
    """{data}, {seed}, {runs}, {run}, {auto} and {model} are filled in."""
    minutes: float
    """On one H200, with nothing compiled before."""
    about: str


BENCHMARKS = {
    "sprint": Benchmark(
        "quality.py --recipe sprint --data {data} --seeds {seed} --runs {runs}",
        3.5,
        "our recipe: 120 s of training, scored and packed",
    ),
    "peer_golf": Benchmark(
        "peers/golf_train.py --data {data} --seed {seed}",
        4.5,
        "the published recipe's own script on our tokens, with our windows and schedules",
    ),
    "quantisation": Benchmark(
        'quantisation.py {run} --data {data} --caps 16000000,8000000 --only "lzma at 16,solver at 16,solver at 8"',
        2.0,
        "bytes against bits per byte, at caps",
    ),
    "step": Benchmark("step.py --quick", 3.0, "forward + backward and optimizer section, beside the published recipe"),
    "optimizer": Benchmark(
        'optimizer.py --models golf "GPT-2 small"', 4.5, "ParallelMuon beside dion and torch.optim.Muon, two models"
    ),
    "optimizer_large": Benchmark(
        "optimizer.py --models 1.3B --only muon --quick --claim optimizer_large", 2.5, "the same, 1.3B parameters"
    ),
    "optimizer_loop": Benchmark(
        "optimizer_loop.py --quick",
        6.5,
        "a step after a real backward and zero_grad(), each provider in its own process",
    ),
    "optimizer_loop_large": Benchmark(
        "optimizer_loop.py --models 1.3B --quick --claim optimizer_loop_large", 7.0, "the same, 1.3B parameters"
    ),
    "newton_schulz_sizes": Benchmark(
        "optimizer_newton_schulz.py --quick", 3.0, "Newton-Schulz in effective TFLOP/s by size, beside public kernels"
    ),
    "newton_schulz": Benchmark(
        "ops.py --only newton_schulz --quick --claim newton_schulz",
        0.8,
        "Newton-Schulz over the golf banks, beside compiled PyTorch and dion's kernels",
    ),
    "convergence": Benchmark(
        "convergence.py", 5.0, "AdamW, torch.optim.Muon, dion and ParallelMuon on one small GPT, tuned, four seeds"
    ),
    "scoring": Benchmark(
        "scoring.py {model} --data {data} --segments 0",
        3.0,
        "every method's speed and score, beside the published protocols",
    ),
    "adaptation": Benchmark(
        "adaptation.py {model} --data {data}", 2.0, "what each ingredient of adaptive scores gains on streaming"
    ),
    "compression": Benchmark(
        "compression.py {model} --data {data} --bytes 4_000_000 --segments 256 512 1024",
        4.0,
        "size, score and speed of the compressor by segments, beside xz, zstd and brotli",
    ),
    "auto": Benchmark(
        "quality.py --recipe auto --minutes 2 --max-bytes 16000000 --set budget.count_code=true --streaming --data {data} "
        "--seeds {seed} --runs {auto}",
        4.2,
        "a plan of 120 s and 16 MB, chunked and streaming; one seed a call",
    ),
    "auto60": Benchmark(
        "quality.py --recipe auto --minutes 1 --max-bytes 16000000 --set budget.count_code=true --streaming --data {data} "
        "--seeds {seed} --runs {auto}-60 --claim auto60",
        3.2,
        "the same in 60 s",
    ),
    "ladder": Benchmark(
        "ladder.py --data {data} --seconds 530 --runs {auto}-ladder",
        9.0,
        "plans beside configs chosen by hand, over clocks and caps; again until no run is left",
    ),
    "texts_docs": Benchmark(
        "ladder.py --data text:train=.texts/debian-docs/train.jsonl.xz,val=.texts/debian-docs/val.jsonl.xz --holdout val "
        "--rungs 120x16 --only auto,sprint --seeds {seed} --runs {auto}-texts --claim texts_docs",
        7.0,
        "a plan beside sprint on Debian's documentation, which no law was fitted to; texts.py makes it",
    ),
    "texts_ja": Benchmark(
        "ladder.py --data text:train=.texts/manual-ja/train.jsonl.xz,val=.texts/manual-ja/val.jsonl.xz --holdout val "
        "--rungs 120x16 --only auto,sprint --seeds {seed} --runs {auto}-texts --claim texts_ja",
        7.0,
        "the same on Japanese manual pages",
    ),
    "startup_auto": Benchmark(
        "startup.py --only train --recipe auto --minutes 0.33 --data {data} --claim startup_auto",
        4.0,
        "parbank train with a plan by part: nothing cached, second start",
    ),
    "peer_autoresearch": Benchmark(
        "peers/autoresearch.py --data {data} --seed {seed}", 3.7, "karpathy/autoresearch's train.py on our tokens"
    ),
    "startup": Benchmark(
        "startup.py --only train --data {data}",
        4.0,
        "parbank train --recipe sprint by part: nothing cached, kernels imported, second start",
    ),
    "report_sprint": Benchmark(
        "report.py --run {run} --claim report_sprint",
        0.7,
        "the page of sprint's run: its share of train, and its seconds",
    ),
    "packing": Benchmark("packing.py", 0.7, "where the seconds of packing go, with the file's sha256"),
    "prepare": Benchmark("prepare.py --data {data}", 0.7, "MB/s of a preparation by part, and its memory"),
    "startup_eval": Benchmark(
        "startup.py --only eval --model {model} --data {data} --claim startup_eval --before cf75d9b~1",
        10.0,
        "parbank eval as a command, by method, first and second start, and by the code before start-up was shortened",
    ),
    "ops": Benchmark("ops.py --quick", 5.0, "every op beside PyTorch, eager and compiled"),
}


def trained(arguments: argparse.Namespace) -> Path:
    """The folder of sprint's run."""
    return _work(arguments) / "sprint" / str(arguments.seed)


def _work(arguments: argparse.Namespace) -> Path:
    """The folder of all runs: gpu_queue.py has its own."""
    found: Path = getattr(arguments, "work", WORK)
    return found


def artifact(arguments: argparse.Namespace) -> Path:
    """What is scored: the artifact of --model, else that of `auto` if it has run, else sprint's."""
    planned = _work(arguments) / "auto" / str(arguments.seed) / "model.pbk"
    return arguments.model or (planned if planned.exists() else trained(arguments) / "model.pbk")


def command_of(name: str, arguments: argparse.Namespace) -> list[str]:
    values = {
        "data": arguments.data,
        "seed": arguments.seed,
        "runs": _work(arguments) / "sprint",
        "auto": _work(arguments) / "auto",
        "run": trained(arguments),
        "model": artifact(arguments),
    }
    script, *words = shlex.split(BENCHMARKS[name].command)
    words = [word.format(**values) for word in words]
    return [sys.executable, str(HERE / script), *words, "--out", str(getattr(arguments, "results", WORK / "results"))]


def obstacle(name: str, arguments: argparse.Namespace, left: float) -> str:
    """Why a benchmark cannot run now; nothing where it can."""
    benchmark = BENCHMARKS[name]
    if 60 * benchmark.minutes > left:
        return f"it takes {60 * benchmark.minutes:.0f} s, and {left:.0f} s are left"
    if "{run}" in benchmark.command and not (trained(arguments) / "summary.json").exists():
        return f"{trained(arguments)} holds no finished run: run sprint first"
    if "{model}" in benchmark.command and not artifact(arguments).exists():
        return f"{artifact(arguments)} is missing: run auto or sprint first, or name it by --model"
    if (text := re.search(r"\.texts/([\w-]+)", benchmark.command)) and not (ROOT / text[0]).is_dir():
        return f"{text[0]} is missing: run python benchmarks/texts.py --only {text[1]}, which needs the network"
    return ""


def run(name: str, arguments: argparse.Namespace, left: float) -> str:
    """Runs one benchmark; returns what became of it."""
    command = command_of(name, arguments)
    print(f"\n=== {name}: {' '.join(command)}", flush=True)
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(timeout=left)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what it has started
        process.wait()
        return f"cut off after {time.monotonic() - began:.0f} s"
    return f"{'done' if code == 0 else f'failed with {code}'} after {time.monotonic() - began:.0f} s"


def save(arguments: argparse.Namespace) -> None:
    """Everything so far in one file: machines that lend a GPU may send only a few back."""
    if (WORK / "results").is_dir():
        with tarfile.open(arguments.out / "results.tar.gz", "w:gz") as archive:
            archive.add(WORK / "results", arcname=".")
    if (trained(arguments) / "model.pbk").exists():
        shutil.copy(trained(arguments) / "model.pbk", arguments.out / f"sprint-{arguments.seed}.pbk")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="what there is, with estimates")
    parser.add_argument("--only", default="", help="names separated by commas, run in this order; all if not given")
    parser.add_argument("--data", default="", help="the text for what trains and scores, as in parbank train --data")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=600.0, help="when to stop")
    parser.add_argument(
        "--model", type=Path, default=None, help="the artifact for scoring; auto's or sprint's if not given"
    )
    parser.add_argument("--out", type=Path, default=WORK, help="where results.tar.gz goes")
    arguments = parser.parse_args()
    if arguments.list:
        for name, benchmark in BENCHMARKS.items():
            print(f"{name:18} {benchmark.minutes:4.1f} min  {benchmark.about}")
        return
    names = [name for name in arguments.only.split(",") if name] or list(BENCHMARKS)
    if unknown := sorted(set(names) - set(BENCHMARKS)):
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    if readers := [name for name in names if "{data}" in BENCHMARKS[name].command and not arguments.data]:
        parser.error(f"--data SPEC is needed for {', '.join(readers)}")
    if missing := provenance.missing_packages():
        parser.error(
            f"{', '.join(missing)} cannot be imported: install parbank's dependencies, or add them to PYTHONPATH"
        )
    began = time.monotonic()
    ends: dict[str, str] = {}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        left = 60 * arguments.minutes - (time.monotonic() - began)
        reason = obstacle(name, arguments, left)
        ends[name] = f"left out: {reason}" if reason else run(name, arguments, left)
        save(arguments)
    print("\n" + "\n".join(f"{name:18} {end}" for name, end in ends.items()))
    if not all(end.startswith("done") for end in ends.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
