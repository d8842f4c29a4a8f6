"""Does a plan know how hard a text is? Measures of texts, made before any training, beside the scores of two small models.

    python benchmarks/texts.py --slice SPEC --train-bytes 5000000 --val-bytes 250000 --out .texts/NAME       for each text
    python benchmarks/plan_runs.py --grid texts --text NAME=.texts/NAME [--text ...] --out texts.jsonl
    python benchmarks/text_difficulty.py texts.jsonl --text NAME=.texts/NAME [--text ...] [--out DIR]

A plan takes the bits per byte of zlib on each document (`parbank.plan.texts`), to a power that its law has. Here this measure, and
others, stand beside what models of one shape and one number of training tokens score on the same texts. A good measure is
proportional to the score: `deviation` is that of log(score) - power * log(measure) over the texts, about the relative error of a
prediction. There is no lower bound but zero. Texts with less than LEAST scored bytes are left out.

`n-grams` predicts each byte by counts of the bytes before it, up to six, in the first 85% of a sample of two megabytes, and is
scored on the rest. Where a context was seen, its counts are mixed with the shorter context's prediction, with a weight that grows
with the number of different bytes that followed (Witten and Bell, 1991).
"""

import argparse
import bz2
import json
import lzma
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402

from parbank.plan.laws import NAMES, load_laws  # noqa: E402

MEASURED = ("benchmarks/text_difficulty.py", "benchmarks/plan_runs.py", "parbank/plan/texts.py")
LEAST = 20_000
SAMPLE_BYTES, DOCUMENT_BYTES, COUNTED = 2_000_000, 16_000, 0.85
SCORED_BYTES = 200_000  # of the rest of a sample, by n-grams
ORDERS = (1, 2, 3, 4, 5, 6)
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, as in Knuth's multiplicative hash

Bytes = np.ndarray
"""uint8 (n,)."""


def take_sample(folder: Path) -> list[bytes]:
    """The beginnings of documents in random order."""
    with lzma.open(folder / "train.jsonl.xz", "rt", encoding="utf-8") as lines:
        documents = [json.loads(line)["text"].encode() for line in lines]
    found: list[bytes] = []
    for index in np.random.default_rng(0).permutation(len(documents)):
        found.append(documents[index][:DOCUMENT_BYTES])
        if sum(map(len, found)) >= SAMPLE_BYTES:
            break
    return found


def measure(documents: list[bytes]) -> dict[str, float]:
    """Bits per byte by each measure."""
    whole = b"".join(documents)
    cut = max(1, int(COUNTED * len(documents)))
    counted, scored = (np.frombuffer(b"".join(part), np.uint8) for part in (documents[:cut], documents[cut:]))
    packed = {
        "zlib by document": sum(len(zlib.compress(document, 9)) for document in documents),
        "bz2": len(bz2.compress(whole, 9)),
        "xz": len(lzma.compress(whole, preset=6)),
    }
    found = {name: 8 * size / len(whole) for name, size in packed.items()}
    predicted = predict(counted, scored[:SCORED_BYTES])
    return found | {"n-grams": float(-np.log2(predicted).mean())}


def predict(counted: Bytes, scored: Bytes) -> np.ndarray:
    """The probability of each byte of `scored`, given the bytes before it."""
    probability = (np.bincount(counted, minlength=256)[scored] + 1.0) / (len(counted) + 256)
    for order in ORDERS:
        there, here = _hash(counted, order), _hash(scored, order)
        pairs, pair = there * np.uint64(257) + counted, here * np.uint64(257) + scored
        followers = np.unique(pairs, return_index=True)[1]  # one place of each different (context, byte)
        total, both = _count(there, here), _count(pairs, pair)
        weight = np.maximum(_count(there[followers], here), 1)
        mixed = (both + weight * probability) / (total + weight)
        probability = np.where(total > 0, mixed, probability)  # an unseen context says nothing
    return probability


def _hash(data: Bytes, order: int) -> np.ndarray:
    """A number for the `order` bytes before each byte."""
    found = np.zeros(len(data), np.uint64)
    for back in range(1, order + 1):
        before = np.zeros(len(data), np.uint64)
        before[back:] = data[:-back].astype(np.uint64) + np.uint64(1)
        found = found * _MIX + before
        found ^= found >> np.uint64(29)
    return found


def _count(keys: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """How often each number of `asked` is in `keys`."""
    different, counts = np.unique(keys, return_counts=True)
    place = np.minimum(np.searchsorted(different, asked), len(different) - 1)
    return np.where(different[place] == asked, counts[place], 0)


def compare(name: str, measures: list[float], scores: list[float], power: float) -> list[harness.Row]:
    """How well a measure tells the scores of a model."""
    x, y = np.log(measures), np.log(scores)
    return [
        harness.Row(f"{name}: correlation", "logarithms", float(np.corrcoef(x, y)[0, 1]), ""),
        harness.Row(f"{name}: best power", "logarithms", float(np.polyfit(x, y, 1)[0]), ""),
        harness.Row(f"{name}: deviation", f"power {power:.2g}", float((y - power * x).std(ddof=1)), "of the score"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="what plan_runs.py --grid texts wrote")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FOLDER", help="a text of the grid")
    arguments = harness.start(parser)
    runs: dict[str, list[dict[str, Any]]] = {}
    for line in arguments.runs.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        runs.setdefault(row["text"], []).append(row)
    rows, table = [], []
    for name, _, folder in (text.partition("=") for text in arguments.text):
        if min(row["scored_bytes"] for row in runs[name]) < LEAST:
            print(f"{name} is left out: fewer than {LEAST:,} bytes were scored", file=sys.stderr)
            continue
        began = time.process_time()
        found = measure(take_sample(Path(folder)))
        scores = {f"model of {row['params']:,} parameters": row["bpb"] for row in runs[name]}
        rows += [harness.Row(name, by, bpb, "bits/byte") for by, bpb in (found | scores).items()]
        table.append((found, [row["bpb"] for row in runs[name]]))
        print(f"{name}: measured in {time.process_time() - began:.1f} s of CPU", flush=True)
    law = float(np.exp(load_laws().log_parameters[NAMES.index("eta")]))  # the power that a plan takes
    for by in table[0][0]:
        power = law if by.startswith("zlib") else 1.0
        for index, run in enumerate(runs[arguments.text[0].partition("=")[0]]):
            measures, scores = [found[by] for found, _ in table], [bpb[index] for _, bpb in table]
            rows += compare(f"{by}, {run['tokens']:,} tokens", measures, scores, power)
    settings = harness.settings_of(arguments)
    path = harness.write("text_difficulty", rows, out=arguments.out, settings=settings, measured=MEASURED,
                         extra={"runs": [row for found in runs.values() for row in found]})  # fmt: skip
    print(path.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
