"""The weight sections of an artifact: quantised tensors to one file, and back.

A table describes every tensor. All integers share one stream, as do all scales and all float16 numbers. Integers and
scales are in the order of their range q, then of the table; float16 numbers in the order of the table.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parbank.artifact.container import MAX_JSON_VALUES, Artifact, count_json, encode_artifact
from parbank.artifact.streams import decode_bytes, decode_halves, encode_bytes, encode_halves
from parbank.errors import ArtifactError
from parbank.quant.coders.base import FREE_SCALES, FREE_WEIGHTS, MAX_WEIGHTS_PER_BYTE, entropy_bits
from parbank.quant.integers import MAX_ROTATION, Halves, Integers, Quantised
from parbank.quant.roles import Role, Shape
from parbank.quant.streams import Decoded, decode_integers, decode_quantised, encode_quantised

Content = Quantised | Halves
ROLES = ("matrix", "embedding", "other")
PREFIX = "weights/"
TABLE, INTEGERS, SCALES, HALVES = (PREFIX + name for name in ("table", "integers", "scales", "float16"))
_MAX_DIMENSIONS = 8
_MAX_COUNT = 2**40  # far above any model: the numbers of a table stay small enough to be multiplied
MAX_Q = 127
# A larger rank would be no small correction, and undoing it takes rows * cols * rank products.
MAX_RANK = 256
# Products a reader undertakes: a second of them, or 4,096 for each byte of the factors. Factors of 2 bytes a number are
# up to min(rows, cols) / 2 products a byte, so that only sides beyond 8,192 or factors of zeros come near it.
_FREE_PRODUCTS = 1 << 28
_MAX_PRODUCTS = 4096
# A golf model's table has 7 KB in 80 rows; JSON grows some thirtyfold as Python objects, so it is limited before it is
# parsed, and a tensor takes a tenth of a millisecond to read however small it is.
_MAX_TABLE_BYTES = 1 << 20
_MAX_TENSORS = 10_000


@dataclass(frozen=True)
class Spec:
    """How one tensor is stored."""

    name: str
    shape: Shape
    role: Role
    q: int
    """Integers -q..q, or 0 for float16."""
    groups: int = 1
    """Scales a row has."""
    rotation: int = 0
    rank: int = 0

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def scales(self) -> int:
        """Scales stored for it."""
        return self.shape[0] * self.groups if self.q else 0

    @property
    def halves(self) -> int:
        """float16 numbers stored for it: its own, or its low-rank correction."""
        return self.rank * sum(self.shape) if self.q else self.count


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file."""

    spec: Spec
    content: Content
    integer_bits: float
    """Bits its integers take of their stream."""
    side_bits: float
    """Bits of its scales, its correction, or its float16 numbers."""


def pack_contents(
    contents: Mapping[str, Content],
    roles: Mapping[str, Role],
    meta: Mapping[str, Any],
    extra_sections: Mapping[str, bytes],
    *,
    coder: str = "ans",
) -> bytes:
    """The whole file from quantised tensors: a function of its arguments, for any order of the dicts. To supply your own
    integers, pass `Quantised` tensors."""
    for name in extra_sections:
        if name.startswith(PREFIX):
            raise ArtifactError(f"extra section {name!r} collides with the weights; choose a name outside {PREFIX}")
    specs = [describe_content(name, contents[name], roles[name]) for name in sorted(contents)]
    quantised = [content for spec in by_range(specs) if isinstance(content := contents[spec.name], Quantised)]
    halves = [half.ravel() for spec in specs for half in _halves(contents[spec.name])]
    sections = {TABLE: encode_bytes(table_bytes(specs))}
    if quantised:
        sections[INTEGERS], sections[SCALES] = encode_quantised(quantised, coder)
    if halves:
        sections[HALVES] = encode_halves(np.concatenate(halves))
    if not _may_multiply(sections, specs):
        raise ArtifactError(
            f"the model cannot be packed: its low-rank factors are so small in the file, beside the matrices they make, that "
            f"a reader would refuse it ({len(sections[HALVES]):,} bytes); lower quant.low_rank"
        )
    return encode_artifact(meta, {**extra_sections, **sections})


def by_range(specs: list[Spec]) -> list[Spec]:
    """The tensors of integers in the order of their streams."""
    return sorted((spec for spec in specs if spec.q), key=lambda spec: spec.q)


def table_bytes(specs: Sequence[Spec]) -> bytes:
    """The table as it is stored, before compression."""
    rows = [[s.name, list(s.shape), s.role, s.q, s.groups, s.rotation, s.rank] for s in specs]
    text = json.dumps(rows, separators=(",", ":")).encode("ascii")
    if len(text) > _MAX_TABLE_BYTES or len(rows) > _MAX_TENSORS:
        raise ArtifactError(
            f"the names of the tensors need {len(text):,} bytes in {len(rows):,} rows, at most {_MAX_TABLE_BYTES:,} bytes "
            f"and {_MAX_TENSORS:,} rows are allowed; pack fewer tensors or shorten their names"
        )
    return text


