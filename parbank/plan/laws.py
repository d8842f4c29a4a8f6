"""The laws that predict a score, in bits per byte, before training.

    bpb = (h / 2)^eta * (E + A / N^alpha + B / D^beta * (1 + O x) + C * V / T + G / (1 + r / r0))  +  packing
    N = matrices * (V / 1024)^nu                  millions of parameters; a token of more bytes needs fewer of them
    D = fresh / (1 + b / b* + s b* / b)           millions of bytes; b is the batch, b* = b0 * fresh^kappa
    fresh = U + U R (1 - exp(-(seen / U - 1) / R))  where a text of U bytes is seen more than once
    x = (seen / U - 1) * parameters / U           how much of the text a model can learn by heart
    packing = c * 4^-w * exp(k / w^2) * (V / 1024)^g  w: bits per weight

The first line is the form of Hoffmann et al. (2022), in bytes, so that vocabularies compare; h is how many bits per
byte zlib needs for its documents, which stands for how hard a text is. C V / T is what rare tokens cost: T is
training tokens. G / (1 + r / r0) is what bigrams cost that share one of the r rows of their table. D falls with large
batches as in McCandlish et al. (2018) and with very small ones, whose gradients are noise. Rounding to w bits costs 4^-w at a
high rate; the next factor is for few bits, the last one for the embedding, which is rounded as well.

Repeats of a text count for less and less, as in Muennighoff et al. (2023), and from a point on they hurt: the score falls with
the epochs, and then rises. Lovelace et al. (2026) add a cost that grows with the repeats and with parameters per byte. Here it
is a factor of the cost of little data, 1 + O x: models of one and of two million parameters, and of 25 million, turn at about
the same x then, and fit better than with a sum.

R and O are fitted to runs with little weight decay. A plan has more of it where a text is repeated. On a CPU small texts have an R
and an O of their own, fitted to runs with the decay of a plan, and texts of 500 kB to 2 MB have another: see TEXT_SIZES.

While no text is repeated, a score never rises with more tokens, parameters, rows or bits per weight. A plan ends its clock where
the score would rise, so a larger budget is never worse.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parbank.errors import ConfigError

Array = NDArray[np.float64]
DATA = Path(__file__).with_name("data")
FIT = DATA / "fit.json"

# Every parameter of the score as a log of a positive number: its prior mean and deviation. Exponents start from Hoffmann
# et al. (alpha 0.34, beta 0.28), and so does A: theirs is 0.28 of B at a million parameters and a megabyte. R is that of
# Muennighoff et al. (15). A and alpha are narrow: runs of a few hundred steps, as on a CPU, cannot show what a larger model
# would learn later, and would plan models that are too small. The others are wide.
PRIORS: dict[str, tuple[float, float]] = {
    "E": (math.log(0.7), 0.3),
    "A": (math.log(0.25), 0.15),
    "alpha": (math.log(0.34), 0.1),
    "B": (math.log(0.6), 1.0),
    "beta": (math.log(0.28), 0.3),
    "C": (math.log(10.0), 1.5),
    "nu": (math.log(0.3), 0.7),
    "eta": (math.log(0.6), 0.5),
    "b0": (math.log(0.01), 1.5),
    "kappa": (math.log(0.7), 0.2),
    "s": (math.log(0.05), 1.0),
    "R": (math.log(15.0), 0.5),
    "G": (math.log(0.1), 0.7),
    "r0": (math.log(12.0), 0.7),
    "O": (math.log(0.05), 1.0),
}
NAMES = tuple(PRIORS)
NEAR = 0.2
"""A run of a size, vocabulary or batch by so many factors of e away still says something about a candidate: 8 layers against
6 are 0.29. With 0.25, runs of 8 layers outweighed the one of 6, which was worse than the law says."""
TABLE_WEIGHT = 0.25
"""Of a bigram table in the distance from a run: a table that gains nothing costs some bits per weight, and no more."""
MOST_EPOCHS = 1000.0
TEXT_SIZES = (100_000, 500_000, 2_000_000, 10_000_000)
"""Bytes of text. Up to the first R and O on a CPU are those of small texts, from the second to the third those of middle ones, and
from the last on those of all runs. Between, their logarithms change with that of the bytes. No run on a CPU between the last two
has the decay of a plan."""
SPELT, FEW_TOKENS = 256, 1024
"""Tokens that are single bytes, and those of the smallest vocabulary of the runs behind the law of token sizes."""
SHORT_WINDOWS, LONG_WINDOWS = 400, 1100
"""Steps of a run in which windows of 512 tokens gain nothing over 256 (in 400 they lost 0.02 by one seed,
benchmarks/results/study_windows_cpu), and steps of the three runs in which they gained, with a larger batch."""
LEAST_STEPS = 64  # of a run that counts: a shorter one has hardly a schedule
TEXT_CURVES = 0.04
"""How differently two texts learn: what a run says of another run on its text is off by this share for each factor of e between
their tokens, matrices and vocabularies. From 291 to 573 thousand tokens, and from 0.3 to 1 million parameters in matrices, twelve
texts were off by 0.053 (benchmarks/results/text_difficulty)."""
FIELDS = (
    "matrices",
    "params",
    "vocab",
    "bigrams",
    "tokens",
    "bytes_per_token",
    "text_bytes",
    "batch_tokens",
    "hardness",
)


@dataclass(frozen=True, kw_only=True)
class Cases:
    """Runs to predict: one entry of each array per run."""

    matrices: Array
    """Parameters in the banks: those that cost arithmetic at every token."""
    params: Array
    """All parameters: those that can learn a text by heart."""
    vocab: Array
    bigrams: Array
    """Rows of the bigram table."""
    tokens: Array
    """Training tokens, repeats included."""
    bytes_per_token: Array
    text_bytes: Array
    """Training text, each byte once."""
    batch_tokens: Array
    hardness: Array
    """Bits per byte of the text's documents under zlib."""

    @classmethod
    def of(cls, **values: Any) -> "Cases":
        """From numbers and arrays, all made as long as the longest."""
        arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(values[name], np.float64)) for name in FIELDS))
        return cls(**dict(zip(FIELDS, arrays)))


