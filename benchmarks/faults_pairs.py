"""Two commands on one folder at once: one works, and the other waits for it or ends with an error that names it. For faults.py."""

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults_cases import VOCABULARY, Outcome, Part, Reference, differ, make_reference, read_result, require
from faults_kills import make_half, read_files
from faults_processes import Ended, run, start, wait

from parbank.data.sources.fineweb import SHARDS_AT, TOKENIZER_AT

REFUSED = ("is in use by process", "already holds a run", "is not empty", "holds other files")


@dataclass(frozen=True)
class Pair:
    """One kind of command, started twice."""

    set_up: Callable[[Path], None]
    words: Callable[[Path, int], list[str]]
    """(folder, 0 or 1) -> the command."""
    result: Callable[[Path], Any]
    shared: bool = False
    """Whether both must succeed: the second waits, or both write the same file."""


@dataclass(frozen=True)
class Shared:
    folder: Path
    seed: int
    reference: Reference
    pairs: dict[str, Pair]
    expected: dict[str, Any]


def prepare(folder: Path, seed: int) -> Shared:
    reference = make_reference(folder)
    make_half(folder, reference)

    def prepare_words(out: Path, number: int) -> list[str]:
        return ["data", "prepare", reference.spec, "--vocab", str(VOCABULARY), "--out", str(out / "shards")]

    def pack_words(out: Path, number: int) -> list[str]:
        return ["pack", str(reference.out), "--max-bytes", "40000", "--out", str(out / "small.pbk")]

    def fetch_words(out: Path, number: int) -> list[str]:
        return ["data", "fetch", "fineweb", "--source", str(out / "hub"), "--out", str(out / "fetched")]

    def make_hub(out: Path) -> None:
        prepared = next(reference.cache.glob("text-*"))
        for name, target in (
            ("tokenizer.model", TOKENIZER_AT),
            ("text_train_000000.bin", f"{SHARDS_AT}/fineweb_train_000000.bin"),
            ("text_val_000000.bin", f"{SHARDS_AT}/fineweb_val_000000.bin"),
        ):
            (out / "hub" / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(prepared / name, out / "hub" / target)

    def read_both(out: Path) -> Any:
        return [read_result(out / str(number)) for number in range(2)]

    pairs = {
        "train": Pair(lambda out: None, lambda out, number: reference.train(out), read_result),
        "resume": Pair(
            lambda out: shutil.copytree(folder / "half", out), lambda out, number: reference.resume(out), read_result
        ),
        "prepare": Pair(lambda out: out.mkdir(), prepare_words, read_files),
        "pack": Pair(lambda out: out.mkdir(), pack_words, read_files, shared=True),
        "two runs that prepare the same text": Pair(
            lambda out: out.mkdir(), lambda out, number: reference.train(out / str(number)), read_both, shared=True
        ),
        "fetch": Pair(make_hub, fetch_words, lambda out: hide_path(read_files(out), out), shared=True),
    }
    expected = {}
    for kind, pair in pairs.items():
        out = folder / f"undisturbed-{len(expected)}"
        shutil.rmtree(out, ignore_errors=True)
        pair.set_up(out)
        for number in range(2 if "two" in kind else 1):
            require(run(pair.words(out, number), folder / "undisturbed.log", cache=reference.cache))
        expected[kind] = pair.result(out)
        shutil.rmtree(out)
    return Shared(folder, seed, reference, pairs, expected)


def hide_path(files: dict[str, bytes], out: Path) -> dict[str, bytes]:
    """The record of a fetch names its source, which lies in the case's own folder."""
    return {name: data.replace(str(out).encode(), b"") for name, data in files.items()}


def attempt(shared: Shared, index: int) -> Outcome:
    draw = random.Random(f"{shared.seed} {index}")
    kind = list(shared.pairs)[index % len(shared.pairs)]
    pair, out = shared.pairs[kind], shared.folder / f"case-{index}"
    cache = shared.folder / f"cache-{index}" if "two" in kind else shared.reference.cache
    for _ in range(5):
        shutil.rmtree(out, ignore_errors=True)
        pair.set_up(out)
        ended = run_both(pair, out, shared, cache, draw.choice((0.0, 0.0, draw.uniform(0, 0.5))))
        if pair.shared or any(one.code for one in ended):
            break  # otherwise the first may have ended before a busy machine let the second begin, which is no case
    fault = judge(pair, ended)
    if not fault and pair.shared and "waiting for" in "".join(one.said for one in ended):
        ending = "both, the second after it had waited"
    else:
        ending = "both" if pair.shared else "one, and the other was refused"
    fault = fault or differ(pair.result(out), shared.expected[kind])
    if cache != shared.reference.cache:
        shutil.rmtree(cache, ignore_errors=True)
    shutil.rmtree(out)
    return Outcome(index, kind, "broken" if fault else ending, fault, seconds=max(one.seconds for one in ended))


def run_both(pair: Pair, out: Path, shared: Shared, cache: Path, pause: float) -> list[Ended]:
    logs, began, pids = [shared.folder / f"pair-{number}.log" for number in range(2)], time.monotonic(), []
    for number in range(2):
        if number:
            time.sleep(pause)
        pids.append(start(pair.words(out, number), logs[number], cache=cache))
    return [wait(pid, log, began) for pid, log in zip(pids, logs)]


def judge(pair: Pair, ended: list[Ended]) -> str:
    for one in ended:
        if "Traceback" in one.said or one.code not in (0, 2):
            return f"ended with {one.code}: {one.said[-1500:]}"
    failed = [one for one in ended if one.code]
    if len(failed) != (0 if pair.shared else 1):
        return f"{len(failed)} of the two failed: {[one.said[-700:] for one in ended]}"
    if failed and not any(text in failed[0].said for text in REFUSED):
        return f"the second was not told of the first: {failed[0].said[-700:]}"
    return ""


PART = Part(prepare, attempt, ("benchmarks/faults_pairs.py", "benchmarks/faults_cases.py"))
