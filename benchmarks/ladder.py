"""Plans against configs chosen by hand, over clocks and caps: is `auto` near the best, and is its prediction right?

    python benchmarks/ladder.py --data text:CORPUS.jsonl.xz --seconds 540 [--runs DIR] [--out DIR]
    python benchmarks/ladder.py --data text:CORPUS.jsonl.xz --list
    python benchmarks/ladder.py --data text:train=A,val=B --holdout val --rungs 120x16 --only auto,sprint --seeds 0,1,2 \\
        --claim texts_manual_ja

A rung is a clock in seconds and a cap in megabytes, with the code counted. Each config of a rung is one `parbank train` in a
process of its own. Scores are chunked, of the packed file, on dev documents (choices are made here) unless --holdout val is given.
Configs but `sprint` are plans with their shape, vocabulary, batch and table fixed, so all other options are equal. The
prediction of each plan is that of `parbank plan` before its run, by the laws alone: as for a text that no plan was trained on,
whichever rungs came before. What earlier runs on the text made of it is `with_history`, beside it.

--seconds is a limit: a run that would not fit is left for the next call, and a run that --runs holds is not repeated. All 63 runs
take about 90 minutes on an H200; one rung has a clock of 300 s. Bound: the best config chosen by hand. Each call writes
benchmarks/results/ladder, or the folder of --claim, with all runs so far.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402

from parbank.study.ship import hold_out  # noqa: E402

MEASURED = ("parbank", "benchmarks/ladder.py")
PARBANK = (sys.executable, "-m", "parbank")
AUTO, SPRINT = "auto", "sprint"
# layers x width, vocabulary, batch, rows of bigrams; the four of 120 s come first. What good hands would try under 16 MB:
# around the shapes of docs/log/training.md, with smaller and larger ones, batches and tables.
SHAPES = {
    16: (
        (6, 512, 8192, 65_536, 16_384), (8, 512, 8192, 65_536, 16_384), (8, 640, 8192, 65_536, 16_384),
        (6, 384, 4096, 32_768, 16_384), (8, 384, 8192, 65_536, 16_384), (6, 512, 4096, 65_536, 16_384),
        (6, 512, 8192, 32_768, 16_384), (8, 512, 4096, 65_536, 16_384), (8, 512, 8192, 131_072, 16_384),
        (11, 512, 8192, 65_536, 16_384), (8, 512, 8192, 65_536, 49_152),
    ),
    4: (
        (6, 256, 4096, 32_768, 16_384), (6, 320, 4096, 65_536, 16_384), (4, 384, 4096, 65_536, 12_288),
        (4, 256, 4096, 32_768, 16_384), (6, 256, 2048, 32_768, 16_384), (6, 256, 4096, 65_536, 16_384),
        (6, 256, 8192, 32_768, 16_384), (4, 320, 4096, 32_768, 24_576), (6, 320, 4096, 32_768, 1536),
        (6, 384, 2048, 65_536, 1536), (3, 256, 4096, 16_384, 16_384),
    ),
}  # fmt: skip
FEW = 3
"""So many shapes, beside `sprint`, are tried at clocks of 120 s."""
RUNGS = ("20x4", "20x16", "60x4", "60x16", "120x4", "120x16", "300x16")
OVERHEAD = 75.0
"""Seconds of a run beside its clock: setup with nothing compiled, scoring, packing. benchmarks/results/auto has 73."""


@dataclass(frozen=True)
class Rung:
    """A clock and a cap."""

    seconds: float
    megabytes: float

    @classmethod
    def read(cls, text: str) -> "Rung":
        seconds, _, megabytes = text.partition("x")
        return cls(float(seconds), float(megabytes))

    @property
    def name(self) -> str:
        return f"{self.seconds:g} s, {self.megabytes:g} MB"

    def configs(self) -> dict[str, list[str]]:
        """Names and options of `parbank train`; the plan first, then `sprint`."""
        found = {AUTO: ["--recipe", "auto"], SPRINT: ["--recipe", "sprint"]}
        if self.seconds > 120:
            return {AUTO: found[AUTO]}
        shapes = SHAPES[min(SHAPES, key=lambda known: abs(known - self.megabytes))]
        for layers, width, vocab, batch, rows in shapes if self.seconds < 120 else shapes[:FEW]:
            settings = (
                f"model.layers={layers}",
                f"model.width={width}",
                f"model.vocab_size={vocab}",
                f"batch.batch_tokens={batch}",
                f"model.bigram_buckets={rows}",
            )
            name = f"{layers}x{width}-v{vocab}-b{batch}-r{rows}"
            found[name] = ["--recipe", "auto", *(word for setting in settings for word in ("--set", setting))]
        return found


@dataclass(frozen=True)
class Job:
    """One run."""

    rung: Rung
    config: str
    options: tuple[str, ...]
    seed: int

    @property
    def key(self) -> str:
        return f"{self.rung.seconds:g}s-{self.rung.megabytes:g}MB-{self.config}-s{self.seed}"

    def words(self, data: str) -> list[str]:
        """What `plan` and `train` are told."""
        clock = ["--minutes", f"{self.rung.seconds / 60:.6g}", "--max-bytes", f"{self.rung.megabytes * 1e6:.0f}"]
        return ["--data", data, *clock, "--set", "budget.count_code=true"]


def make_jobs(rungs: list[Rung], only: list[str], seeds: list[int]) -> list[Job]:
    """The plans first, then `sprint`, then the rest by rung: what matters most is there if time ends."""
    jobs = [
        Job(rung, name, tuple(options), seed)
        for rung in rungs
        for name, options in rung.configs().items()
        for seed in seeds
        if not only or name in only
    ]
    first = [AUTO, SPRINT]
    return sorted(jobs, key=lambda job: first.index(job.config) if job.config in first else len(first))


def predict(job: Job, data: str) -> dict[str, Any]:
    """What `parbank plan` expects by the laws alone, and with the runs on this text that this machine remembers."""
    settings = [word for word in job.options if word not in ("--recipe", "auto")]
    command = [*PARBANK, "plan", *job.words(data), *settings, "--json"]
    said = subprocess.run(command, check=True, cwd=HERE.parent, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(said)
    names = (
        "score",
        "deviation",
        "packing",
        "tokens",
        "tokens_per_second",
        "layers",
        "width",
        "vocab_size",
        "batch_tokens",
    )
    predicted = {name: found["expected"][name] for name in names} | {"notes": found["notes"]}
    if (known := found["known"]) is not None:
        predicted["with_history"] = known | {name: predicted[name] for name in ("score", "deviation", "packing")}
        predicted |= {"score": known["score"], "deviation": known["deviation"]}
        predicted["packing"] /= known["factor"]
    return predicted


def climb(job: Job, data: str, folder: Path) -> dict[str, Any]:
    """One run, with its prediction where it is a plan."""
    predicted = predict(job, data) if job.config != SPRINT else None
    out = folder / job.key
    more = ["--seed", str(job.seed), "--out", str(out)]
    command = [*PARBANK, "train", *job.options, *job.words(data), *more]
    if not (out / "summary.json").exists():
        shutil.rmtree(out, ignore_errors=True)  # a run that an earlier call cut off
        if code := subprocess.run(command, check=False, cwd=HERE.parent).returncode:
            return {"failed": f"parbank train ended with {code}", "predicted": predicted}
    summary = json.loads((out / "summary.json").read_text())
    if built := summary.get("recompilations", 0):
        return {"failed": f"{built} kernels or graphs were compiled while its clock ran", "predicted": predicted}
    names = (
        "val_bpb",
        "val_bpb_before_packing",
        "artifact_bytes",
        "steps",
        "tokens",
        "tokens_per_second",
        "epochs",
        "device",
    )
    found = {name: summary[name] for name in names if name in summary}
    config = json.loads((out / "config.json").read_text())
    return {"predicted": predicted, "model": config["model"], "batch": config["batch"], **found}


def rows_of(done: dict[Job, dict[str, Any]]) -> list[harness.Row]:
    """For each rung: the plan, the best of the hands, `sprint`, and the prediction."""
    rows = [
        harness.Row(job.key, job.config, None, note=found["failed"]) for job, found in done.items() if "failed" in found
    ]
    ended = {job: found for job, found in done.items() if "failed" not in found}
    for rung in dict.fromkeys(job.rung for job in ended):
        scores = {
            name: [found["val_bpb"] for job, found in ended.items() if (job.rung, job.config) == (rung, name)]
            for name in dict.fromkeys(job.config for job in ended if job.rung == rung)
        }
        means = {name: sum(values) / len(values) for name, values in scores.items()}
        rows += [
            harness.Row(rung.name, name, mean, "bits/byte") for name, mean in sorted(means.items(), key=lambda x: x[1])
        ]
        hands = {name: mean for name, mean in means.items() if name != AUTO}
        if AUTO not in means:
            continue
        if hands:
            best = min(hands, key=lambda name: hands[name])
            rows.append(
                harness.Row(f"{rung.name}: auto - best", AUTO, means[AUTO] - hands[best], "bits/byte", note=best)
            )
        plans = [found for job, found in ended.items() if (job.rung, job.config) == (rung, AUTO)]
        error = sum(plan["val_bpb"] - plan["predicted"]["score"] for plan in plans) / len(plans)
        rows.append(harness.Row(f"{rung.name}: measured - predicted", AUTO, error, "bits/byte"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--holdout", choices=["dev", "val"], default="dev", help="what is scored")
    parser.add_argument("--rungs", default=",".join(RUNGS), help="SECONDSxMEGABYTES, separated by commas")
    parser.add_argument("--only", default="", help="names of configs, separated by commas; all if not given")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--seconds", type=float, default=1e9, help="when to stop; the same command continues")
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs" / "ladder", help="finished runs, kept")
    parser.add_argument("--claim", default="ladder", help="the result's folder")
    parser.add_argument("--list", action="store_true", help="the runs that are left, with their commands")
    arguments = harness.start(parser)
    began, data = time.monotonic(), hold_out(arguments.data, arguments.holdout)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    rungs = [Rung.read(text) for text in arguments.rungs.split(",")]
    jobs = make_jobs(rungs, [name for name in arguments.only.split(",") if name], seeds)
    arguments.runs.mkdir(parents=True, exist_ok=True)
    kept = {job: arguments.runs / f"{arguments.claim}-{job.key}.json" for job in jobs}
    done = {job: json.loads(path.read_text()) for job, path in kept.items() if path.exists()}
    if arguments.list:
        for job in jobs:
            print(f"{'done' if job in done else 'open'}  {job.key}: {' '.join([*job.options, *job.words(data)])}")
        return
    for job in jobs:
        if job in done:
            continue
        if time.monotonic() - began + job.rung.seconds + OVERHEAD > arguments.seconds:
            continue  # a shorter one may fit
        done[job] = climb(job, data, arguments.runs)
        kept[job].write_text(json.dumps(done[job]))
        path = harness.write(
            arguments.claim,
            rows_of(done),
            out=arguments.out,
            settings=harness.settings_of(arguments),
            seeds=seeds,
            measured=MEASURED,
            extra={"runs": {one.key: found for one, found in done.items()}},
        )
        print(f"{job.key}: {done[job].get('val_bpb', 'failed')}; {len(done)} of {len(jobs)} runs; {path}", flush=True)
    if left := len(jobs) - len(done):
        sys.exit(f"{left} runs are left: give the same command again")


if __name__ == "__main__":
    main()
