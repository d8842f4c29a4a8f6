"""Symbol models of the entropy coder: few transmitted whole numbers -> exact frequencies.

Writer and reader must agree on every frequency to the last bit, on any machine. So a model is a handful of small whole
numbers, and its frequencies follow from them by integer arithmetic alone; logarithms and the like only help the writer
to choose. docs/reference/artifact.md specifies it.

Three kinds, over symbols 0..n-1 around a centre, at distance d:
- DECAY: w(0) = 1, w(d+1) = w(d) r(d), r(0) = 1 - a, r(d+1) = r(d) (1 - b). With b = 0 a discretised Laplace
  distribution, with r(0) near 1 a Gaussian one, and everything between: two numbers, for small tensors. r(0) is at
  least 1/16, so no symbol between two others has more than 8/9, or takes less than 0.17 bits.
- EVEN: a transmitted histogram over d, for large tensors; weights have no preferred sign.
- FULL: a transmitted histogram over the symbols themselves.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]

PRECISION = 24  # bits of a frequency, as in constriction's default coder
DECAY, EVEN, FULL = 0, 1, 2
KINDS = 3
# Histograms are sent as logarithms in quarters of an octave. Rounding by at most an eighth of an octave costs
# (ln 2 / 4)^2 / 24 nats = 0.0018 bits a symbol on average; finer steps cost more in the histogram than they save.
_STEPS = 4
_OCTAVES = 18  # from 2^-18 to 1
LEVELS = _STEPS * _OCTAVES + 1
_QUARTERS = (32768, 38968, 46341, 55109)  # 2^15 * 2^(i/4), rounded
_LEVEL_WEIGHTS = np.array([_QUARTERS[level % 4] << level // 4 for level in range(LEVELS)], np.int64)
_UNSEEN = 0.4  # the count of a symbol that does not occur
# 1 - ratio as (8 + m) * 2^e / 2^20: eighths of an octave, from 8e-6 (flat over any range we have) to 1 - 2^-4.
_RATIO_BITS = 20
SHRINKS = np.array([0] + [(8 + m) << e for e in range(17) for m in range(8)], np.int64)


@dataclass(frozen=True)
class SymbolRun:
    """Symbols to code in one go, all under the same frequencies (each less 1, as `scale_weights` gives them)."""

    symbols: Array
    weights: Array

    @functools.cached_property
    def bits(self) -> float:
        """The cost of the symbols."""
        return bits(np.bincount(self.symbols, minlength=len(self.weights)), self.weights)


def scale_weights(weights: Array) -> Array:
    """Scales whole weights (not all 0) to a sum of 2^24 - n, so that with 1 added to each the frequencies sum to 2^24.

    The remainder of the divisions goes to the first of the largest.
    """
    room = (1 << PRECISION) - len(weights)
    scaled = weights * room // weights.sum()  # below 2^(33 + 24)
    scaled[np.argmax(weights)] += room - scaled.sum()
    return scaled


@functools.lru_cache(maxsize=512)
def flat_weights(n: int) -> Array:
    return scale_weights(np.ones(n, np.int64))


@functools.lru_cache(maxsize=4096)
def decay_weights(a: int, b: int, centre: int, n: int) -> Array:
    """The frequencies of a DECAY model: `a` and `b` are places in SHRINKS."""
    reach = max(centre, n - 1 - centre)
    one = 1 << _RATIO_BITS
    weight, ratio, factor = 1 << 30, one - int(SHRINKS[a]), one - int(SHRINKS[b])
    table = [weight]
    for _ in range(reach):
        weight = weight * ratio >> _RATIO_BITS
        ratio = ratio * factor >> _RATIO_BITS
        table.append(weight)
    return scale_weights(np.array(table, np.int64)[_distances(centre, n)])


def level_weights(levels: Array) -> Array:
    return scale_weights(_LEVEL_WEIGHTS[levels])


def even_weights(levels: Array, centre: int, n: int) -> Array:
    return level_weights(levels[_distances(centre, n)])


def step_weights(a: int) -> Array:
    """The frequencies of the step from one level of a histogram to the next, -(LEVELS-1)..LEVELS-1 as 0..."""
    return decay_weights(a, 0, LEVELS - 1, 2 * LEVELS - 1)


def bits(counts: Array, weights: Array) -> float:
    """The cost of symbols with these counts."""
    present = counts > 0
    return float(-(counts[present] * np.log2((weights[present] + 1) / (1 << PRECISION))).sum())


@functools.lru_cache(maxsize=4096)
def flat_piece(value: int, n: int) -> tuple[SymbolRun, ...]:
    """A number of 0..n-1; nothing to send where there is only one."""
    return (SymbolRun(np.array([value], np.int64), flat_weights(n)),) if n > 1 else ()


def piece_bits(pieces: Iterable[SymbolRun]) -> float:
    return sum(piece.bits for piece in pieces)


def choose_model(counts: Array, centre: int, *, only_decay: bool = False) -> tuple[float, Array, list[SymbolRun]]:
    """The cheapest model for a histogram: total bits (its own description included), frequencies, description."""
    best: tuple[float, Array, list[SymbolRun]] | None = None
    for kind, weights, about in _candidates(counts, centre, only_decay):
        pieces = [*flat_piece(kind, KINDS), *about]
        total = bits(counts, weights) + piece_bits(pieces)
        if best is None or total < best[0]:
            best = (total, weights, pieces)
    assert best is not None
    return best


def describe_numbers(numbers: Array, limit: int) -> list[SymbolRun]:
    """Whole numbers below a limit: the range they use, then a model over it."""
    if not numbers.size:
        return []
    low, high = int(numbers.min()), int(numbers.max())
    pieces = [*flat_piece(low, limit), *flat_piece(high - low, limit - low)]
    n = high - low + 1
    if n == 1:
        return pieces
    centre = int(np.sort(numbers)[numbers.size // 2]) - low
    _, weights, about = choose_model(np.bincount(numbers - low, minlength=n), centre)
    return [*pieces, *flat_piece(centre, n), *about, SymbolRun(numbers - low, weights)]


def _candidates(counts: Array, centre: int, only_decay: bool) -> list[tuple[int, Array, list[SymbolRun]]]:
    n = len(counts)
    distances = _distances(centre, n)
    folded = np.bincount(distances, weights=counts).astype(np.int64)
    a, b = _fit_decay(folded, n)
    places = len(SHRINKS)
    found = [(DECAY, decay_weights(a, b, centre, n), [*flat_piece(a, places), *flat_piece(b, places)])]
    if only_decay or counts.sum() < 2 * len(folded):  # too few to pay for a histogram
        return found
    sides = np.bincount(distances)  # symbols at each distance, which share its count
    even = _levels(np.maximum(folded, _UNSEEN) / sides, counts.sum())
    found.append((EVEN, even_weights(even, centre, n), _describe_levels(even)))
    full = _levels(np.maximum(counts, _UNSEEN), counts.sum())
    found.append((FULL, level_weights(full), _describe_levels(full)))
    return found


def _levels(counts: npt.NDArray[np.float64], total: int) -> Array:
    """Logarithms of the counts in quarters of an octave."""
    shares = np.log2(counts / max(int(total), 1))
    return np.clip(np.rint(_STEPS * (shares + _OCTAVES)), 0, LEVELS - 1).astype(np.int64)


def _describe_levels(levels: Array) -> list[SymbolRun]:
    pieces = [*flat_piece(int(levels[0]), LEVELS)]
    if len(levels) == 1:
        return pieces
    steps = np.diff(levels) + LEVELS - 1
    a, _ = _fit_decay(np.bincount(np.abs(steps - LEVELS + 1), minlength=LEVELS), 2 * LEVELS - 1, laplace=True)
    return [*pieces, *flat_piece(a, len(SHRINKS)), SymbolRun(steps, step_weights(a))]


def _fit_decay(folded: Array, n: int, *, laplace: bool = False) -> tuple[int, int]:
    """The likeliest a and b for counts by distance. All it needs of them are two sums: the logarithm of w(d) is
    d log(1-a) + d(d-1)/2 log(1-b), less that of the norm, which is a table of its own."""
    d = np.arange(len(folded))
    logs, norms = _log_ratios(), _log_norms(n if n < 16 else 1 << (n - 1).bit_length())  # few tables serve all n
    linear, square = float((folded * d).sum()), float((folded * (d * (d - 1) // 2)).sum())
    columns = slice(0, 1) if laplace else slice(None)
    cost = folded.sum() * norms[:, columns] - linear * logs[:, None] - square * logs[None, columns]
    a, b = np.unravel_index(int(np.argmin(cost)), cost.shape)
    return int(a), int(b)


@functools.cache
def _log_ratios() -> npt.NDArray[np.float64]:
    return np.log1p(-SHRINKS / (1 << _RATIO_BITS))


@functools.cache
def _log_norms(n: int) -> npt.NDArray[np.float64]:
    """log sum w over n symbols around the middle, for every a and b: near enough to choose by."""
    logs, total = _log_ratios(), np.ones((len(SHRINKS), len(SHRINKS)))
    for d in range(1, n // 2 + 1):
        term = np.exp(d * logs[:, None] + (d * (d - 1) // 2) * logs[None, :])
        total += 2 * term
        if term.max() < 1e-12:
            break
    return np.log(total)


def _distances(centre: int, n: int) -> Array:
    return np.abs(np.arange(n) - centre)
