"""Tries every path of parbank on this machine once, in two to three minutes, so that faults are known before measurements begin.

    python benchmarks/smoke.py [--data SPEC] [--device cuda] [--only eval] [--runs runs/smoke] [--at-once 6]

Each check is a command of its own, and several run at the same time, so times mean nothing. A check that fails does not stop
the others, except checks that need its model. The end lists all checks with the last line of each failure; the exit code is the
number of failures. All but `train` use 200 kB of the standard library. Bound: no check may fail. Writes smoke.json in a new
folder of --runs, and no result.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from provenance import python_path  # noqa: E402

BYTES = 200_000
LIMIT = 150.0  # seconds of one check
MADE = "{runs}/auto/model.pbk"  # by the check `train`


@dataclass(frozen=True)
class Check:
    """A command of parbank, or several joined by `&&`."""

    words: str
    needs_model: bool = False
    gpu: bool = False
    """Whether only a GPU can run it."""


SPRINT = "train --recipe sprint --data {text} --device {device} --set budget.minutes=null --set budget.steps=12"
SMALL = " --set batch.batch_tokens=16384 --set batch.micro_batch_tokens=16384 --set model.layers=4 --set model.value_layers=[3]"
SCORE = "eval {model} --data {text} --device {device} --json --method "
CHECKS = {
    "doctor": Check("doctor"),
    "train": Check("train --data {data} --minutes {minutes} --max-bytes 4MB --device {device} --out {runs}/auto"),
    "plan": Check("plan --data {text} --minutes 1 --max-bytes 4MB --device {device} --json", needs_model=True),
    "chunked": Check(SCORE + "chunked --audit", needs_model=True),
    "sliding": Check(SCORE + "sliding --stride 64", needs_model=True),
    "streaming": Check(SCORE + "streaming --audit", needs_model=True),
    "ttt": Check(SCORE + "ttt", needs_model=True),
    "ttt low-rank": Check(SCORE + "ttt --adapter low-rank", needs_model=True),
    "adaptive": Check(SCORE + "adaptive --audit", needs_model=True),
    "sample": Check('sample {model} --prompt "The sea" --tokens 40 --device {device}', needs_model=True),
    "compress": Check(
        "compress {file} --model {model} -o {runs}/text.pbz --device {device} && "
        "decompress {runs}/text.pbz --model {model} -o {runs}/back --device {device}",
        needs_model=True,
    ),
    "resume": Check(
        SPRINT + SMALL + " --out {runs}/resume && train --resume --out {runs}/resume --set budget.steps=16 --device {device}",
        gpu=True,
    ),
    "study": Check("study run seeds --recipe nano --seeds 2 --data {text} --device {device} --out {runs}/study"),
    "documents": Check(SPRINT + SMALL + " --set model.isolate_documents=true --out {runs}/documents", gpu=True),
    "windows": Check(SPRINT + SMALL + " --set model.window=512 --set model.window_layers=[0,2] --out {runs}/windows", gpu=True),
    "dropout": Check(SPRINT + SMALL + " --set train.dropout=0.1 --set train.token_dropout=0.1 --out {runs}/dropout", gpu=True),
    "fp8": Check(SPRINT + SMALL + " --set train.fp8=mlp+head --out {runs}/fp8", gpu=True),
    "case operators": Check(SPRINT + SMALL + " --set tokenizer.case_operators=true --out {runs}/case", gpu=True),
    "validation": Check(SPRINT + SMALL + " --set train.validate_every=5steps --out {runs}/validation", gpu=True),
    "kernels": Check(
        "warmup --recipe sprint --device {device} --export {runs}/sprint.kernels && "
        "warmup --recipe sprint --device {device} --import {runs}/sprint.kernels",
        gpu=True,
    ),
}  # fmt: skip
FIRST = "train"
ON_A_CPU = Check("train --recipe nano --data {text} --device cpu --out {runs}/auto")
"""In place of the first."""


def cut_text(folder: Path) -> tuple[str, Path]:
    """The spec of a small text, and a file with its bytes: modules of the standard library."""
    documents, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if size < BYTES:
            documents.append(path.read_text(encoding="utf-8", errors="ignore")[:8000])
            size += len(documents[-1])
    for part, own in (("train", documents[::2]), ("val", documents[1::2])):
        lines = (json.dumps({"id": f"{part}-{number}", "text": document}) for number, document in enumerate(own))
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    file = folder / "text.txt"
    file.write_text("".join(documents), encoding="utf-8")
    return f"text:train={folder / 'train.jsonl'},val={folder / 'val.jsonl'}", file


def run(check: Check, values: dict[str, Any], limit: float = LIMIT) -> tuple[str, float]:
    """Nothing, or the last line of what went wrong; and the seconds."""
    began = time.monotonic()
    for part in check.words.split("&&"):
        words = [word.format(**values) for word in shlex.split(part)]
        command = [sys.executable, "-m", "parbank", *words]
        environment = os.environ | {"PYTHONPATH": python_path(), "COLUMNS": "200"}
        left = limit - (time.monotonic() - began)
        try:
            done = subprocess.run(
                command, cwd=HERE.parent, env=environment, capture_output=True, text=True, timeout=max(1.0, left), check=False
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"{words[0]}: not done after {limit:.0f} s", time.monotonic() - began
        if done.returncode:
            lines = [line for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
            print(f"--- {' '.join(words)}\n" + "\n".join(lines[-30:]), flush=True)
            return f"{words[0]}: {lines[-1] if lines else done.returncode}", time.monotonic() - began
    return "", time.monotonic() - began


def choose(only: list[str], device: str) -> dict[str, Check]:
    """The checks whose name or command begins as asked, and the one that makes the model."""
    asked = {
        name: check
        for name, check in CHECKS.items()
        if not only or name == FIRST or any(name.startswith(word) or check.words.startswith(word) for word in only)
    }
    if device != "cpu":
        return asked
    return {FIRST: ON_A_CPU} | {name: check for name, check in asked.items() if name != FIRST and not check.gpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=0.33, help="clock of the first model")
    parser.add_argument("--only", default="", help="names or commands, separated by commas")
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs" / "smoke")
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of one check")
    arguments = parser.parse_args()
    runs = arguments.runs.resolve() / time.strftime("%m%d-%H%M%S")  # what stands there stays
    runs.mkdir(parents=True)
    text, file = cut_text(runs)
    values = {
        "data": arguments.data, "text": text, "file": file, "runs": runs, "device": arguments.device,
        "minutes": arguments.minutes, "model": MADE.format(runs=runs),
    }  # fmt: skip
    checks = choose([word for word in arguments.only.split(",") if word], arguments.device)
    found: dict[str, tuple[str, float]] = {}
    with ThreadPoolExecutor(arguments.at_once) as pool:
        futures = {
            pool.submit(run, check, values, arguments.limit): name
            for name, check in sorted(checks.items(), key=lambda item: item[0] != FIRST)
            if not check.needs_model
        }
        made = next(future for future, name in futures.items() if name == FIRST)
        later = {name: check for name, check in checks.items() if check.needs_model}
        if made.result()[0]:
            found |= {name: ("left out: there is no model", 0.0) for name in later}
        else:
            futures |= {pool.submit(run, check, values, arguments.limit): name for name, check in later.items()}
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            print(f"{futures[future]}: {future.result()[0] or 'ok'}", flush=True)
    if (
        not found.get("compress", ("left out", 0.0))[0]
        and (runs / "back" / file.name).read_bytes() != file.read_bytes()
    ):
        found["compress"] = ("the file came back with other bytes", found["compress"][1])
    (runs / "smoke.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n" + "\n".join(f"{name:16} {seconds:6.1f} s  {fault or 'ok'}" for name, (fault, seconds) in found.items()))
    sys.exit(sum(bool(fault) for fault, _ in found.values()))


if __name__ == "__main__":
    main()
