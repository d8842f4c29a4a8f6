"""Whether a change pays: paired differences, their t intervals, and what a number of seeds can show.

Every arm is compared with the base run by run: same seed, same order of the data. The differences d_1 .. d_n of an arm
have a mean m and a standard deviation s, and t = m / (s / sqrt(n)) follows Student's distribution with n - 1 degrees of
freedom if the arm changes nothing. Bootstrap intervals would be too narrow at four seeds.

Several arms give several chances to be wrong. Holm's procedure (1979) bounds the chance that any arm without an effect
gets a verdict: of m arms, the k-th smallest p is compared with alpha / (m - k + 1), and the first p that is too large
ends it. An arm's interval has the confidence of the step that decided it, so it leaves zero out exactly when the arm
has a verdict.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

ALPHA = 0.05
POWER = 0.8
MOST_PAIRS = 1000  # more seeds than anybody runs
_TERMS = 100  # of a continued fraction: below the mean, 50 reach the last digit at 100,000 degrees of freedom

Verdict = Literal["better", "worse", "no difference", "too few seeds"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An arm against the base. Differences are arm minus base: below zero is better."""

    pairs: int
    mean: float
    sd: float
    """Standard deviation of the differences."""
    low: float
    high: float
    """The interval, corrected over arms; infinite with fewer than two pairs."""
    p: float
    """The p value of the t test, uncorrected."""
    verdict: Verdict
    more: int = 0
    """too few seeds: how many more would show `target` (80% power)."""
    target: float = 0.0

    def describe(self, digits: int = 4, unit: str = "") -> str:
        """The verdict in words."""
        if self.verdict in ("better", "worse"):
            return self.verdict
        if self.verdict == "no difference" and self.mean == self.sd == 0:
            return "equal in every pair"
        if self.verdict == "no difference":
            return f"no difference of more than {max(-self.low, self.high):.{digits}f}{unit} shown"
        if not math.isfinite(self.target):  # no seed had a partner yet
            return "too few seeds: an interval needs two at least"
        return f"too few seeds: {self.more} more would show {self.target:.{digits}f}{unit}"


def compare(
    differences: Mapping[str, Sequence[float]], *, target: float, alpha: float = ALPHA, assumed_sd: float = 0.0
) -> dict[str, Comparison]:
    """The verdict on every arm, from its paired differences.

    `target` is the smallest difference of interest. An arm without a verdict has "no difference" if its interval lies
    within +-target, and "too few seeds" otherwise. `assumed_sd` serves where an arm has fewer than two pairs.
    """
    tests = {arm: _test(values) for arm, values in differences.items()}
    levels = holm({arm: p for arm, (_, _, p) in tests.items()}, alpha)
    found = {}
    for arm, values in differences.items():
        (mean, sd, p), n = tests[arm], len(values)
        half = quantile(levels[arm], n - 1) * sd / math.sqrt(n) if n > 1 else math.inf
        low, high = mean - half, mean + half
        verdict: Verdict = "too few seeds"
        if n > 1 and p <= levels[arm]:
            verdict = "better" if mean < 0 else "worse"
        elif n > 1 and max(-low, high) <= target:
            verdict = "no difference"
        more = 0
        if verdict == "too few seeds":
            wanted = pairs_needed(target, sd=sd if n > 1 else assumed_sd, comparisons=len(differences), alpha=alpha)
            more = max(1, wanted - n)
        found[arm] = Comparison(
            pairs=n, mean=mean, sd=sd, low=low, high=high, p=p, verdict=verdict, more=more, target=target
        )
    return found


def holm(p_values: Mapping[str, float], alpha: float = ALPHA) -> dict[str, float]:
    """The level at which each arm is decided. An arm is rejected if its p is at most its level."""
    levels, level, rejecting = {}, alpha, True
    for rank, arm in enumerate(sorted(p_values, key=lambda arm: p_values[arm])):
        if rejecting:
            level = alpha / (len(p_values) - rank)
            rejecting = p_values[arm] <= level
        levels[arm] = level
    return levels


def _test(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, standard deviation and two-sided p. With one pair nothing can be said: p is 1."""
    n = len(values)
    mean, sd = mean_and_deviation(values)
    if n < 2:
        return mean, sd, 1.0
    if sd == 0:  # a change without any effect, or one that adds a constant
        return mean, 0.0, 1.0 if mean == 0 else 0.0
    return mean, sd, tail(abs(mean) / (sd / math.sqrt(n)), n - 1)


def interval(values: Sequence[float], alpha: float = ALPHA) -> tuple[float, float]:
    """The t interval of a mean."""
    if len(values) < 2:
        return -math.inf, math.inf
    mean, sd = mean_and_deviation(values)
    half = quantile(alpha, len(values) - 1) * sd / math.sqrt(len(values))
    return mean - half, mean + half


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation, as the module `statistics` computes them, but in floats: a hundred times as fast."""
    n = len(values)
    mean = math.fsum(values) / n if n else math.nan
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1)) if n > 1 else math.nan