def predict_score(log_parameters: Array, cases: Cases) -> Array:
    """Bits per byte before packing."""
    p = dict(zip(NAMES, np.exp(log_parameters)))
    parameters = cases.matrices / 1e6 * (cases.vocab / 1024) ** p["nu"]
    bits = p["E"] + p["A"] * parameters ** -p["alpha"] + p["G"] / (1 + cases.bigrams / (1000 * p["r0"]))
    found: Array = (bits + _predict_training(p, cases)) * (cases.hardness / 2) ** p["eta"]
    return found


def _predict_training(p: Mapping[str, float], cases: Cases) -> Array:
    """The part of a score that changes with the tokens, before the factor of the text."""
    seen = cases.tokens * cases.bytes_per_token / 1e6
    unique = cases.text_bytes / 1e6
    repeats = np.maximum(seen / unique - 1, 0.0)
    fresh = np.minimum(seen, unique) + unique * p["R"] * -np.expm1(-repeats / p["R"])
    batch = cases.batch_tokens * cases.bytes_per_token / 1e6
    best = p["b0"] * fresh ** p["kappa"]
    data = fresh / (1 + batch / best + p["s"] * best / batch)
    exposure = repeats * cases.params / cases.text_bytes
    found: Array = p["B"] * data ** -p["beta"] * (1 + p["O"] * exposure) + p["C"] * cases.vocab / cases.tokens
    return found


def find_most_tokens(log_parameters: Array, cases: Cases) -> Array:
    """The tokens from which on a score rises, as models learn their text by heart: one epoch at least, MOST_EPOCHS at most. By
    bisection of their logarithm, to 1%, from below: with fewer tokens a score falls with each one."""
    p = dict(zip(NAMES, np.exp(log_parameters)))
    once = cases.text_bytes / cases.bytes_per_token
    low, high = np.zeros_like(once), np.full_like(once, math.log(MOST_EPOCHS))
    for _ in range(10):
        middle = (low + high) / 2
        here, beyond = (
            _predict_training(p, replace(cases, tokens=factor * once * np.exp(middle))) for factor in (1.0, 1.0001)
        )
        falls = beyond <= here
        low, high = np.where(falls, middle, low), np.where(falls, high, middle)
    found: Array = once * np.exp(low)
    return found


@dataclass(frozen=True, kw_only=True)
class PackingLaw:
    """The law of the cost of rounding weights."""

    c: float
    k: float
    g: float

    def predict(self, bits: Array, vocab: Array) -> Array:
        """Bits per byte lost at so many bits per weight."""
        bits = np.maximum(bits, 0.5)
        found: Array = self.c * np.exp(-bits * math.log(4) + self.k / bits**2) * (vocab / 1024) ** self.g
        return found


