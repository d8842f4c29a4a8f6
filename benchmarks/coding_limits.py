"""What a better model of the integers could still save, beside the 4% under lzma preset 9 that was the goal.

    python benchmarks/coding_limits.py CHECKPOINT [--claim NAME] [--out DIR]

The integers are those of coding.py at the default bits. Nothing is coded here: each idea counts the code lengths that it saves
over the artifact's own coder. z are the integers divided by the widths of their row and column, fitted to the least code length
of a Gaussian.

- side information: numbers of rows and columns and the models of the classes. No coder can save more by adapting instead.
- finer classes: eighths of an octave, four rounds of search.
- neighbours: 16 classes by the mean |z| of the 1, 8 or 64 integers to the left or above: six ways.
- scales: the width of a row guessed from its scale.
- largest: a row's scale follows from its largest weight, so the number of integers at the end of the range is known better than
  by chance.
- low rank: the mean of each weight from the strongest directions of z, whose factors are paid for.
- linear structure: of z only the singular values are known, all directions being equally likely. A matrix r x c, r <= c, with
  given ones fills a volume proportional to prod_{i<j} |s_i^2 - s_j^2| prod s_i^(c - r); the logarithm of this against that of
  noise of equal energy is what means, covariances and low ranks save together if the matrix itself must show them.
- covariance: shown by the matrices of the same kind in all other layers, as if they had all been read before.
- lag: each integer guessed from the one at the best fixed distance, of all distances along rows and columns.
- partners: every neuron's outgoing weights guessed from its incoming ones, queries from keys, outputs from values, and both also
  from the head that shares key and value; a coefficient for each row and guess, free of charge.
- start: the weights that the run began with, remade from its seed, with one coefficient a tensor.

`noise` is a check: Gaussian weights of the same widths, quantised and coded in the same way. Each row is itself a bound on what
its idea can save. Writes benchmarks/results/coding_limits, or the folder of --claim.
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import coding  # noqa: E402
import harness  # noqa: E402

from parbank.model import GPT  # noqa: E402
from parbank.quant.coders import division  # noqa: E402
from parbank.quant.coders.ans import coded_bits  # noqa: E402
from parbank.quant.coders.models import PRECISION, piece_bits  # noqa: E402
from parbank.quant.config import QuantConfig  # noqa: E402
from parbank.quant.integers import (  # noqa: E402
    Quantised,
    quantise_rows,
)
from parbank.runtime import pick_device, seed_everything  # noqa: E402
from parbank.training.load import load_trained  # noqa: E402

Floats = np.ndarray
NATS = 1 / math.log(2)  # bits in one
PARTNERS = (("mlp.down", "mlp.up"), ("attention.query", "attention.key"), ("attention.output", "attention.value"))
HEAD = 64  # rows of a head of the golf model, which this is for


def widths(values: np.ndarray) -> tuple[Floats, Floats]:
    """Of rows and columns: their products are the standard deviations of the likeliest Gaussians."""
    square = values.astype(np.float64) ** 2
    rows, cols = np.ones((values.shape[0], 1)), np.ones((1, values.shape[1]))
    for _ in range(6):
        rows = np.maximum((square / cols).mean(1, keepdims=True), 1e-6)
        cols = np.maximum((square / rows).mean(0, keepdims=True), 1e-6)
    return np.sqrt(rows), np.sqrt(cols)


def entropy(numbers: np.ndarray) -> float:
    counts = np.unique(numbers, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def explained(correlation: Floats, count: int) -> Floats:
    """Bits saved by a guess with this correlation, for so many Gaussian numbers."""
    return -count / 2 * np.log2(1 - np.square(correlation))


@contextmanager
def finer() -> Iterator[None]:
    old = division._STEPS, division._ROUNDS, division._WORTHWHILE
    division._STEPS, division._ROUNDS, division._WORTHWHILE = 8, 4, 0.0
    try:
        yield
    finally:
        division._STEPS, division._ROUNDS, division._WORTHWHILE = old


def neighbours(z: Floats) -> dict[str, float]:
    """What the spread of those already read says of the next; less what 15 more widths would find in noise."""
    found, start = {}, min(64, *(side // 2 for side in z.shape))
    for name, m in ((n, m) for n in ("left", "above") for m in (1, 8, 64) if m <= start):
        along = np.abs(z) if name == "left" else np.abs(z).T
        sums = np.cumsum(np.pad(along, ((0, 0), (1, 0))), axis=1)
        context = np.zeros_like(along)
        context[:, m:] = sums[:, m:-1] - sums[:, : -m - 1]
        context = (context if name == "left" else context.T)[start:, start:].ravel()
        square = np.square(z[start:, start:]).ravel()
        place = np.searchsorted(np.quantile(context, np.arange(1, 16) / 16), context)
        counts = np.bincount(place, minlength=16)
        spread = np.bincount(place, square, minlength=16)[counts > 0] / counts[counts > 0]
        saved = -(counts[counts > 0] * np.log2(spread / square.mean())).sum() / 2 - 15 * NATS / 2
        found[f"{name} {m}"] = saved * z.size / square.size
    return found


def from_scales(scales: np.ndarray, rows: Floats) -> float:
    a, b = np.log(np.maximum(scales[:, 0].astype(np.float64), 1e-8)), np.log(rows[:, 0])
    return float(explained(np.corrcoef(a, b)[0, 1], len(a))) if a.std() and b.std() else 0.0


def largest(values: np.ndarray, q: int, found: division.Division) -> float:
    """How many +-q each row has, under a histogram of these counts rather than under the classes' own frequencies."""
    chances = np.array([(w[0] + w[-1] + 2) / (1 << PRECISION) for w in found.weights])
    classes = division.find_classes(found.rows, found.cols)[found.rows[:, None] + found.cols[None, :]]
    rates, counts = chances[classes].sum(1), (np.abs(values.astype(np.int16)) == q).sum(1)
    factorials = np.array([math.lgamma(k + 1) for k in counts])
    return float((rates - counts * np.log(rates) + factorials).sum()) * NATS - entropy(counts)