def smallest_difference(
    *, sd: float, pairs: int, comparisons: int = 1, power: float = POWER, alpha: float = ALPHA
) -> float:
    """The difference that this many pairs show with this probability, if differences have the deviation `sd`.

    With several arms it counts on Holm's first and strictest step.
    """
    if pairs < 2:
        return math.inf
    return _shift(power, alpha / max(1, comparisons), pairs - 1) * sd / math.sqrt(pairs)


def pairs_needed(
    difference: float, *, sd: float, comparisons: int = 1, power: float = POWER, alpha: float = ALPHA
) -> int:
    """The least number of pairs whose smallest difference is at most this one."""
    low, high = 1, 2
    reached = functools.partial(smallest_difference, sd=sd, comparisons=comparisons, power=power, alpha=alpha)
    while high < MOST_PAIRS and reached(pairs=high) > difference:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if reached(pairs=middle) > difference else (low, middle)
    return high


@functools.lru_cache(maxsize=4096)
def _shift(power: float, alpha: float, freedom: int) -> float:
    """The mean of t, in standard errors, at which a test of level alpha rejects with this probability."""
    critical, low, high = quantile(alpha, freedom), 0.0, 1.0
    while rejection(high, critical, freedom) < power:
        high *= 2
    return _bisect(lambda shift: rejection(shift, critical, freedom) < power, low, high)


def rejection(shift: float, critical: float, freedom: int) -> float:
    """P(|T| > critical) for noncentral t: a normal of mean `shift` over an independent chi / sqrt(freedom).

    Given the denominator the numerator is normal, so this is one integral over the denominator.
    """
    # beyond twelve deviations of it (at least 1 / sqrt(2 freedom)) nothing is left
    upper = 1 + 12 / math.sqrt(2 * freedom)
    nodes, weights = _gauss_legendre()
    chi = upper * (nodes + 1) / 2
    log_density = (
        math.log(2) + freedom / 2 * math.log(freedom / 2) - math.lgamma(freedom / 2)
        + (freedom - 1) * np.log(chi) - freedom * chi**2 / 2
    )  # fmt: skip
    above, below = ((sign * shift - critical * chi) / math.sqrt(2) for sign in (1, -1))
    rejected = np.array([1 + (math.erf(a) + math.erf(b)) / 2 for a, b in zip(above.tolist(), below.tolist())])
    return float((weights * upper / 2 * np.exp(log_density) * rejected).sum())


@functools.cache
def _gauss_legendre() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(200)


@functools.lru_cache(maxsize=4096)
def quantile(alpha: float, freedom: int) -> float:
    """t with P(|T| > t) = alpha."""
    high = 1.0
    while tail(high, freedom) > alpha:
        high *= 2
    return _bisect(lambda t: tail(t, freedom) > alpha, 0.0, high)


def tail(t: float, freedom: int) -> float:
    """P(|T| > t) of Student's distribution, exact to many digits however small: the incomplete beta function
    I_x(freedom / 2, 1 / 2) at x = freedom / (freedom + t^2) (Abramowitz and Stegun, 26.7.1)."""
    x, rest = freedom / (freedom + t * t), t * t / (freedom + t * t)
    a, b = freedom / 2, 0.5
    return _beta(x, a, b) if x < (a + 1) / (a + b + 2) else 1 - _beta(rest, b, a)


def _beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) below its mean, by the continued fraction (Abramowitz and Stegun, 26.5.8), from its end to its start."""
    if x <= 0:
        return 0.0
    found = 1.0
    for m in range(_TERMS, 0, -1):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1))
        found = 1 + odd / (1 + even / found)
    log_factor = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(log_factor) / a / found


def _bisect(below: Callable[[float], bool], low: float, high: float) -> float:
    """The point between `low` and `high` at which a condition ceases to hold."""
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return high


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: 1 if both order their items alike. Ties share their mean rank; not a number where all are equal."""
    a, b = _ranks(first), _ranks(second)
    if a.std() == 0 or b.std() == 0:
        return math.nan
    return float(((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std()))


def _ranks(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    return np.array([(array < value).sum() + ((array == value).sum() - 1) / 2 for value in array])