@dataclass(frozen=True, kw_only=True)
class TokenSizes:
    """Bytes per token: exp(a) * vocab^b * hardness^-d, and below FEW_TOKENS less, since tokens of one byte are a larger share."""

    a: float
    b: float
    d: float
    few: float = 0.0
    """The exponent of the share of longer tokens, over that of FEW_TOKENS."""

    def predict(self, vocab: Any, hardness: float) -> Array:
        vocab = np.asarray(vocab, np.float64)
        found: Array = np.exp(self.a) * vocab**self.b * hardness**-self.d * longer_tokens(vocab) ** self.few
        return np.maximum(found, 1.0)


def large_share(text_bytes: float) -> float:
    """How much a text on a CPU is like those of all runs: 0 up to the third of TEXT_SIZES, 1 from the last on."""
    return float(np.interp(math.log(text_bytes), np.log(TEXT_SIZES[2:]), (0, 1)))


def longer_tokens(vocab: Any) -> Array:
    """The share of tokens that are not single bytes, over that of FEW_TOKENS; 1 from there on."""
    found: Array = (1 - SPELT / np.minimum(np.maximum(vocab, SPELT + 1), FEW_TOKENS)) / (1 - SPELT / FEW_TOKENS)
    return found


@dataclass(frozen=True, kw_only=True)
class CpuTexts:
    """What repeats of a text are worth and cost on a CPU, with the weight decay of a plan."""

    small_R: float
    small_O: float
    middle_R: float
    middle_O: float
    spread: float
    """How far the score of a small text may be from what zlib says of it, as a share."""
    few: float
    """That of `TokenSizes`."""


@dataclass(frozen=True, kw_only=True)
class Laws:
    """A fit: parameters, how certain they are, and the range of the runs behind them."""

    log_parameters: Array
    covariance: Array
    """Of the log parameters, then of the logs of the factors in `texts`, in their order, of `gpu_options` and of `cpu_windows`."""
    scatter: float
    """Standard deviation of a run of very many steps about the law, in bits per byte."""
    short_steps: float
    """A run of so many steps scatters twice as much."""
    inflation: float
    """How much larger the errors of runs that were left out are than the fit alone would say."""
    text_spread: float
    """How far a new text may be from what zlib says of it, as a share of its score."""
    texts: Mapping[str, float]
    """The factor of texts that were scored, by name: stdlib is the same text everywhere."""
    packing: PackingLaw
    token_sizes: TokenSizes
    gpu_options: float
    """The factor of the options that a plan for a GPU has beyond those of the runs."""
    cpu_windows: float
    """The factor of batches of 4,096 in windows of 512 tokens on a CPU, against 256, in runs of LONG_WINDOWS steps."""
    tried: Array
    """Matrices, vocabulary, batch tokens and bigrams of the long runs, and what they scored above the law: a row each."""
    ranges: Mapping[str, tuple[float, float]]
    """Least and largest value of each field among the runs."""
    runs: int
    cpu_texts: CpuTexts

    def for_text_on_a_cpu(self, text_bytes: float) -> "Laws":
        """With the R, the O, the spread and the tokens of a text of so many bytes."""
        texts, logs, size, sizes = self.cpu_texts, self.log_parameters.copy(), math.log(text_bytes), np.log(TEXT_SIZES)
        for name, small, middle in (("R", texts.small_R, texts.middle_R), ("O", texts.small_O, texts.middle_O)):
            at = NAMES.index(name)
            logs[at] = np.interp(size, sizes, (math.log(small), math.log(middle), math.log(middle), logs[at]))
        return replace(
            self,
            log_parameters=logs,
            text_spread=float(np.interp(size, sizes[:2], (texts.spread, self.text_spread))),
            token_sizes=replace(self.token_sizes, few=texts.few),
            cpu_windows=self.cpu_windows ** large_share(text_bytes),
        )

    def score(self, cases: Cases, text: str = "") -> Array:
        return predict_score(self.log_parameters, cases) * self.texts.get(text, 1.0)

    def most_tokens(self, cases: Cases) -> Array:
        return find_most_tokens(self.log_parameters, cases)

    def count_windows(self, lengths: Array, steps: Array) -> Array:
        """The exponent of `cpu_windows` for windows of so many tokens in runs of so many steps on a CPU: 0 to 1."""
        learnt = np.log(np.maximum(steps, 1.0) / SHORT_WINDOWS) / math.log(LONG_WINDOWS / SHORT_WINDOWS)
        found: Array = np.where(lengths >= 512, np.clip(learnt, 0.0, 1.0), 0.0)
        return found

    def distances(self, matrices: Array, vocab: Array, batch_tokens: Array) -> Array:
        """How far candidates are from each long run, in factors of e. The runs are the first axis."""
        sizes = (matrices, vocab, batch_tokens)
        return np.stack([np.sqrt(sum(np.log(size / own) ** 2 for size, own in zip(sizes, run))) for run in self.tried])

    def table_distances(self, bigrams: Array) -> Array:
        """The same for rows of bigram tables."""
        return np.stack([TABLE_WEIGHT * np.abs(np.log(np.maximum(bigrams, 1.0) / run[3])) for run in self.tried])

    def correct(self, distances: Array) -> Array:
        """By how many bits per byte long runs nearby were above the law, on average. Tends to 0 where no run is near."""
        weights = np.exp(-((distances / NEAR) ** 2))
        found: Array = np.tensordot(self.tried[:, -1], weights, 1) / (weights.sum(axis=0) + 0.3)
        return found

    def deviations(self, cases: Cases, text: str = "", *, options: bool = False, windows: float = 0.0) -> Array:
        """The standard deviation of a prediction: of the parameters and factors, carried over by the derivative, of a new
        text, and of one run. `options`: the prediction has the factor `gpu_options`. `windows`: the exponent of the factor
        `cpu_windows` in it."""
        scores, slopes = self._slopes(cases, text, options=options, windows=windows)
        spread = np.einsum("np,pq,nq->n", slopes, self.covariance, slopes)
        unknown = 0.0 if text in self.texts else self.text_spread
        found: Array = np.sqrt(self.inflation**2 * (spread + self._scatter(cases) ** 2) + (unknown * scores) ** 2)
        return found

    def transfer(self, cases: Cases, past: Cases, *, options: bool, windows: float, past_windows: float) -> Array:
        """The standard deviation, as a share, of predictions from the score of a past run on the same text: of the ratio that
        the laws expect, of both runs, and of what texts differ in how they learn."""
        scores, slopes = self._slopes(cases, "", options=options, windows=windows)
        past_scores, past_slopes = self._slopes(past, "", options=options, windows=past_windows)
        change = slopes / scores[:, None] - past_slopes / past_scores[:, None]
        spread = np.einsum("np,pq,nq->n", change, self.covariance, change)
        runs = (self._scatter(cases) / scores) ** 2 + (self._scatter(past) / past_scores) ** 2
        pairs = ((cases.tokens, past.tokens), (cases.matrices, past.matrices), (cases.vocab, past.vocab))
        distance = sum(np.log(here / there) ** 2 for here, there in pairs)
        found: Array = np.sqrt(self.inflation**2 * (spread + runs) + TEXT_CURVES**2 * distance)
        return found

    def _slopes(self, cases: Cases, text: str, *, options: bool, windows: float) -> tuple[Array, Array]:
        """The scores, and their derivatives by everything that `covariance` has."""
        scores = self.score(cases, text)
        slopes = differentiate(lambda log: predict_score(log, cases), self.log_parameters) * self.texts.get(text, 1.0)
        chosen = [float(name == text) for name in self.texts] + [float(options), windows]
        return scores, np.concatenate([slopes, scores[:, None] * chosen], axis=1)

    def _scatter(self, cases: Cases) -> Array:
        """The standard deviation of a run about the law."""
        found: Array = self.scatter * (1 + self.short_steps * cases.batch_tokens / cases.tokens)
        return found