def describe_content(name: str, content: Content, role: Role) -> Spec:
    """The table's row for a tensor. Refuses content that cannot be read back."""
    if not isinstance(content, Quantised):
        return Spec(name, content.shape, role, 0)
    groups, rank = content.scales.shape[-1], content.low_rank[0].shape[1] if content.low_rank else 0
    spec = Spec(name, content.values.shape, role, content.q, groups, content.rotation, rank)
    factors = list(content.low_rank or ())
    sound = _is_sound(spec) and content.scales.shape == (spec.shape[0], groups)
    sound = sound and (not rank or [f.shape for f in factors] == [(spec.shape[0], rank), (rank, spec.shape[1])])
    if not sound:
        raise ArtifactError(
            f"{name} cannot be packed: shape {spec.shape}, q {spec.q}, scales {content.scales.shape}, rotation "
            f"{spec.rotation}, rank {rank}; {_RULES}"
        )
    numbers = [content.scales, *factors]
    if any(not np.isfinite(n).all() for n in numbers) or np.signbit(content.scales).any():
        raise ArtifactError(f"{name} cannot be packed: it has a negative scale, or numbers that float16 cannot hold")
    if content.values.size and int(np.abs(content.values.astype(np.int16)).max()) > spec.q:
        raise ArtifactError(f"{name} cannot be packed: it has integers outside -{spec.q}..{spec.q}")
    return spec


_RULES = (
    f"allowed are 2-D tensors with q from 1 to {MAX_Q}, (rows, groups) scales with groups dividing the columns, a rotation "
    f"of 0 or a power of two up to {MAX_ROTATION:,} dividing the columns, and factors (rows, rank) and (rank, cols) of at "
    f"most {MAX_RANK}"
)


def _is_sound(spec: Spec) -> bool:
    """Whether a reader accepts a tensor of integers."""
    if len(spec.shape) != 2 or 0 in spec.shape or not 1 <= spec.q <= MAX_Q or spec.groups < 1:
        return False
    cols, rotation = spec.shape[1], spec.rotation
    power = rotation & (rotation - 1) == 0 and rotation <= MAX_ROTATION and (not rotation or cols % rotation == 0)
    return power and cols % spec.groups == 0 and 0 <= spec.rank <= min(MAX_RANK, *spec.shape)


def _halves(content: Content) -> tuple[Halves, ...]:
    return (content.low_rank or ()) if isinstance(content, Quantised) else (content,)


def _may_multiply(sections: Mapping[str, bytes], specs: list[Spec]) -> bool:
    products = sum(spec.count * spec.rank for spec in specs)
    return products <= max(_FREE_PRODUCTS, _MAX_PRODUCTS * len(sections.get(HALVES, b"")))


def read_specs(artifact: Artifact) -> list[Spec]:
    """The tensors of a file as its table describes them, checked against its size, without decoding."""
    if TABLE not in artifact.sections:
        raise ArtifactError(
            f"{artifact.source} holds no weights (sections: {sorted(artifact.sections)}); give a packed model"
        )
    specs = _read_table(artifact)
    integers = sum(spec.count for spec in specs if spec.q)
    _check_claim(artifact, integers, INTEGERS)
    _check_claim(artifact, integers + 2 * sum(spec.halves for spec in specs), PREFIX)
    _check_claim(artifact, sum(spec.scales for spec in specs), SCALES, free=FREE_SCALES)
    if not _may_multiply(artifact.sections, specs):
        what = "its low-rank factors claim to make more of its weights than their size allows"
        raise ArtifactError.damaged(artifact.source, what)
    return specs


def _check_claim(artifact: Artifact, count: int, prefix: str, free: int = FREE_WEIGHTS) -> None:
    """Refuses more numbers than the sections of a name can hold, before memory is taken for them."""
    size = sum(len(data) for name, data in artifact.sections.items() if name.startswith(prefix))
    if count > max(free, MAX_WEIGHTS_PER_BYTE * size):
        raise ArtifactError.damaged(artifact.source, f"it claims to hold {count:,} weights in {size:,} bytes")


def read_contents(artifact: Artifact, specs: list[Spec] | None = None) -> list[StoredTensor]:
    """Every tensor of a file, of any version. All sizes are checked before any weight is decoded. `specs`: those of
    `read_specs`, where they are known."""
    specs = read_specs(artifact) if specs is None else specs
    read = _read_streams_1 if artifact.version == 1 else _read_streams
    decoded = read(artifact, specs)
    numbers, position, found = _read_halves(artifact, specs), 0, []
    half_bits = 8 * len(artifact.sections.get(HALVES, b"")) / max(len(numbers), 1)
    for spec in specs:
        own = numbers[position : position + spec.halves]
        position += spec.halves
        if not spec.q:
            found.append(StoredTensor(spec, own, 0.0, half_bits * spec.halves))
            continue
        one = decoded[spec.name]
        content = Quantised(one.values, one.scales, spec.q, spec.rotation, _split_factors(own, spec))
        found.append(StoredTensor(spec, content, one.integer_bits, one.scale_bits + half_bits * spec.halves))
    return found


