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
MOST_PAIRS = 1000  # more seeds than anybody runs: larger numbers are not computed

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
    more: int | None = 0
    """too few seeds: how many more would show `target` (80% power); None for more than MOST_PAIRS."""
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
        more = f"more than {MOST_PAIRS:,}" if self.more is None else self.more
        return f"too few seeds: {more} more would show {self.target:.{digits}f}{unit}"


def compare(
    differences: Mapping[str, Sequence[float]], *, target: float, alpha: float = ALPHA, assumed_sd: float = 0.0
) -> dict[str, Comparison]:
    """The verdict on every arm, from its paired differences.

    `target` is the smallest difference of interest. An arm without a verdict has "no difference" if its interval lies
    within +-target, and "too few seeds" otherwise. `assumed_sd` serves where an arm has fewer than two pairs.
    """
    tests = {arm: _test(values) for arm, values in differences.items()}
    # Two p values may both be 0 to the precision of floats: then the larger t goes first.
    strongest = sorted(tests, key=lambda arm: -_standardize(*tests[arm][:2], len(differences[arm])))
    levels = holm({arm: tests[arm][2] for arm in strongest}, alpha)
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
        more: int | None = 0
        if verdict == "too few seeds":
            wanted = pairs_needed(target, sd=sd if n > 1 else assumed_sd, comparisons=len(differences), alpha=alpha)
            more = None if wanted is None else max(1, wanted - n)
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
    return mean, sd, tail(_standardize(mean, sd, n), n - 1)


def _standardize(mean: float, sd: float, n: int) -> float:
    """|t|. Without any noise, 0 for a change without effect, and infinite for one that adds a constant."""
    if n < 2 or mean == 0:
        return 0.0
    return math.inf if sd == 0 else abs(mean) / (sd / math.sqrt(n))


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
) -> int | None:
    """The least number of pairs whose smallest difference is at most this one. None: more than MOST_PAIRS."""
    reached = functools.partial(smallest_difference, sd=sd, comparisons=comparisons, power=power, alpha=alpha)
    if reached(pairs=MOST_PAIRS) > difference:
        return None
    low, high = 1, 2
    while reached(pairs=high) > difference:
        low, high = high, min(2 * high, MOST_PAIRS)
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
    # chi / sqrt(freedom) has a mean near 1 and a deviation below 1 / sqrt(2 freedom): beyond twelve of them nothing is left
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
    """P(|T| > t) of Student's distribution, to full relative precision however small it is: the regularized incomplete
    beta function I_x(freedom / 2, 1/2) at x = freedom / (freedom + t^2)."""
    half, square = freedom / 2, t * t / freedom
    if square == 0:
        return 1.0
    log_x, log_rest = -math.log1p(square), -math.log1p(1 / square)  # of x and of 1 - x
    scale = math.lgamma(half + 0.5) - math.lgamma(half) - math.lgamma(0.5)
    front = math.exp(half * log_x + log_rest / 2 + scale)
    if t * t > 3:  # there the fraction converges in some sqrt(freedom) terms; below, that of 1 - P does
        return front / half / _beta_fraction(half, 0.5, math.exp(log_x))
    return 1 - 2 * front / _beta_fraction(0.5, half, math.exp(log_rest))


def _beta_fraction(a: float, b: float, x: float) -> float:
    """1 + d1 / (1 + d2 / (1 + ...)), by which x^a (1 - x)^b / (a B(a, b)) is divided to give I_x(a, b) (DLMF 8.17.22). Its
    convergents are followed from the front, by the ratios of successive numerators and denominators (Lentz 1976)."""
    value, above, below = 1.0, 1.0, 0.0
    for n in range(1, 10_000):
        m = n // 2
        if n % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        above, below = 1 + term / above, 1 / (1 + term * below)
        value *= above * below
        if abs(above * below - 1) < 1e-15:
            break
    return value


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
