"""The writer's search for classes of similar weights.

The rows of a tensor differ in spread, and so do its columns: an input with a large variance needs small weights.
Every row and every column gets a small integer, at first the logarithm of its spread in quarters of an octave. Their
sum at a weight defines its class. Then rows and columns move to the integer under which they cost least.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parbank.quant.coders.base import Integers, count_values
from parbank.quant.coders.models import (
    PRECISION,
    Array,
    SymbolRun,
    choose_model,
    describe_numbers,
    flat_piece,
    piece_bits,
)

# Numbers of rows and of columns: steps to an octave of spread, and how many. A spread wrong by an eighth of an octave
# costs 0.01 bits a weight; finer steps save less than their own description takes in a row of 512.
_STEPS = 4
CODES = 32
# Which numbers are used, as shifts (rows, columns): none, rows, columns, both, both in steps of half an octave.
_DIVISIONS = ((5, 5), (0, 5), (5, 0), (0, 0), (1, 1))
# Neighbouring classes are joined until each has this many weights: fewer do not pay for their own model.
_MIN_CLASS = 512
_ROUNDS = 2  # of moving rows and columns: a third would save next to nothing
_WORTHWHILE = 0.001  # a round that gained less is the last
_FLOOR = 1 / 16  # added to a mean |i| before the logarithm: rows of zeros are at -4 octaves


@dataclass(frozen=True)
class Division:
    """One way to send a matrix."""

    bits: float
    """All of it: description, models, integers."""
    pieces: list[SymbolRun]
    """The description of classes and models."""
    rows: Array
    cols: Array
    """The numbers of rows and columns."""
    weights: list[Array]
    """Frequencies by class."""


def divide(values: Integers, q: int, *, refine: bool = True, only_decay: bool = False) -> Division:
    """The cheapest division found of a matrix into classes; `only_decay` leaves their models no other kind."""
    magnitudes = np.abs(values.astype(np.int16))
    rows, cols = (_codes(np.log2(magnitudes.mean(axis=axis) + _FLOOR)) for axis in (1, 0))
    cells = _count(values, rows, cols, q)
    alike = values.size <= _MIN_CLASS or not (rows.any() or cols.any())
    shifts = _DIVISIONS[:1] if alike else _DIVISIONS
    best = _choose([_Classes.group(cells, rows, cols, *shift) for shift in shifts], only_decay)
    for _ in range(_ROUNDS if refine and len(best.weights) > 1 else 0):
        rows = _move(values, q, best, best.rows, best.cols)
        cols = _move(values.T, q, best, best.cols, rows)
        found = _Classes.group(_count(values, rows, cols, q), rows, cols, 0, 0).describe(only_decay)
        gained = 1 - found.bits / best.bits
        best = found if gained > 0 else best
        if gained < _WORTHWHILE:
            break
    return best


def _move(values: Integers, q: int, division: Division, rows: Array, cols: Array) -> Array:
    """Every row's cheapest number under the present models, including the cost of the number itself.

    Costs are integer 256ths of a bit, so that sums are exact and the choice does not depend on the order of the sum. The
    product is einsum's: a BLAS library would start threads of its own under every thread that divides a matrix.
    """
    n, numbers, others = 2 * q + 1, int(rows.max()) + 1, int(cols.max()) + 1
    lengths = [np.rint(256 * (PRECISION - np.log2(w + 1.0))) for w in division.weights]
    classes = find_classes(division.rows, division.cols)
    table = np.array([[lengths[classes[row + col]] for col in range(others)] for row in range(numbers)])
    # float32 holds whole numbers below 2^24 exactly, and is twice as fast
    exact = np.float32 if table.max() * values.shape[1] < 2**24 else np.float64
    table = table.reshape(numbers, -1).astype(exact)
    counts = np.bincount(rows, minlength=numbers) + 0.3  # a number that no row has is expensive, not forbidden
    own = np.rint(-256 * np.log2(counts / counts.sum()))
    moved = np.empty_like(rows)
    width = others * n
    block = max(1, (1 << 21) // max(width, values.shape[1]))
    for start in range(0, len(rows), block):
        part = values[start : start + block]
        joint = (np.arange(len(part))[:, None] * others + cols[None, :]) * n + q + part
        histograms = np.bincount(joint.ravel(), minlength=len(part) * width).reshape(len(part), width)
        costs = np.einsum("rw,nw->rn", histograms.astype(exact), table) + own
        moved[start : start + block] = costs.argmin(axis=1)
    return moved - moved.min()


def _count(values: Integers, rows: Array, cols: Array, q: int) -> Array:
    """(row's number, column's number, symbol): one count from which every division's histograms are sums."""
    n, others = 2 * q + 1, int(cols.max()) + 1
    cells = np.zeros((int(rows.max()) + 1) * others * n, np.int64)
    block = max(1, (1 << 20) // values.shape[1])
    for start in range(0, len(rows), block):
        here = slice(start, start + block)
        joint = (rows[here, None] * others + cols[None, :]) * n + q + values[here]
        cells += np.bincount(joint.ravel(), minlength=cells.size)
    return cells.reshape(-1, others, n)


@dataclass(frozen=True)
class _Classes:
    """A matrix divided into classes, before their models are chosen."""

    rows: Array
    cols: Array
    histograms: Array
    """(classes, symbols)"""

    @classmethod
    def group(cls, cells: Array, rows: Array, cols: Array, row_shift: int, col_shift: int) -> "_Classes":
        """From the counts of `_count` under the numbers before the shifts."""
        numbers, others, n = cells.shape
        of_cell = (np.arange(numbers)[:, None] >> row_shift) + (np.arange(others)[None, :] >> col_shift)
        rows, cols = rows >> row_shift, cols >> col_shift
        classes = find_classes(rows, cols)
        histograms = np.zeros((int(classes.max()) + 1, n), np.int64)
        np.add.at(histograms, classes[of_cell].ravel(), cells.reshape(-1, n))
        return cls(rows, cols, histograms)

    @property
    def least_bits(self) -> float:
        """The entropy of the integers in their classes. No models take less."""
        counts, totals = self.histograms, self.histograms.sum(axis=1)
        return float((totals * np.log2(np.maximum(totals, 1))).sum() - (counts * np.log2(np.maximum(counts, 1))).sum())

    def describe(self, only_decay: bool) -> Division:
        pieces = [*_describe_codes(self.rows), *_describe_codes(self.cols)]
        total, weights = piece_bits(pieces), []
        for histogram in self.histograms:
            cost, model, about = choose_model(histogram, len(histogram) // 2, only_decay=only_decay)
            total += cost
            pieces += about
            weights.append(model)
        return Division(total, pieces, self.rows, self.cols, weights)


def _choose(ways: list[_Classes], only_decay: bool) -> Division:
    """The cheapest of several divisions, the first of equals. A division whose entropy alone is more than another takes is
    not described: that takes most of the time."""
    bounds = [way.least_bits for way in ways]
    found: dict[int, Division] = {}
    for index in sorted(range(len(ways)), key=bounds.__getitem__):
        # a relative tolerance for the sums' rounding
        if all((1 - 1e-9) * bounds[index] <= other.bits for other in found.values()):
            found[index] = ways[index].describe(only_decay)
    return min((found[index] for index in sorted(found)), key=lambda division: division.bits)


def _codes(spread: npt.NDArray[np.float64]) -> Array:
    """A whole number for each spread: 0 for the smallest. If the range is too wide, the smallest ones share 0."""
    codes = np.rint(spread * _STEPS).astype(np.int64)
    codes = np.maximum(codes - codes.max() + CODES - 1, 0)
    return codes - codes.min()


def _describe_codes(codes: Array) -> list[SymbolRun]:
    used = bool(codes.any())
    return [*flat_piece(int(used), 2), *(describe_numbers(codes, CODES) if used else [])]


def find_classes(rows: npt.NDArray[Any], cols: npt.NDArray[Any]) -> Array:
    """The class of each sum of a row's and a column's number: neighbours joined until each class is large enough."""
    sizes = np.convolve(count_values(rows, CODES), count_values(cols, CODES))
    classes, current, filled = np.zeros(len(sizes), np.int64), 0, 0
    rest = int(sizes.sum())
    for index, size in enumerate(sizes.tolist()):
        if filled >= _MIN_CLASS and rest >= _MIN_CLASS and size:
            current, filled = current + 1, 0
        classes[index] = current
        filled += size
        rest -= size
    return classes
