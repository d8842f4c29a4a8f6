"""What entropy coding saves: the same integers as float16, under lzma and under the artifact's own coder.

    python benchmarks/coding.py [ARTIFACT_OR_CHECKPOINT] [--claim NAME] [--out DIR]

Without a model: synthetic weights of a golf model's shapes, heavy-tailed as trained ones are, with rows and columns of different
width. A checkpoint is quantised per row at the default bits and at 4 bits; an artifact keeps its own integers. Seconds are CPU
time of one core.

Bound: the empirical entropy of every tensor's integers. A coder that treats all weights of a tensor alike cannot beat it; ours
divides them into classes and can. Writes benchmarks/results/coding: bytes, bits per weight, and seconds of both directions.
"""

import argparse
import lzma
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402

from parbank.artifact.container import is_artifact, read_artifact  # noqa: E402
from parbank.artifact.contents import read_contents  # noqa: E402
from parbank.artifact.streams import encode_halves  # noqa: E402
from parbank.quant.coders.base import entropy_bits  # noqa: E402
from parbank.quant.config import QuantConfig  # noqa: E402
from parbank.quant.integers import (  # noqa: E402
    Quantised,
    quantise_rows,
)
from parbank.quant.roles import role  # noqa: E402
from parbank.quant.streams import decode_integers, encode_integers, encode_scales  # noqa: E402

MEASURED = ("parbank/quant", "benchmarks/coding.py")
Weights = dict[str, np.ndarray]


def golf_shapes() -> dict[str, tuple[int, int]]:
    shapes = {"token_embedding.weight": (1024, 512), "bigram.embedding.weight": (1536, 128)}
    for layer in range(11):
        for name, shape in (("query", (512, 512)), ("key", (256, 512)), ("value", (256, 512)), ("output", (512, 512))):
            shapes[f"blocks.{layer}.attention.{name}.weight"] = shape
        shapes[f"blocks.{layer}.mlp.up.weight"] = (1536, 512)
        shapes[f"blocks.{layer}.mlp.down.weight"] = (512, 1536)
    return shapes


def synthetic(spread: float = 0.2) -> Weights:
    """Student's t with 6 degrees; the logarithms of row and column widths have this standard deviation."""
    rng, weights = np.random.default_rng(0), {}
    for name, (rows, cols) in golf_shapes().items():
        widths = np.exp(spread * rng.standard_normal((rows, 1)) + spread * rng.standard_normal(cols))
        weights[name] = (0.02 * widths * rng.standard_t(6, (rows, cols))).astype(np.float32)
    return weights


def integers(weights: Weights, config: QuantConfig) -> dict[str, Quantised]:
    ranges = {"matrix": config.matrix_q, "embedding": config.embedding_q}
    roles = {name: role(name, w.shape) for name, w in weights.items()}
    kept = sorted((n for n in weights if roles[n] in ranges), key=lambda n: (ranges[roles[n]], n))
    return {n: quantise_rows(weights[n], ranges[roles[n]], config.clip_fractions, name=n) for n in kept}


def preset_9(tensors: list[Quantised]) -> int:
    """One byte to an integer, everything in one stream: how int6 + lzma is published."""
    symbols = b"".join((t.values.astype(np.int16) + t.q).astype(np.uint8).tobytes() for t in tensors)
    return len(lzma.compress(symbols, preset=9))


def measure(case: str, named: dict[str, Quantised], each: dict[str, dict[str, list[float]]]) -> list[harness.Row]:
    """The rows of one case; `each` gets the bits a weight of every tensor, as [coded, entropy]."""
    tensors = list(named.values())
    pairs, shapes = [(t.values, t.q) for t in tensors], [(*t.values.shape, t.q) for t in tensors]
    count = sum(t.values.size for t in tensors)
    bound = sum(entropy_bits(t.values) for t in tensors) / 8
    rows = [harness.Row(f"{case}: bytes", "float16", 2.0 * count, "bytes", bound)]
    seconds: list[harness.Row] = []

    def timed(provider: str, encode, decode=None) -> None:
        began = time.process_time()
        stream = encode()
        middle = time.process_time()
        size = stream if isinstance(stream, int) else len(stream)
        rows.append(harness.Row(f"{case}: bytes", provider, float(size), "bytes", bound))
        rows.append(harness.Row(f"{case}: bits a weight", provider, 8 * size / count, "bits", 8 * bound / count))
        seconds.append(harness.Row(f"{case}: encode", provider, middle - began, "s"))
        line = f"{case:34} {provider:12} {size:>12,} bytes, entropy {100 * (size / bound - 1):+.2f}%, encode {middle - began:.1f} s"
        if decode:
            began = time.process_time()
            back = decode(stream)
            seconds.append(harness.Row(f"{case}: decode", provider, time.process_time() - began, "s"))
            assert all(np.array_equal(found, t.values) for (found, _), t in zip(back, tensors))
            each[case] = {  # of the last that can say, which is ours
                name: [round(bits / t.values.size, 4), round(entropy_bits(t.values) / t.values.size, 4)]
                for (name, t), (_, bits) in zip(named.items(), back)
            }
            line += f", decode {seconds[-1].value:.1f} s"
        print(line, flush=True)

    def decode(stream: bytes):
        return decode_integers(stream, shapes, source="benchmark")

    timed("lzma 9", lambda: preset_9(tensors))
    timed("our lzma", lambda: encode_integers(pairs, "lzma"), decode)
    timed("ans", lambda: encode_integers(pairs, "ans"), decode)
    scales = [t.scales for t in tensors]
    old, new = len(encode_halves(np.concatenate([s.ravel() for s in scales]))), len(encode_scales(scales))
    rows += [harness.Row(f"{case}: scales", name, float(n), "bytes") for name, n in (("our lzma", old), ("ans", new))]
    return sorted(rows, key=lambda row: row.case) + sorted(seconds, key=lambda row: row.case)


def load(path: Path) -> dict[str, dict[str, Quantised]]:
    file = path / "model.pbk" if (path / "model.pbk").exists() else path
    if is_artifact(file):
        found = {s.spec.name: s.content for s in read_contents(read_artifact(file)) if isinstance(s.content, Quantised)}
        return {f"{file.name}, its own integers": dict(sorted(found.items(), key=lambda item: item[1].q))}
    from parbank.runtime import pick_device
    from parbank.training.load import load_trained

    model, _, config = load_trained(path, pick_device("cpu"))
    weights = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    name = f"{config.recipe} checkpoint"
    return cases(name, weights)


def cases(name: str, weights: Weights) -> dict[str, dict[str, Quantised]]:
    four = QuantConfig(matrix_bits=4, embedding_bits=6, clip_steps=1)
    return {f"{name}, 6 bits": integers(weights, QuantConfig()), f"{name}, 4 bits": integers(weights, four)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--claim", default="coding", help="the result's folder")
    arguments = harness.start(parser)
    if arguments.model:
        found = load(arguments.model)
    else:
        found = cases("golf shapes", synthetic())
    each: dict[str, dict[str, list[float]]] = {}
    rows = [row for case, tensors in found.items() for row in measure(case, tensors, each)]
    extra = {"bits a weight, coded and entropy, by tensor": each}
    settings = harness.settings_of(arguments)
    path = harness.write(arguments.claim, rows, out=arguments.out, settings=settings, measured=MEASURED, extra=extra)
    print("written:", path)


if __name__ == "__main__":
    main()
