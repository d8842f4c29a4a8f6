"""Streams of float16 numbers and of plain bytes, and back; parbank.quant.streams has those of integers and scales.

The first byte of a stream names its coding. A coding of known size is the fallback, which makes the size of a file a
promise. A reader knows how much a stream must yield before it decodes it.
"""

import numpy as np

from parbank.compress import compress, expand
from parbank.errors import ArtifactError
from parbank.quant.integers import Halves

_RAW, _LZMA = 0, 1  # the first byte of a stream


def encode_halves(halves: Halves) -> bytes:
    """float16 numbers as a stream. Upper bytes (sign, exponent) repeat and lower ones do not, so lzma gets them
    separately."""
    planes = np.ascontiguousarray(halves.astype("<f2").ravel().view(np.uint8).reshape(-1, 2).T)
    return encode_bytes(planes.tobytes())


def decode_halves(stream: bytes, count: int, *, source: str) -> Halves:
    """Undoes `encode_halves`."""
    planes = np.frombuffer(decode_bytes(stream, 2 * count, source=source), np.uint8).reshape(2, count)
    halves = np.ascontiguousarray(planes.T).view("<f2").reshape(count).astype(np.float16, copy=False)
    if not np.isfinite(halves).all():
        raise ArtifactError.damaged(source, "it holds numbers that are not finite")
    return halves


def encode_bytes(data: bytes) -> bytes:
    """Any bytes as a stream, never more than one byte longer than they are."""
    packed = compress(data)
    if packed is not None and len(packed) < len(data):
        return bytes([_LZMA]) + packed
    return bytes([_RAW]) + data


def decode_bytes(stream: bytes, size: int | None, *, most: int | None = None, source: str) -> bytes:
    """Undoes `encode_bytes`. Without an expected size, accepts anything up to `most` and within the expansion limit."""
    if not stream:
        raise ArtifactError.damaged(source, "it is empty")
    coding, body = stream[0], stream[1:]
    if coding == _LZMA:
        return expand(body, size, most=most, source=source)
    if coding == _RAW and size in (None, len(body)):
        return body
    raise ArtifactError.damaged(source, "its bytes are not in a known coding of the right size")
