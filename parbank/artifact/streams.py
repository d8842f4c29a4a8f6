"""Streams: integers, scales, float16 numbers and plain bytes as few bytes, and back.

The first byte of a stream names its coding. Every kind has a coding of known size to fall back to, which is what makes
the size of a file a promise. A reader knows how much a stream must give before it decodes any of it.
"""

import lzma
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from parbank.errors import ArtifactError
from parbank.quant.coders import ans
from parbank.quant.integers import Halves, Integers

Coder = Literal["ans", "lzma"]

# Weights are noise to lzma: there is nothing to find in a dictionary, and a large one makes it pay for false finds.
# On Gaussian weights at 6 bits preset 9e takes 5.459 bits each and these filters 5.439 in a quarter of the time; at 4
# bits 3.458 and 3.236, two integers to a byte (docs/log). lc = lp = pb = 0: neighbours say nothing either.
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
_RAW, _LZMA, _FIXED, _ANS = 0, 1, 2, 3  # first byte of a stream: how the rest is coded
# What lzma may expand to, so that a few hostile bytes cannot fill the memory: 16 MiB, or 32 times its own size.
# The writer keeps to it, because at fixed width 1 to 4 weights share a byte. (For _ANS see ans.py.)
_FREE_EXPANSION = 1 << 24
_MAX_EXPANSION = 32
_FREE_WEIGHTS = 1 << 23  # up to five weights share a byte before lzma, and each becomes four bytes and takes time


def integer_bits(q: int) -> int:
    """Bits that hold one of the 2q+1 integers at fixed width."""
    return (2 * q).bit_length()


def fixed_bytes(counts: Sequence[tuple[int, int]]) -> int:
    """The most bytes `encode_integers` ever gives for (count, q) of each tensor: fixed width, each from a whole byte on,
    and the byte that names the coding."""
    return 1 + sum(_fixed_size(count, q) for count, q in counts)


def may_hold(packed: int, count: int) -> bool:
    """Whether a reader believes that a file holds so many weights in so many bytes of integers, however coded."""
    return ans.may_expand(packed, count, free=_FREE_WEIGHTS)


def entropy_bits(values: Integers) -> float:
    """Bits of all values together under their own histogram: the bound of a coder that sees no context."""
    counts = np.bincount(values.ravel().view(np.uint8), minlength=1)
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / max(values.size, 1))).sum())


def encode_integers(tensors: Sequence[tuple[Integers, int]], coder: Coder = "ans") -> bytes:
    """Matrices of integers within -q..q as a stream: entropy-coded, or at fixed width where that is smaller.

    Fixed width is what makes the size a promise: no weights whatever can exceed it.
    """
    packed = bytes([_ANS]) + ans.encode_tensors(tensors) if coder == "ans" else _encode_lzma(tensors)
    if packed is not None and len(packed) < fixed_bytes([(values.size, q) for values, q in tensors]):
        return packed
    return bytes([_FIXED]) + b"".join(_pack_fixed(_symbols(values, q), integer_bits(q)) for values, q in tensors)


def decode_integers(
    stream: bytes, shapes: Sequence[tuple[int, int, int]], *, source: str
) -> list[tuple[Integers, float]]:
    """Undoes `encode_integers` for (rows, cols, q) of each, with the bits each one takes of the stream: exact, but for
    lzma, which does not say: there they are shared out by empirical ans. `source` names the place in errors."""
    coding, body = _open(stream, source)
    sizes = [_fixed_size(rows * cols, q) for rows, cols, q in shapes]
    if coding == _ANS:
        return ans.decode_tensors(body, shapes, source=source)
    if coding == _LZMA:
        symbols = _decode_lzma(body, shapes, source)
    elif coding == _FIXED and len(body) == sum(sizes):
        ends = np.cumsum(sizes).tolist()
        symbols = [
            _unpack_fixed(body[end - size : end], rows * cols, integer_bits(q))
            for (rows, cols, q), size, end in zip(shapes, sizes, ends)
        ]
    else:
        raise _damaged(source, "its integers are not in a known coding of the right size")
    found = [_integers(s, rows, cols, q, source) for s, (rows, cols, q) in zip(symbols, shapes)]
    if coding == _FIXED:
        return [(values, 8.0 * size) for values, size in zip(found, sizes)]
    entropies = [entropy_bits(values) for values in found]
    factor = 8 * len(body) / max(sum(entropies), 1.0)
    return [(values, factor * bits) for values, bits in zip(found, entropies)]


def encode_scales(tensors: Sequence[Halves]) -> bytes:
    """The scales of every tensor, never more than a byte and two for each. Not negative, finite."""
    packed, count = ans.encode_scales(tensors), sum(scales.size for scales in tensors)
    if packed is not None and len(packed) < 2 * count:
        return bytes([_ANS]) + packed
    return bytes([_RAW]) + b"".join(scales.astype("<f2").tobytes() for scales in tensors)


def decode_scales(stream: bytes, counts: Sequence[int], *, source: str) -> list[tuple[Halves, float]]:
    """Undoes `encode_scales`, with the bits of each tensor's."""
    coding, body = _open(stream, source)
    if coding == _ANS:
        return ans.decode_scales(body, counts, source=source)
    if coding != _RAW or len(body) != 2 * sum(counts):
        raise _damaged(source, "its scales are not in a known coding of the right size")
    everything = np.frombuffer(body, "<f2").astype(np.float16)
    if np.signbit(everything).any() or not np.isfinite(everything).all():
        raise _damaged(source, "it holds a scale that is negative or not finite")
    ends = np.cumsum(counts).tolist()
    return [(everything[end - count : end], 16.0 * count) for count, end in zip(counts, ends)]


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


def _encode_lzma(tensors: Sequence[tuple[Integers, int]]) -> bytes | None:
    joined = b"".join(_join(_symbols(values, q), q) for values, q in tensors)
    packed = lzma.compress(joined, format=lzma.FORMAT_RAW, filters=_FILTERS)
    sound = _may_expand(len(packed), len(joined)) and may_hold(len(packed), sum(values.size for values, _ in tensors))
    return bytes([_LZMA]) + packed if sound else None


def _decode_lzma(body: bytes, shapes: Sequence[tuple[int, int, int]], source: str) -> list[npt.NDArray[np.uint8]]:
    counts = [(rows * cols, q) for rows, cols, q in shapes]
    sizes = [-(-count // _symbols_per_byte(q)) for count, q in counts]
    data, position, found = _expand(body, sum(sizes), source), 0, []
    for (count, q), size in zip(counts, sizes):
        found.append(_split(data[position : position + size], count, q))
        position += size
    return found


def _symbols(values: Integers, q: int) -> npt.NDArray[np.uint8]:
    return (values.ravel().astype(np.int16) + q).astype(np.uint8)


def _integers(symbols: npt.NDArray[np.uint8], rows: int, cols: int, q: int, source: str) -> Integers:
    if symbols.size and int(symbols.max()) > 2 * q:
        raise _damaged(source, f"it holds an integer outside -{q}..{q}")
    return (symbols.astype(np.int16) - q).astype(np.int8).reshape(rows, cols)


def _fixed_size(count: int, q: int) -> int:
    return -(-count * integer_bits(q) // 8)


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
