"""The difference of two scores of the same text, and how sure it is: documents are the sample, and each is its own pair.

The score is a ratio, bits over bytes. Its difference is r = sum d_i / sum n_i, with d_i the difference in bits of document
i and n_i its bytes. The residuals d_i - r n_i give its standard error (the ratio estimator; Cochran 1977, section 6.3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

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
        raise ValueError(f"{len(sizes)} sizes, {len(ours)} and {len(theirs)} bits: not the documents of one text")
    n, d = np.asarray(sizes, np.float64), np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    ratio, count = float(d.sum() / n.sum()), len(n)
    better = int((d < 0).sum())
    if count < FEWEST:
        return PairedDifference(ratio, count, better, None, None)
    error = math.sqrt(count / (count - 1) * float(((d - ratio * n) ** 2).sum())) / float(n.sum())
    half = student_quantile(count - 1) * error
    return PairedDifference(ratio, count, better, ratio - half, ratio + half)


def student_quantile(freedom: int, alpha: float = 0.05) -> float:
    """t with P(|T| > t) = alpha, by the first terms of its expansion around the normal one (Abramowitz and Stegun 26.7.5);
    right to 5e-4 from 19 degrees of freedom on."""
    z = NormalDist().inv_cdf(1 - alpha / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
