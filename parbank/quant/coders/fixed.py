"""Integers at fixed width: the fallback coding, whose size is known before there are any weights."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from parbank.errors import ArtifactError
from parbank.quant.coders.base import Coder, Integers

Symbols = npt.NDArray[np.uint8]

_CHUNK = 1 << 18  # symbols spread to a byte per bit at a time; a multiple of 8, so that chunks end on whole bytes


def integer_bits(q: int) -> int:
    """Bits that hold one of the 2q+1 integers."""
    return (2 * q).bit_length()


def fixed_size(count: int, q: int) -> int:
    """Bytes of so many integers within -q..q."""
    return -(-count * integer_bits(q) // 8)


def encode_tensors(tensors: Sequence[tuple[Integers, int]]) -> bytes:
    """Every matrix from a whole byte on."""
    return b"".join(_pack(to_symbols(values, q), integer_bits(q)) for values, q in tensors)


def decode_tensors(body: bytes, shapes: Sequence[tuple[int, int, int]], *, source: str) -> list[tuple[Integers, float]]:
    """Undoes `encode_tensors`, with the bits of each."""
    sizes = [fixed_size(rows * cols, q) for rows, cols, q in shapes]
    if len(body) != sum(sizes):
        raise ArtifactError.damaged(source, f"its integers take {len(body):,} bytes, not {sum(sizes):,}")
    found, position = [], 0
    for (rows, cols, q), size in zip(shapes, sizes):
        symbols = _unpack(body[position : position + size], rows * cols, integer_bits(q))
        found.append((to_integers(symbols, rows, cols, q, source), 8.0 * size))
        position += size
    return found


FIXED = Coder(name="fixed", tag=2, encode=encode_tensors, decode=decode_tensors)


def to_symbols(values: Integers, q: int) -> Symbols:
    """0..2q, in one line."""
    return (values.ravel().astype(np.int16) + q).astype(np.uint8)


def to_integers(symbols: Symbols, rows: int, cols: int, q: int, source: str) -> Integers:
    """Undoes `to_symbols`."""
    if symbols.size and int(symbols.max()) > 2 * q:
        raise ArtifactError.damaged(source, f"it holds an integer outside -{q}..{q}")
    return (symbols - np.uint8(q)).view(np.int8).reshape(rows, cols)  # modulo 256, which is what int8 counts by


def _pack(symbols: Symbols, width: int) -> bytes:
    """The lowest `width` bits of each symbol, one after the other, the highest first."""
    chunks = (symbols[start : start + _CHUNK, None] for start in range(0, symbols.size, _CHUNK))
    return b"".join(np.packbits(np.unpackbits(chunk, axis=1)[:, 8 - width :]).tobytes() for chunk in chunks)


def _unpack(body: bytes, count: int, width: int) -> Symbols:
    packed, symbols = np.frombuffer(body, np.uint8), np.empty(count, np.uint8)
    for start in range(0, count, _CHUNK):
        here = min(_CHUNK, count - start)
        bits = np.zeros((here, 8), np.uint8)
        bits[:, 8 - width :] = np.unpackbits(packed[start * width // 8 :], count=here * width).reshape(here, width)
        symbols[start : start + here] = np.packbits(bits)
    return symbols
