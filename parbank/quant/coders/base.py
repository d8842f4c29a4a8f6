"""The interface of a coder: integers to few bytes and back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int8]
Encode = Callable[[Sequence[tuple[Integers, int]]], bytes | None]
Decode = Callable[..., list[tuple[Integers, float]]]

# The limits of a reader, so that a few hostile bytes cannot take much memory or time: so many weights or scales whatever the
# size, and beyond them so many per byte. Writers respect these limits.
FREE_WEIGHTS = 1 << 23
FREE_SCALES = 1 << 20
MAX_WEIGHTS_PER_BYTE = 64

_CHUNK = 1 << 20  # values that are counted at a time: NumPy makes 8 bytes of each


@dataclass(frozen=True, kw_only=True)
class Coder:
    """One way to code the integers of all tensors. A coder is a file here, and a line in `CODERS`."""

    name: str
    """The name in `quant.coder`."""
    tag: int
    """The first byte of its streams, 0 to 255: part of the file format, never given to another coder."""
    margin: float = 1.0
    """Its size over the entropy of Gaussian integers, for the size to expect."""
    encode: Encode
    """Matrices of integers, each with the q of its range -q..q, as bytes; None where no reader would take them."""
    decode: Decode
    """(bytes, [(rows, cols, q), ...], source=...): undoes `encode`. Each matrix comes with the bits it took, or where a
    coder cannot tell, a share of them. `source` names the place in errors."""


def count_values(values: npt.NDArray[np.integer], size: int) -> npt.NDArray[np.int64]:
    """The count of each value from 0 to size - 1."""
    flat, counts = values.ravel(), np.zeros(size, np.int64)
    for start in range(0, flat.size, _CHUNK):
        counts += np.bincount(flat[start : start + _CHUNK], minlength=size)
    return counts


def entropy_bits(values: Integers) -> float:
    """Bits of all values under their own histogram: the bound of a coder without context."""
    counts = count_values(values.ravel().view(np.uint8), 256)
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / max(values.size, 1))).sum())
