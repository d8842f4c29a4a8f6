"""Weights as integers and scales, and back.

A row w (or a group of its columns) becomes integers i in -q..q and one float16 scale s with w ~ i * s. The product in
float32 is one rounding of exact operands, so every machine reads the same weights.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parbank.errors import ArtifactError
from parbank.quant.coders.ans import coded_bits
from parbank.quant.coders.base import Integers, entropy_bits

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
_SLICE = 1 << 16  # weights that `dequantise` works on at a time: the sums of so many stay in the cache of one core
MAX_ROTATION = 1 << 18  # columns; a rotation of so many takes a reader 12 MB


@dataclass(frozen=True)
class Quantised:
    """One tensor as integers, with everything needed to restore it."""

    values: Integers
    """(rows, cols), within -q..q."""
    scales: Halves
    """(rows, groups), not negative; 0 for zeros. Group g covers cols / groups columns; one group is a scale per row."""
    q: int
    """1..127."""
    rotation: int = 0
    """Hadamard block, a power of two dividing cols, applied to the columns before quantising; 0: none."""
    low_rank: tuple[Halves, Halves] | None = None
    """(rows, r) and (r, cols): their product is added after the rotation is undone."""


def quantise_rows(
    weights: Floats,
    q: int,
    clip_fractions: tuple[float, ...] = (1.0,),
    *,
    groups: int = 1,
    deviations: float = 0.0,
    exponents: bool = False,
    name: str = "tensor",
) -> Quantised:
    """Rounds each row, or each of its groups of columns, to nearest on its own scale: the clip point with the least
    squared error, or the one at a given number of standard deviations. `exponents`: scales are powers of two.

    NumPy on one core, so that the choice between near-equal clip points does not depend on the number of threads.
    """
    shape, weights = weights.shape, weights.reshape(len(weights) * groups, weights.shape[1] // groups)
    if not np.isfinite(weights).all():
        raise ArtifactError(f"{name} holds values that are not finite; the run diverged, pack an earlier checkpoint")
    largest = np.abs(weights).max(axis=1, initial=0.0)
    if deviations:
        clip_fractions, largest = (1.0,), np.minimum(largest, np.float32(deviations) * weights.std(axis=1))
    scales = _scales(largest, q, exponents)
    if not np.isfinite(scales).all():
        raise ArtifactError(
            f"{name} holds {largest.max():.3g}, too large for a float16 scale (at most {65504 * q:,} in -{q}..{q}); "
            f"the run diverged, pack an earlier checkpoint"
        )
    values, error = _round(weights, scales, q)
    for fraction in clip_fractions:
        if fraction >= 1.0:
            continue  # done above: the full range is always a candidate
        tried_scales = _scales(largest * np.float32(fraction), q, exponents)
        tried, tried_error = _round(weights, tried_scales, q)
        better = tried_error < error
        values[better], scales[better], error[better] = tried[better], tried_scales[better], tried_error[better]
    return Quantised(values=values.reshape(shape), scales=scales.reshape(shape[0], groups), q=q)


def dequantise_with_entropy(quantised: Quantised) -> tuple[Floats, float]:
    """The same weights as `dequantise`, and the bits of their integers under their own histogram."""
    return dequantise(quantised), entropy_bits(quantised.values)


def dequantise(quantised: Quantised, out: Floats | None = None) -> Floats:
    """The weights that evaluation uses, bit for bit the same on every machine; written to `out` (rows, cols) if given.

    integer * scale is one rounding. The rotation is undone by additions in float64 in a fixed order and an exact
    power of two. The low-rank product is summed rank by rank in float64. A few rows at a time, or whole blocks of a long
    row, stay in the cache.
    """
    rows, cols = quantised.values.shape
    weights = np.empty((rows, cols), np.float32) if out is None else out
    step = max(_SLICE // max(cols, 1), 1)
    block = max(quantised.rotation, 1)
    width = max(_SLICE // block, 1) * block
    for top in range(0, rows, step):
        for left in range(0, cols, width):
            here, columns = slice(top, top + step), slice(left, left + width)
            values, scales = quantised.values[here, columns], _scales_of(quantised, here, columns)
            if not quantised.rotation and quantised.low_rank is None:
                weights[here, columns] = _multiply(values, scales)
                continue
            wide = _turn_back(values, scales, quantised.rotation)
            if quantised.low_rank is not None:
                _add_product(wide, quantised.low_rank[0][here], quantised.low_rank[1][:, columns])
            weights[here, columns] = wide
    return weights


def _scales_of(quantised: Quantised, rows: slice, columns: slice) -> Floats:
    """The scales of some rows: those of the groups, or one for each column where only some of the columns are taken."""
    scales, cols = quantised.scales[rows].astype(np.float32), quantised.values.shape[1]
    start, stop, _ = columns.indices(cols)
    if scales.shape[1] == 1 or stop - start == cols:
        return scales
    return scales[:, np.arange(start, stop) // (cols // scales.shape[1])]


def _add_product(wide: npt.NDArray[np.float64], left: Halves, right: Halves) -> None:
    tall, product = left.astype(np.float64), np.empty_like(wide)
    for rank, row in enumerate(right):
        np.multiply(tall[:, rank, None], row.astype(np.float64), out=product)
        wide += product


def _multiply(values: Integers, scales: Floats) -> Floats:
    rows, groups = scales.shape
    grouped = values.reshape(rows, groups, values.shape[1] // groups).astype(np.float32)
    grouped *= scales[:, :, None]
    return grouped.reshape(values.shape)


def _turn_back(values: Integers, scales: Floats, rotation: int) -> npt.NDArray[np.float64]:
    """The weights before the low-rank product, in float64, as sums of float64 products would give them.

    With one scale a row those sums are exact: integer multiples of an 11-bit scale, of 7 + log2(rotation) bits. So
    integers can be added first and multiplied once, which is exact too and several times faster. (A scale of 0 makes
    zeros of either sign, which integers do not have.)
    """
    largest = max(int(values.max(initial=0)), -int(values.min(initial=0))) * max(rotation, 1)
    if not rotation or scales.shape[1] > 1 or largest >= 2**31 or values[scales[:, 0] == 0].any():
        wide = _multiply(values, scales).astype(np.float64)
        return butterfly(wide, rotation) / rotation if rotation else wide
    whole = np.int16 if largest < 2**15 else np.int32
    sums = butterfly(values.astype(whole), rotation)
    return np.multiply(sums, scales.astype(np.float64) / rotation, order="C")


def butterfly(x: npt.NDArray[Any], block: int) -> npt.NDArray[Any]:
    """x times the Hadamard matrix of ones and minus ones (Sylvester's order) on every block of columns.

    Columns are the first dimension, so that additions run over contiguous memory, even for neighbouring columns.
    """
    rows, cols = x.shape
    found = np.array(x.T, order="C")
    spare, half = np.empty_like(found), 1
    while half < block:
        old, new = (side.reshape(cols // (2 * half), 2, half * rows) for side in (found, spare))
        np.add(old[:, 0], old[:, 1], out=new[:, 0])
        np.subtract(old[:, 0], old[:, 1], out=new[:, 1])
        found, spare, half = spare, found, 2 * half
    return found.T


def recover(weights: Floats) -> Quantised | None:
    """The integers and scales that dequantise to exactly these weights, one scale a row, rotated or not; None if there
    are none. If both ways succeed, the one with fewer bits is the way they were stored."""
    block = weights.shape[1] & -weights.shape[1]  # the largest power of two that divides the columns
    plain, turned = _recover(weights, 0), _recover(weights, block) if block > 1 else None
    if plain is None or turned is None:
        return plain or turned
    return min(plain, turned, key=lambda found: coded_bits(found.values, found.q))


def _recover(weights: Floats, rotation: int) -> Quantised | None:
    wide = weights.astype(np.float64)
    if rotation:
        wide = np.ascontiguousarray(butterfly(wide, rotation))
    grid = _find_grid(wide, tolerance=1e-4 if rotation else 0.0)  # float32 and a rotation round off 2e-5 of a step
    if grid is None:
        return None
    values, scales = grid
    found = Quantised(values, scales[:, None], max(int(np.abs(values).max(initial=0)), 1), rotation)
    return found if np.array_equal(dequantise(found), weights) else None


def _find_grid(wide: npt.NDArray[np.float64], tolerance: float) -> tuple[Integers, Halves] | None:
    """Integers within -127..127 and a scale for each row whose products are the row, within `tolerance` of a scale.

    A row's largest weight is k times its scale for some k up to 127. Every k is tried; the least that fits makes the
    integers small.
    """
    largest = np.abs(wide).max(axis=1, initial=0.0)
    values, scales = np.zeros(wide.shape, np.int8), np.zeros(largest.shape, np.float16)
    some = np.ascontiguousarray(wide[:, :: -(-wide.shape[1] // 16)])  # 16 columns rule out nearly every k
    open_rows = np.flatnonzero(largest)
    for k in range(1, 128):
        with np.errstate(over="ignore"):
            tried = (largest[open_rows] / k).astype(np.float16)
        likely = (tried > 0) & np.isfinite(tried)
        rows, steps = open_rows[likely], tried[likely]
        _, near = _find_multiples(some[rows], steps, tolerance)
        rows, steps = rows[near], steps[near]
        integers, fits = _find_multiples(wide[rows], steps, tolerance)
        values[rows[fits]], scales[rows[fits]] = integers[fits].astype(np.int8), steps[fits]
        open_rows = np.setdiff1d(open_rows, rows[fits], assume_unique=True)
    return None if open_rows.size else (values, scales)


def _find_multiples(
    wide: npt.NDArray[np.float64], scales: Halves, tolerance: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """The nearest integers, and which rows they are within -127..127 and `tolerance` of."""
    steps = scales.astype(np.float64)[:, None]
    integers = np.rint(wide / steps)
    fits = (np.abs(integers * steps - wide) <= tolerance * steps).all(axis=1)
    return integers, fits & (np.abs(integers).max(axis=1, initial=0.0) <= 127)


def to_half(weights: Floats, *, name: str = "tensor") -> Halves:
    """Converts to float16, and refuses values that it cannot hold."""
    with np.errstate(over="ignore"):
        halves = weights.astype(np.float16)
    if not np.isfinite(halves).all():
        largest = np.abs(weights).max(initial=0.0)
        raise ArtifactError(
            f"{name} holds {largest:.3g}, which float16 cannot (finite, at most 65,504); "
            f"the run diverged, pack an earlier checkpoint"
        )
    return halves


def _scales(largest: Floats, q: int, exponents: bool) -> Halves:
    """Scales with scale * q >= largest. If float16 rounds down, the scale is raised, which also lifts an underflow to
    the smallest subnormal, 2^-24. Only a row of zeros gets 0."""
    with np.errstate(over="ignore"):
        scales = (largest / np.float32(q)).astype(np.float16)
    short = scales.astype(np.float32) * np.float32(q) < largest
    scales[short] = np.nextafter(scales[short], np.float16(np.inf))
    if exponents:
        mantissas, powers = np.frexp(scales.astype(np.float32))  # in 0.5..1: at 0.5 it is a power of two already
        with np.errstate(over="ignore"):
            scales = np.where(mantissas > 0, np.ldexp(1.0, powers - (mantissas == 0.5)), 0.0).astype(np.float16)
    return scales


def _round(weights: Floats, scales: Halves, q: int) -> tuple[Integers, Floats]:
    """The nearest integers within -q..q and the squared error of each row."""
    wide = scales.astype(np.float32)[:, None]
    integers = weights / np.where(wide > 0, wide, np.float32(1))
    np.rint(integers, out=integers)
    np.clip(integers, -q, q, out=integers)
    residual = integers * wide
    residual -= weights
    return integers.astype(np.int8), np.einsum("ij,ij->i", residual, residual)