def low_rank(values: np.ndarray, q: int, rows: Floats, cols: Floats, coded: float) -> float:
    """Means rounded to whole numbers and taken away modulo 2q + 1: the residual is coded as the integers were.

    A factor's numbers are rounded to the error that the noise leaves them, and singular values shrunk to what is left of
    them without the noise.
    """
    left, s, right = np.linalg.svd(values / rows / cols, full_matrices=False)
    small, large = sorted(values.shape)
    y = s / np.sqrt(large)
    clean = np.sqrt(np.maximum((y * y - small / large - 1) ** 2 - 4 * small / large, 0)) / y * np.sqrt(large)
    strong = int(np.argmin(clean > 0)) if (clean <= 0).any() else len(clean)
    best = 0.0
    for rank in (r for r in (1, 2, 4, 8, 16, 32) if r < 2 * strong):
        k = min(rank, strong)
        a, b = np.rint(left[:, :k] * clean[:k]), np.rint(right[:k] * clean[:k, None])
        factors = sum(entropy(a[:, i]) + entropy(b[i]) + 60 for i in range(k))  # 60: models and the step of each pair
        mean = np.clip(np.rint(a / clean[:k] @ b * rows * cols), -q, q).astype(np.int64)
        rest = ((values.astype(np.int64) - mean + q) % (2 * q + 1) - q).astype(np.int8)
        best = max(best, coded - coded_bits(rest, q) - factors)
    return best


def log_volume(z: Floats) -> float:
    s = np.linalg.svd(z / np.sqrt(np.square(z).mean()), compute_uv=False)
    s = np.maximum(s, 1e-9)
    first, second = np.triu_indices(len(s), 1)
    gaps = np.maximum(np.abs(s[first] ** 2 - s[second] ** 2), 1e-12)
    return float(np.log(gaps).sum() + abs(z.shape[0] - z.shape[1]) * np.log(s).sum())


def covariance(z: dict[str, Floats], name: str) -> float:
    """Vectors of the residual stream: rows of what reads it, columns of what writes it."""

    def vectors(n: str) -> Floats:
        return z[n].T if kind(n) in ("output", "down") else z[n]

    others = [vectors(n) for n in z if n != name and kind(n) == kind(name) and n.startswith("blocks.")]
    if not name.startswith("blocks.") or not others:
        return 0.0
    own, count = vectors(name), sum(map(len, others))
    shown, product, saved = sum(o.T @ o for o in others) / count, own.T @ own, 0.0
    for trust in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7):  # the best of them, as if it were known
        guess = trust * shown + (1 - trust) * np.eye(len(shown))
        nats = np.trace(product) - np.trace(np.linalg.solve(guess, product)) - len(own) * np.linalg.slogdet(guess)[1]
        saved = max(saved, nats / 2 * NATS)
    return saved


def lag(z: Floats) -> float:
    power = np.square(np.abs(np.fft.rfft2(z)))
    power[0, 0] = 0  # the mean over all of z
    correlations = np.fft.irfft2(power, s=z.shape) / z.size
    correlations[0, 0] = 0
    found = np.abs(correlations).max()
    return float(explained(found, z.size)) if found * np.sqrt(z.size) > 5.5 else 0.0  # else it is one of noise's own