def differentiate(function: Any, at: Array, step: float = 1e-5) -> Array:
    """The Jacobian (outputs, inputs) by central differences."""
    columns = []
    for index in range(len(at)):
        shift = np.zeros_like(at)
        shift[index] = step
        columns.append((function(at + shift) - function(at - shift)) / (2 * step))
    return np.stack(columns, axis=-1)


@cache
def load_laws(path: Path = FIT) -> Laws:
    """The committed fit, or another one."""
    try:
        return _read_laws(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"cannot read the fit {path}: {error!r}; make it by python -m parbank.plan.fit of this version with --out, or unset "
            "PARBANK_PLAN_FIT"
        ) from error


def _read_laws(values: dict[str, Any]) -> Laws:
    return Laws(
        log_parameters=np.log([values["parameters"][name] for name in NAMES]),
        covariance=np.array(values["covariance_of_logs"]),
        scatter=values["scatter"],
        short_steps=values["short_steps"],
        inflation=values["inflation"],
        text_spread=values["text_spread"],
        texts=values["texts"],
        packing=PackingLaw(**values["packing"]),
        token_sizes=TokenSizes(**values["token_sizes"]),
        gpu_options=values["gpu_options"],
        cpu_windows=values["cpu_windows"],
        tried=np.array(values["tried"]),
        ranges={name: (low, high) for name, (low, high) in values["ranges"].items()},
        runs=values["runs"],
        cpu_texts=CpuTexts(**values["cpu_texts"]),
    )
