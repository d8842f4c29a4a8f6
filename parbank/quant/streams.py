"""Quantised tensors as two streams, one of integers and one of scales, and back.

The first byte of a stream names its coding. Both kinds have a coding of known size as a fallback, which makes the size
of a file a promise. A reader knows how much a stream must yield before it decodes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parbank.errors import ArtifactError, ConfigError
from parbank.quant.coders import CODERS, ans, find_reader
from parbank.quant.coders.fixed import FIXED, fixed_size
from parbank.quant.integers import Halves, Integers, Quantised

_RAW, _ANS = 0, 3  # the first byte of a stream of scales; a stream of integers has the tag of its coder


@dataclass(frozen=True)
class Decoded:
    """One tensor of the two streams, with the bits that it takes of each."""

    values: Integers
    """(rows, cols)"""
    integer_bits: float
    scales: Halves
    """(rows, groups)"""
    scale_bits: float


def encode_quantised(tensors: Sequence[Quantised], coder: str = "ans") -> tuple[bytes, bytes]:
    """The integers and the scales of all tensors: one stream each."""
    integers = encode_integers([(tensor.values, tensor.q) for tensor in tensors], coder)
    return integers, encode_scales([tensor.scales for tensor in tensors])


def decode_quantised(
    integers: bytes, scales: bytes, shapes: Sequence[tuple[int, int, int, int]], *, source: str
) -> list[Decoded]:
    """Undoes `encode_quantised` for (rows, cols, q, groups) of each tensor. `source` names the file in errors."""
    values = decode_integers(integers, [shape[:3] for shape in shapes], source=f"{source} (integers)")
    counts = [rows * groups for rows, _, _, groups in shapes]
    factors = decode_scales(scales, counts, source=f"{source} (scales)")
    return [
        Decoded(own, bits, factor.reshape(-1, groups), side)
        for (own, bits), (factor, side), (_, _, _, groups) in zip(values, factors, shapes)
    ]


def fixed_bytes(counts: Sequence[tuple[int, int]]) -> int:
    """The most bytes that `encode_integers` gives for (count, q) of each tensor: the byte that names the coding, then fixed
    width, with each tensor padded to a whole byte."""
    return 1 + sum(fixed_size(count, q) for count, q in counts)


def encode_integers(tensors: Sequence[tuple[Integers, int]], coder: str = "ans") -> bytes:
    """Matrices of integers within -q..q as a stream: by the named coder, or at fixed width if that is smaller.

    Fixed width makes the size a promise: no weights can exceed it.
    """
    chosen = CODERS[coder]
    if find_reader(chosen.tag) is not chosen:
        raise ConfigError(f"another coder than {coder!r} has the tag {chosen.tag}; give each coder in CODERS its own")
    packed = chosen.encode(tensors)
    if packed is not None and 1 + len(packed) < fixed_bytes([(values.size, q) for values, q in tensors]):
        return bytes([chosen.tag]) + packed
    packed = FIXED.encode(tensors)
    assert packed is not None
    return bytes([FIXED.tag]) + packed


def decode_integers(
    stream: bytes, shapes: Sequence[tuple[int, int, int]], *, source: str
) -> list[tuple[Integers, float]]:
    """Undoes `encode_integers` for (rows, cols, q) of each, with the bits each one takes of the stream. `source` names the
    place in errors."""
    coding, body = _open(stream, source)
    reader = find_reader(coding)
    if reader is None:
        raise ArtifactError.damaged(source, "its integers are not in a known coding")
    return reader.decode(body, shapes, source=source)


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


def _open(stream: bytes, source: str) -> tuple[int, bytes]:
    if not stream:
        raise ArtifactError.damaged(source, "it is empty")
    return stream[0], stream[1:]