def partners(z: dict[str, Floats], name: str) -> float:
    """Rows of a neuron against those of its partner; of a head, also against those of the head before that shares its key
    and value. A coefficient finds half a nat in noise."""
    pairs = [(own, name.replace(own, other)) for own, other in PARTNERS if own in name]
    if not pairs or pairs[0][1] not in z:
        return 0.0
    a, b = z[name] if "query" in pairs[0][0] else z[name].T, z[pairs[0][1]]
    shared = a.shape[0] // b.shape[0]
    if shared == 1:
        return _explained_by(a, [b])
    heads = a.reshape(-1, shared, HEAD, a.shape[1])
    saved = 0.0
    for group, partner in zip(heads, b.reshape(-1, HEAD, b.shape[1])):
        saved += sum(_explained_by(head, [partner, *group[max(i - 1, 0) : i]]) for i, head in enumerate(group))
    return saved


def _explained_by(rows: Floats, guesses: list[Floats]) -> float:
    stacked = np.stack(guesses, axis=1)  # (rows, guesses, cols)
    inner, outer = stacked @ stacked.transpose(0, 2, 1), stacked @ rows[:, :, None]
    energy = np.square(rows).sum(1)
    share = (outer * np.linalg.solve(inner, outer)).sum((1, 2)) / energy
    return float(explained(np.sqrt(share), rows.shape[1]).sum()) - rows.shape[0] * len(guesses) * NATS / 2


def start(guess: Floats, z: Floats) -> float:
    return float(explained((z * guess).mean() / np.sqrt(np.square(guess).mean()), z.size)) if guess.any() else 0.0


def kind(name: str) -> str:
    return name.split(".")[-2] if name.startswith("blocks.") else "embeddings"


class Limits:
    """The tensors of one model, and what they began as."""

    def __init__(self, named: dict[str, Quantised], began: dict[str, np.ndarray]) -> None:
        self.lzma, self.began = coding.preset_9(list(named.values())), began
        self.named = {name: t for name, t in named.items() if t.values.any()}
        self.widths = {name: widths(t.values) for name, t in self.named.items()}
        self.z = {name: self.named[name].values / rows / cols for name, (rows, cols) in self.widths.items()}
        self.rng = np.random.default_rng(0)
        self.volumes: dict[tuple[int, ...], float] = {}

    def ideas(self, name: str) -> dict[str, float]:
        """Bits of one tensor by idea."""
        t, z, (rows, cols) = self.named[name], self.z[name], self.widths[name]
        values, q, found = t.values, t.q, division.divide(t.values, t.q)
        if z.shape not in self.volumes:
            self.volumes[z.shape] = log_volume(self.rng.standard_normal(z.shape))
        with finer():
            fine = coded_bits(values, q)
        noise = (self.rng.standard_normal(z.shape) * rows * cols).astype(np.float32)
        return {
            "coded now": found.bits,
            "noise": coded_bits(quantise_rows(noise, q, QuantConfig().clip_fractions).values, q),
            "side information": piece_bits(found.pieces),
            "finer classes": found.bits - fine,
            **{f"neighbours: {place}": bits for place, bits in neighbours(z).items()},
            "scales": from_scales(t.scales, rows),
            "largest": largest(values, q, found),
            "low rank": low_rank(values, q, rows, cols, found.bits),
            "linear structure": (self.volumes[z.shape] - log_volume(z)) * NATS,
            "covariance": covariance(self.z, name),
            "lag": lag(z),
            "partners": partners(self.z, name),
            "start": start(self.began[name] / t.scales.astype(np.float64) / rows / cols, z),
        }

    def bytes(self) -> dict[str, dict[str, float]]:
        """By idea, then by kind of tensor."""
        saved: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for name in self.named:
            for idea, bits in self.ideas(name).items():
                saved[idea][kind(name)] += bits / 8
                saved[idea]["all"] += bits / 8
        saved["missing to 4% under lzma"]["all"] = saved["coded now"]["all"] - 0.96 * self.lzma
        return saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--claim", default="coding_limits", help="the result's folder")
    arguments = harness.start(parser)
    case, named = next(iter(coding.load(arguments.checkpoint).items()))
    _, _, config = load_trained(arguments.checkpoint, pick_device("cpu"))
    seed_everything(config.seed)
    began = {name: tensor.float().numpy() for name, tensor in GPT(config.model).state_dict().items()}
    rows = []
    for idea, kinds in Limits(named, began).bytes().items():
        print(f"{case}: {idea:32} {kinds['all']:>12,.0f} bytes", flush=True)
        rows += [harness.Row(f"{case}: {idea}", name, value, "bytes") for name, value in sorted(kinds.items())]
    measured = ("parbank/quant", "benchmarks/coding.py", "benchmarks/coding_limits.py")
    settings = harness.settings_of(arguments)
    print("written:", harness.write(arguments.claim, rows, out=arguments.out, settings=settings, measured=measured))


if __name__ == "__main__":
    main()
