"""Streams: integers, scales, float16 numbers and plain bytes in few bytes, and back.

The first byte of a stream names its coding. Each kind has a coding of known size as a fallback, which makes the size
of a file a promise. A reader knows how much a stream must yield before it decodes it.
"""

from collections.abc import Sequence

import numpy as np

from parbank.compress import compress, expand
from parbank.errors import ArtifactError
from parbank.quant.coders import CODERS, READERS, ans
from parbank.quant.coders.fixed import FIXED, fixed_size
from parbank.quant.integers import Halves, Integers

_RAW, _LZMA, _ANS = 0, 1, 3  # the first byte of streams that hold no integers; those of integers have their coder's tag


def fixed_bytes(counts: Sequence[tuple[int, int]]) -> int:
    """The most bytes that `encode_integers` gives for (count, q) of each tensor: fixed width, each from a whole byte on,
    and the byte that names the coding."""
    return 1 + sum(fixed_size(count, q) for count, q in counts)


def encode_integers(tensors: Sequence[tuple[Integers, int]], coder: str = "ans") -> bytes:
    """Matrices of integers within -q..q as a stream: by the named coder, or at fixed width if that is smaller.

    Fixed width makes the size a promise: no weights can exceed it.
    """
    packed = CODERS[coder].encode(tensors)
    if packed is not None and 1 + len(packed) < fixed_bytes([(values.size, q) for values, q in tensors]):
        return bytes([CODERS[coder].tag]) + packed
    packed = FIXED.encode(tensors)
    assert packed is not None
    return bytes([FIXED.tag]) + packed


def decode_integers(
    stream: bytes, shapes: Sequence[tuple[int, int, int]], *, source: str
) -> list[tuple[Integers, float]]:
    """Undoes `encode_integers` for (rows, cols, q) of each, with the bits each one takes of the stream. `source` names the
    place in errors."""
    coding, body = _open(stream, source)
    if coding not in READERS:
        raise ArtifactError.damaged(source, "its integers are not in a known coding")
    return READERS[coding].decode(body, shapes, source=source)


def encode_scales(tensors: Sequence[Halves]) -> bytes:
    """The scales of every tensor, at most one byte plus two per scale. Not negative, finite."""
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
        raise ArtifactError.damaged(source, "its scales are not in a known coding of the right size")
    everything = np.frombuffer(body, "<f2").astype(np.float16)
    if np.signbit(everything).any() or not np.isfinite(everything).all():
        raise ArtifactError.damaged(source, "it holds a scale that is negative or not finite")
    ends = np.cumsum(counts).tolist()
    return [(everything[end - count : end], 16.0 * count) for count, end in zip(counts, ends)]


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
    coding, body = _open(stream, source)
    if coding == _LZMA:
        return expand(body, size, most=most, source=source)
    if coding == _RAW and size in (None, len(body)):
        return body
    raise ArtifactError.damaged(source, "its bytes are not in a known coding of the right size")


def _open(stream: bytes, source: str) -> tuple[int, bytes]:
    if not stream:
        raise ArtifactError.damaged(source, "it is empty")
    return stream[0], stream[1:]
