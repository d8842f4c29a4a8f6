"""Weights as integers per row, and integers as few bytes.

A row w becomes integers i in -q..q and one float16 scale s with w ~ i * s. The product is taken in float32, where it is
a single rounding of exact operands: every machine reads the same weights.
"""

import lzma
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parbank.errors import ArtifactError

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int8]
Halves = npt.NDArray[np.float16]

# Weights are noise to lzma: there is nothing to find in a dictionary, and a large one makes it pay for false finds.
# On Gaussian weights at 6 bits preset 9e takes 5.459 bits each and these filters 5.439 in a quarter of the time; at 4
# bits 3.458 and 3.236, two integers to a byte (docs/quantisation.md). lc = lp = pb = 0: neighbours say nothing either.
_FILTERS = [
    {
        "id": lzma.FILTER_LZMA2,
        "preset": 9 | lzma.PRESET_EXTREME,
        "dict_size": 1 << 12,
        "lc": 0,
        "lp": 0,
        "pb": 0,
        "mode": lzma.MODE_NORMAL,
        "mf": lzma.MF_BT4,
        "depth": 1,
    }
]
_CHUNK = 1 << 18  # symbols spread to a byte per bit at a time; a multiple of 8, so that chunks end on whole bytes
_RAW, _LZMA, _FIXED = 0, 1, 2  # first byte of a stream: how the rest is coded
# What a stream may expand to, so that a few hostile bytes cannot fill the memory: 16 MiB, or 32 times its own size.
# The writer keeps to it, because at fixed width 1 to 4 weights share a byte.
_FREE_EXPANSION = 1 << 24
_MAX_EXPANSION = 32


@dataclass(frozen=True)
class Quantised:
    """One tensor as integers, with what is needed to undo it."""

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
    weights: Floats, q: int, clip_fractions: tuple[float, ...] = (1.0,), *, name: str = "tensor"
) -> Quantised:
    """Rounds each row to nearest on its own scale: of the clip points given, the one with the least squared error.

    NumPy on one core, so that the choice between near-equal clip points does not hang on the number of threads.
    """
    if not np.isfinite(weights).all():
        raise ArtifactError(f"{name} holds values that are not finite; the run diverged, pack an earlier checkpoint")
    largest = np.abs(weights).max(axis=1, initial=0.0)
    scales = _scales(largest, q)
    if not np.isfinite(scales).all():
        raise ArtifactError(
            f"{name} holds {largest.max():.3g}, too large for a float16 scale (at most {65504 * q:,} in -{q}..{q}); "
            f"the run diverged, pack an earlier checkpoint"
        )
    values, error = _round(weights, scales, q)
    for fraction in clip_fractions:
        if fraction >= 1.0:
            continue  # done above: the full range is always a candidate
        tried_scales = _scales(largest * np.float32(fraction), q)
        tried, tried_error = _round(weights, tried_scales, q)
        better = tried_error < error
        values[better], scales[better], error[better] = tried[better], tried_scales[better], tried_error[better]
    return Quantised(values=values, scales=scales[:, None], q=q)


