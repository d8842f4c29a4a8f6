"""The difference of two scores of the same text, with its confidence interval. Documents are the sample; both models have
scored each of them.

The score is a ratio, bits over bytes. Its difference is r = sum d_i / sum n_i, with d_i the difference in bits of document
i and n_i its bytes. The residuals d_i - r n_i give its standard error (the ratio estimator; Cochran 1977, section 6.3).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parbank.errors import DataError
from parbank.statistics import ALPHA, compare, quantile

FEWEST = 20
"""Documents below which there is no interval: the estimator is off by terms of 1/n, and a few long documents decide."""


@dataclass(frozen=True)
class PairedDifference:
    """Ours minus theirs in bits per byte: below zero is better."""

    bpb: float
    documents: int
    better: int
    """Documents that ours scores better."""
    low: float | None
    high: float | None
    """The 95% interval; None with fewer than FEWEST documents."""


def compare_documents(sizes: Sequence[int], ours: Sequence[float], theirs: Sequence[float]) -> PairedDifference:
    """`sizes` in bytes, and the bits of both models, document by document."""
    if not len(sizes) == len(ours) == len(theirs) or not sum(sizes):
        raise ValueError(f"{len(sizes)} sizes, {len(ours)} and {len(theirs)} bits; give one of each per document")
    n, d = np.asarray(sizes, np.float64), np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    ratio, count = float(d.sum() / n.sum()), len(n)
    better = int((d < 0).sum())
    if count < FEWEST:
        return PairedDifference(ratio, count, better, None, None)
    error = math.sqrt(count / (count - 1) * float(((d - ratio * n) ** 2).sum())) / float(n.sum())
    half = quantile(ALPHA, count - 1) * error
    return PairedDifference(ratio, count, better, ratio - half, ratio + half)


@dataclass(frozen=True)
class ModelDifference:
    """A model minus the first one of a table, in bits per byte: below zero is better."""

    bpb: float
    documents: int
    low: float | None = None
    high: float | None = None
    """The interval, corrected for the number of models; None with fewer than FEWEST documents."""
    p: float | None = None
    """The p value of the paired t test, uncorrected."""
    verdict: str = "too few documents"
    """better, worse, no difference, or too few documents."""

    def describe(self) -> str:
        """The verdict in words."""
        if self.verdict == "no difference" and self.low is not None and self.high is not None:
            return f"no difference of more than {max(-self.low, self.high):.4f} shown" if self.high else "equal"
        return self.verdict if self.p is not None else f"too few documents: {self.documents} of {FEWEST}"


def compare_models(
    sizes: Sequence[int], base: Sequence[float], others: Mapping[str, Sequence[float]]
) -> dict[str, ModelDifference]:
    """The bits of several models against those of the first one, document by document; `sizes` in bytes.

    The test takes the values r + n (d_i - r n_i) / sum n_i of n documents. Their mean is the difference of the scores, and
    their deviation is that of the ratio. Holm's procedure corrects for the number of models.
    """
    if any(len(bits) != len(sizes) for bits in (base, *others.values())):
        raise DataError("the models were scored on different documents; score them on the same text")
    values = {name: _spread(np.asarray(sizes), np.asarray(bits) - np.asarray(base)) for name, bits in others.items()}
    if sum(size > 0 for size in sizes) < FEWEST:
        return {name: ModelDifference(float(own.mean()), len(own)) for name, own in values.items()}
    # Without a target, a difference that is not shown counts as none: no number of further documents is asked for.
    found = compare({name: own.tolist() for name, own in values.items()}, target=math.inf)
    return {
        name: ModelDifference(one.mean, one.pairs, one.low, one.high, one.p, one.verdict) for name, one in found.items()
    }


def _spread(sizes: np.ndarray, more: np.ndarray) -> np.ndarray:
    """One value for each document with bytes; their mean is sum(more) / sum(sizes)."""
    counted = sizes > 0
    n, d = sizes[counted], more[counted]
    ratio = d.sum() / n.sum()
    values: np.ndarray = ratio + len(n) * (d - ratio * n) / n.sum()
    return values
