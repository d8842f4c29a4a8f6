"""Integers by lzma, several to a byte where they fit: a general compressor, for comparison with the entropy coder."""

from collections.abc import Sequence

import numpy as np

from parbank.compress import compress, expand
from parbank.quant.coders.base import FREE_WEIGHTS, MAX_WEIGHTS_PER_BYTE, Coder, Integers, entropy_bits
from parbank.quant.coders.fixed import Symbols, to_integers, to_symbols


def encode_tensors(tensors: Sequence[tuple[Integers, int]]) -> bytes | None:
    """Matrices of integers within -q..q as one stream; None if it would exceed the limits of a reader."""
    packed = compress(b"".join(_join(to_symbols(values, q), q) for values, q in tensors))
    if packed is None:
        return None
    # Up to five weights share a byte before lzma, and each becomes four bytes again and takes time.
    count = sum(values.size for values, _ in tensors)
    return packed if count <= max(FREE_WEIGHTS, MAX_WEIGHTS_PER_BYTE * len(packed)) else None


def decode_tensors(body: bytes, shapes: Sequence[tuple[int, int, int]], *, source: str) -> list[tuple[Integers, float]]:
    """Undoes `encode_tensors`. lzma does not report the size of each matrix: bits are divided by empirical entropy."""
    sizes = [-(-rows * cols // _symbols_per_byte(q)) for rows, cols, q in shapes]
    data, position, found = expand(body, sum(sizes), source=source), 0, []
    for (rows, cols, q), size in zip(shapes, sizes):
        symbols = _split(data[position : position + size], rows * cols, q)
        found.append(to_integers(symbols, rows, cols, q, source))
        position += size
    entropies = [entropy_bits(values) for values in found]
    factor = 8 * len(body) / max(sum(entropies), 1.0)
    return [(values, factor * bits) for values, bits in zip(found, entropies)]


# The margin is what lzma takes above the entropy of Gaussian integers, about.
LZMA = Coder(name="lzma", tag=1, margin=1.025, encode=encode_tensors, decode=decode_tensors)


def _symbols_per_byte(q: int) -> int:
    """How many symbols of 0..2q fit one byte as digits. At 4 bits lzma then codes two at once, in fewer bytes."""
    digits, levels = 1, 2 * q + 1
    while levels ** (digits + 1) <= 256:
        digits += 1
    return digits


def _join(symbols: Symbols, q: int) -> bytes:
    digits = _symbols_per_byte(q)
    if digits == 1:
        return symbols.tobytes()
    groups = np.pad(symbols, (0, -symbols.size % digits)).reshape(-1, digits)
    weights = (2 * q + 1) ** np.arange(digits)
    return (groups @ weights).astype(np.uint8).tobytes()


def _split(data: bytes, count: int, q: int) -> Symbols:
    digits, rest = _symbols_per_byte(q), np.frombuffer(data, np.uint8)
    if digits == 1:
        return rest
    symbols = np.empty((rest.size, digits), np.uint8)
    for digit in range(digits - 1):
        rest, symbols[:, digit] = np.divmod(rest, np.uint8(2 * q + 1))
    symbols[:, -1] = rest  # not reduced: a byte beyond the last combination shows as a symbol above 2q
    return symbols.ravel()[:count]