def dequantise(quantised: Quantised) -> Floats:
    """The weights that evaluation uses, bit for bit the same on every machine.

    integer * scale is one rounding; the rotation is undone by additions in float64 in a fixed order and an exact power
    of two; the low-rank product is summed rank by rank in float64.
    """
    rows, cols = quantised.values.shape
    groups = quantised.scales.shape[1]
    grouped = quantised.values.reshape(rows, groups, cols // groups).astype(np.float32)
    weights = (grouped * quantised.scales.astype(np.float32)[:, :, None]).reshape(rows, cols)
    if not quantised.rotation and quantised.low_rank is None:
        return weights
    wide = weights.astype(np.float64)
    if quantised.rotation:
        wide = butterfly(wide, quantised.rotation) / quantised.rotation
    if quantised.low_rank is not None:
        left, right = (factor.astype(np.float64) for factor in quantised.low_rank)
        for rank in range(left.shape[1]):
            wide += left[:, rank, None] * right[rank]
    return wide.astype(np.float32)


def butterfly(x: npt.NDArray[np.float64], block: int) -> npt.NDArray[np.float64]:
    """x times the Hadamard matrix of ones and minus ones (Sylvester's order) on every block of columns."""
    rows, cols = x.shape
    half = 1
    while half < block:
        pairs = x.reshape(rows, cols // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        x = np.stack([first + second, first - second], axis=2).reshape(rows, cols)
        half *= 2
    return x


def dequantise_rows(quantised: Quantised) -> Floats:
    """`dequantise` under its first name."""
    return dequantise(quantised)


def to_half(weights: Floats, *, name: str = "tensor") -> Halves:
    """float16, refusing what it cannot hold."""
    with np.errstate(over="ignore"):
        halves = weights.astype(np.float16)
    if not np.isfinite(halves).all():
        largest = np.abs(weights).max(initial=0.0)
        raise ArtifactError(
            f"{name} holds {largest:.3g}, which float16 cannot (finite, at most 65,504); "
            f"the run diverged, pack an earlier checkpoint"
        )
    return halves


def _scales(largest: Floats, q: int) -> Halves:
    """Scales with scale * q >= largest. Where float16 rounds down it is pushed up, which also lifts an underflow to the
    smallest subnormal, 2^-24; only a row of zeros gets 0."""
    with np.errstate(over="ignore"):
        scales = (largest / np.float32(q)).astype(np.float16)
    short = scales.astype(np.float32) * np.float32(q) < largest
    scales[short] = np.nextafter(scales[short], np.float16(np.inf))
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


def integer_bits(q: int) -> int:
    """Bits that hold one of the 2q+1 integers at fixed width."""
    return (2 * q).bit_length()


def fixed_bytes(count: int, q: int) -> int:
    """The most bytes `encode_integers` ever gives: fixed width and the byte that names the coding."""
    return 1 + -(-count * integer_bits(q) // 8)


def entropy_bits(values: Integers) -> float:
    """Bits of all values together under their own histogram: the bound of a coder that sees no context."""
    counts = np.bincount(values.ravel().view(np.uint8), minlength=1)
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / max(values.size, 1))).sum())


def encode_integers(values: Integers, q: int) -> bytes:
    """Integers within -q..q as a stream: entropy-coded by lzma, or at fixed width where that is smaller.

    Fixed width is what makes the size a promise: no weights whatever can exceed it.
    """
    symbols = (values.ravel().astype(np.int16) + q).astype(np.uint8)
    fixed = fixed_bytes(symbols.size, q)
    joined = _join(symbols, q)
    packed = lzma.compress(joined, format=lzma.FORMAT_RAW, filters=_FILTERS)
    if 1 + len(packed) < fixed and _may_expand(len(packed), len(joined)):
        return bytes([_LZMA]) + packed
    return bytes([_FIXED]) + _pack_fixed(symbols, integer_bits(q))