def _read_streams(artifact: Artifact, specs: list[Spec]) -> dict[str, Decoded]:
    ordered = by_range(specs)
    _check_sections(artifact, specs, {INTEGERS, SCALES} if ordered else set())
    if not ordered:
        return {}
    shapes = [(spec.shape[0], spec.shape[1], spec.q, spec.groups) for spec in ordered]
    streams = artifact.sections[INTEGERS], artifact.sections[SCALES]
    return dict(zip([spec.name for spec in ordered], decode_quantised(*streams, shapes, source=artifact.source)))


def _read_streams_1(artifact: Artifact, specs: list[Spec]) -> dict[str, Decoded]:
    """Version 1: a stream for each range, as one long row; scales as float16 numbers in the order of the table."""
    whole = [spec for spec in specs if spec.q]
    sections = {q: f"{INTEGERS}/{q}" for q in sorted({spec.q for spec in whole})}
    _check_sections(artifact, specs, {*sections.values(), SCALES} if whole else set())
    values: dict[str, tuple[Integers, float]] = {}
    for q, section in sections.items():
        own = [spec for spec in whole if spec.q == q]
        shape, source = (1, sum(spec.count for spec in own), q), f"{artifact.source} ({section})"
        ((integers, bits),) = decode_integers(artifact.sections[section], [shape], source=source)
        parts = np.split(integers[0], np.cumsum([spec.count for spec in own])[:-1])
        shares = [entropy_bits(part) for part in parts]
        factor = bits / max(sum(shares), 1.0)
        values |= {s.name: (p.reshape(s.shape), factor * e) for s, p, e in zip(own, parts, shares)}
    if not whole:
        return {}
    counts, source = [spec.scales for spec in whole], f"{artifact.source} ({SCALES})"
    everything = decode_halves(artifact.sections[SCALES], sum(counts), source=source)
    if np.signbit(everything).any():
        raise ArtifactError.damaged(artifact.source, "it holds a negative scale")
    each = 8 * len(artifact.sections[SCALES]) / sum(counts)
    parts = np.split(everything, np.cumsum(counts)[:-1])
    return {spec.name: Decoded(*values[spec.name], part[:, None], each * part.size) for spec, part in zip(whole, parts)}


def _read_halves(artifact: Artifact, specs: list[Spec]) -> Halves:
    if HALVES not in artifact.sections:
        return np.zeros(0, np.float16)
    count = sum(spec.halves for spec in specs)
    return decode_halves(artifact.sections[HALVES], count, source=f"{artifact.source} ({HALVES})")


def _split_factors(numbers: Halves, spec: Spec) -> tuple[Halves, Halves] | None:
    if not spec.rank:
        return None
    rows, cols = spec.shape
    left, right = numbers[: rows * spec.rank], numbers[rows * spec.rank :]
    return left.reshape(rows, spec.rank), right.reshape(spec.rank, cols)


def _check_sections(artifact: Artifact, specs: list[Spec], needed: set[str]) -> None:
    needed = {TABLE, *needed} | ({HALVES} if any(spec.rank or not spec.q for spec in specs) else set())
    found = {name for name in artifact.sections if name.startswith(PREFIX)}
    if found != needed:
        raise ArtifactError.damaged(
            artifact.source, f"its weight sections are {sorted(found)}, its table needs {sorted(needed)}"
        )


def _read_table(artifact: Artifact) -> list[Spec]:
    try:
        source = f"{artifact.source} ({TABLE})"
        text = decode_bytes(artifact.sections[TABLE], None, most=_MAX_TABLE_BYTES, source=source)
        if len(text) > _MAX_TABLE_BYTES or count_json(text) > MAX_JSON_VALUES:
            raise ValueError("too long")
        rows = json.loads(text)
        if not isinstance(rows, list) or (artifact.version > 1 and len(rows) > _MAX_TENSORS):
            raise ValueError("too many rows")
        specs = [_read_spec(row, 4 if artifact.version == 1 else 7) for row in rows]
    except (ValueError, TypeError, RecursionError):
        raise ArtifactError.damaged(artifact.source, "its table of tensors is malformed") from None
    names = [spec.name for spec in specs]
    if names != sorted(set(names)):
        raise ArtifactError.damaged(artifact.source, "its table of tensors is out of order or repeats a name")
    return specs


def _read_spec(row: Any, length: int) -> Spec:
    if len(row) != length:
        raise ValueError("malformed row")
    name, shape, role, q, groups, rotation, rank = (*row, 1, 0, 0)[:7]
    sound = isinstance(name, str) and role in ROLES and len(shape) <= _MAX_DIMENSIONS
    sound = sound and all(type(n) is int and 0 <= n < _MAX_COUNT for n in (*shape, q, groups, rotation, rank))
    # without the zeros: numpy refuses an empty array with huge other sides
    sound = sound and math.prod(n for n in shape if n) < _MAX_COUNT
    if not sound:
        raise ValueError("malformed row")
    spec = Spec(name, tuple(shape), role, q, groups, rotation, rank)
    if not (_is_sound(spec) if q else (groups, rotation, rank) == (1, 0, 0)):
        raise ValueError("malformed row")
    return spec