def decode_integers(stream: bytes, count: int, q: int, *, source: str) -> Integers:
    """Undoes `encode_integers`; `source` names the file and section in errors."""
    coding, body = _open(stream, source)
    if coding == _LZMA:
        symbols = _split(_expand(body, -(-count // _symbols_per_byte(q)), source), count, q)
    elif coding == _FIXED and len(stream) == fixed_bytes(count, q):
        symbols = _unpack_fixed(body, count, integer_bits(q))
    else:
        raise _damaged(source, "its integers are not in a known coding of the right size")
    if symbols.size and int(symbols.max()) > 2 * q:
        raise _damaged(source, f"it holds an integer outside -{q}..{q}")
    return (symbols.astype(np.int16) - q).astype(np.int8)


def encode_halves(halves: Halves) -> bytes:
    """float16 numbers as a stream. Upper bytes (sign, exponent) repeat and lower ones don't: lzma gets them apart."""
    planes = np.ascontiguousarray(halves.astype("<f2").ravel().view(np.uint8).reshape(-1, 2).T)
    return encode_bytes(planes.tobytes())


def decode_halves(stream: bytes, count: int, *, source: str) -> Halves:
    """Undoes `encode_halves`."""
    planes = np.frombuffer(decode_bytes(stream, 2 * count, source=source), np.uint8).reshape(2, count)
    halves = np.ascontiguousarray(planes.T).view("<f2").reshape(count).astype(np.float16)
    if not np.isfinite(halves).all():
        raise _damaged(source, "it holds numbers that are not finite")
    return halves


def encode_bytes(data: bytes) -> bytes:
    """Any bytes as a stream, never more than one byte longer than they are."""
    packed = lzma.compress(data, format=lzma.FORMAT_RAW, filters=_FILTERS)
    if len(packed) < len(data) and _may_expand(len(packed), len(data)):
        return bytes([_LZMA]) + packed
    return bytes([_RAW]) + data


def decode_bytes(stream: bytes, size: int | None, *, source: str) -> bytes:
    """Undoes `encode_bytes`. Without an expected size, anything the expansion limit allows is taken."""
    coding, body = _open(stream, source)
    if coding == _LZMA:
        return _expand(body, size, source)
    if coding == _RAW and size in (None, len(body)):
        return body
    raise _damaged(source, "its bytes are not in a known coding of the right size")


def _symbols_per_byte(q: int) -> int:
    """How many symbols of 0..2q fit one byte as digits. At 4 bits lzma then codes two at once: 3% to 4% smaller."""
    digits, levels = 1, 2 * q + 1
    while levels ** (digits + 1) <= 256:
        digits += 1
    return digits


def _join(symbols: npt.NDArray[np.uint8], q: int) -> bytes:
    digits = _symbols_per_byte(q)
    if digits == 1:
        return symbols.tobytes()
    groups = np.pad(symbols, (0, -symbols.size % digits)).reshape(-1, digits)
    weights = (2 * q + 1) ** np.arange(digits)
    return (groups @ weights).astype(np.uint8).tobytes()


def _split(data: bytes, count: int, q: int) -> npt.NDArray[np.uint8]:
    digits, rest = _symbols_per_byte(q), np.frombuffer(data, np.uint8)
    if digits == 1:
        return rest
    symbols = np.empty((rest.size, digits), np.uint8)
    for digit in range(digits - 1):
        rest, symbols[:, digit] = np.divmod(rest, np.uint8(2 * q + 1))
    symbols[:, -1] = rest  # not reduced: a byte beyond the last combination shows as a symbol above 2q
    return symbols.ravel()[:count]


def _pack_fixed(symbols: npt.NDArray[np.uint8], width: int) -> bytes:
    """The lowest `width` bits of each symbol, one after the other, the highest first."""
    chunks = (symbols[start : start + _CHUNK, None] for start in range(0, symbols.size, _CHUNK))
    return b"".join(np.packbits(np.unpackbits(chunk, axis=1)[:, 8 - width :]).tobytes() for chunk in chunks)


def _unpack_fixed(body: bytes, count: int, width: int) -> npt.NDArray[np.uint8]:
    packed, symbols = np.frombuffer(body, np.uint8), np.empty(count, np.uint8)
    for start in range(0, count, _CHUNK):
        here = min(_CHUNK, count - start)
        bits = np.zeros((here, 8), np.uint8)
        bits[:, 8 - width :] = np.unpackbits(packed[start * width // 8 :], count=here * width).reshape(here, width)
        symbols[start : start + here] = np.packbits(bits)
    return symbols


def _may_expand(packed: int, size: int) -> bool:
    return size <= max(_FREE_EXPANSION, _MAX_EXPANSION * packed)


def _open(stream: bytes, source: str) -> tuple[int, bytes]:
    if not stream:
        raise _damaged(source, "it is empty")
    return stream[0], stream[1:]


def _expand(body: bytes, size: int | None, source: str) -> bytes:
    """lzma, stopped as soon as it gives more than was announced or than the expansion limit allows."""
    limit = max(_FREE_EXPANSION, _MAX_EXPANSION * len(body)) if size is None else size
    if not _may_expand(len(body), limit):
        raise _damaged(source, f"it claims to hold {limit:,} bytes in {len(body):,}")
    decoder = lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=_FILTERS)
    try:
        data = decoder.decompress(body, max_length=limit + 1)
    except lzma.LZMAError:
        raise _damaged(source, "its compressed data is broken") from None
    if not decoder.eof or decoder.unused_data or len(data) > limit or size not in (None, len(data)):
        raise _damaged(source, "its compressed data has the wrong length")
    return data


def _damaged(source: str, what: str) -> ArtifactError:
    return ArtifactError(
        f"{source} is damaged: {what}; copy or download it again, or write it anew with `parbank pack`"
    )
