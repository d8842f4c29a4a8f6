"""A state dict as one artifact under a byte cap, and back.

Every tensor has a role: matrices and embeddings become integers per row, the rest float16. Integers of one range share
one stream, so do all scales and all float16 numbers; a table says what lies where. A cap that the configured range
misses moves the matrices down a ladder of ranges, one level at a time if need be, until the file fits.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from parbank.artifact import Artifact, decode_artifact, encode_artifact, write_file
from parbank.errors import ArtifactError
from parbank.quant.codecs import (
    Floats,
    Halves,
    Quantised,
    decode_bytes,
    decode_halves,
    decode_integers,
    dequantise,
    encode_bytes,
    encode_halves,
    encode_integers,
    entropy_bits,
    integer_bits,
    quantise_rows,
    to_half,
)
from parbank.quant.config import QuantConfig

Role = Literal["matrix", "embedding", "other"]
Shape = tuple[int, ...]
ROLES = ("matrix", "embedding", "other")
PREFIX = "weights/"
TABLE, SCALES, HALVES = PREFIX + "table", PREFIX + "scales", PREFIX + "float16"
_MAX_RANK = 8
_MAX_Q = 127
# A golf model's table has 6 KB; JSON grows some thirtyfold as Python objects, so it is limited before it is parsed.
_MAX_TABLE_BYTES = 1 << 20


@dataclass(frozen=True)
class Spec:
    """What is stored for one tensor."""

    name: str
    shape: Shape
    role: Role
    q: int
    """Integers -q..q per row, or 0 for float16."""
    groups: int = 1
    rotation: int = 0
    rank: int = 0

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Scales stored for it."""
        return self.shape[0] * self.groups if self.q else 0

    @property
    def factors(self) -> int:
        """float16 numbers of its low-rank correction."""
        return self.rank * sum(self.shape) if self.rank else 0


@dataclass(frozen=True)
class TensorRow:
    """One line of `parbank inspect`."""

    name: str
    shape: Shape
    role: Role
    count: int
    bits: int
    """Bits of one number at fixed width."""
    levels: int
    """Different integers it may hold: 2q+1, or 0 for float16."""
    q: int
    raw_bytes: int
    """Bytes before entropy coding: fixed width and scales."""
    packed_bytes: float
    """Its part of the compressed streams, split by empirical entropy: an estimate, whose sum over tensors is exact."""

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.packed_bytes / max(self.count, 1)


@dataclass(frozen=True)
class Packed:
    """An artifact in memory, with how it came about."""

    data: bytes
    """The whole file."""
    matrix_q: int
    """The integer range -q..q the matrices got."""
    clipped: bool
    """Whether the clip search was used: only at the configured range (see `_search`)."""
    attempts: tuple[tuple[int, int], ...]
    """(q, file size) of every range that was tried, in order; the first is clipped."""

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def artifact(self) -> Artifact:
        return decode_artifact(self.data)

    @property
    def rows(self) -> list[TensorRow]:
        return describe_tensors(self.artifact)

    def write(self, path: str | Path) -> int:
        """Writes the file atomically and returns its size."""
        return write_file(path, self.data)


def role(name: str, shape: Shape) -> Role:
    """How a tensor is stored: by what it is called and whether a scale per row would pay."""
    if len(shape) != 2 or 0 in shape:
        return "other"
    if name.endswith("embedding.weight"):
        return "embedding"
    # Gates and per-head gains are 2-D but thin; at 16 columns the scale is already an eighth of a 6-bit row.
    return "matrix" if min(shape) >= 16 else "other"


def plan(shapes: Mapping[str, Shape], config: QuantConfig, matrix_q: int) -> list[Spec]:
    """What every tensor becomes, in the order of the file: by name, so that the order of the dict does not matter."""
    ranges = {"matrix": matrix_q, "embedding": config.embedding_q, "other": 0}
    return [Spec(n, tuple(s), r := role(n, tuple(s)), ranges[r]) for n, s in sorted(shapes.items())]


def stream_name(q: int) -> str:
    """The section that holds all integers of one range."""
    return f"{PREFIX}integers/{q}"


def table_bytes(specs: list[Spec]) -> bytes:
    """The table as it is stored, before compression."""
    rows = [
        [s.name, list(s.shape), s.role, s.q]
        + ([s.groups, s.rotation, s.rank] if (s.groups, s.rotation, s.rank) != (1, 0, 0) else [])
        for s in specs
    ]
    text = json.dumps(rows, separators=(",", ":")).encode("ascii")
    if len(text) > _MAX_TABLE_BYTES:
        raise ArtifactError(
            f"the names of the tensors need {len(text):,} bytes, at most {_MAX_TABLE_BYTES:,} are allowed; "
            f"pack fewer tensors or shorten their names"
        )
    return text


def pack_tensors(
    tensors: Mapping[str, torch.Tensor],
    config: QuantConfig,
    *,
    max_bytes: int | None = None,
    meta: Mapping[str, Any] | None = None,
    extra_sections: Mapping[str, bytes] | None = None,
    code_bytes: int = 0,
) -> Packed:
    """Packs a state dict: at the configured bits if that fits, else with the finest matrix range that does.

    `max_bytes` caps the file plus `code_bytes`, which a recipe may count. Nothing is written here, so nothing over the
    cap ever reaches the disk.
    """
    for name in extra_sections or {}:
        if name.startswith(PREFIX):
            raise ArtifactError(f"extra section {name!r} collides with the weights; choose a name outside {PREFIX}")
    packer = _Packer(tensors, config, meta or {}, extra_sections or {})
    cap = None if max_bytes is None else max_bytes - code_bytes
    return _search(packer, config, cap, code_bytes)


def pack_contents(
    contents: Mapping[str, Quantised | Halves],
    roles: Mapping[str, Role],
    meta: Mapping[str, Any],
    extra_sections: Mapping[str, bytes],
) -> bytes:
    """The whole file of tensors already quantised, the same bytes for the same contents."""
    ordered = {name: contents[name] for name in sorted(contents)}
    specs = [_spec_of(name, content, roles[name]) for name, content in ordered.items()]
    integers = [content for content in ordered.values() if isinstance(content, Quantised)]
    sections = {TABLE: encode_bytes(table_bytes(specs))}
    for q in sorted({content.q for content in integers}):
        values = np.concatenate([content.values.ravel() for content in integers if content.q == q])
        sections[stream_name(q)] = encode_integers(values, q)
    scales = [content.scales.ravel() for content in integers]
    halves = [half.ravel() for content in ordered.values() for half in _halves_of(content)]
    for section, numbers in ((SCALES, scales), (HALVES, halves)):
        if numbers:
            sections[section] = encode_halves(np.concatenate(numbers))
    return encode_artifact(meta, {**extra_sections, **sections})


def _spec_of(name: str, content: Quantised | Halves, kind: Role) -> Spec:
    if not isinstance(content, Quantised):
        return Spec(name, content.shape, kind, 0)
    rank = content.low_rank[0].shape[1] if content.low_rank else 0
    return Spec(name, content.values.shape, kind, content.q, content.scales.shape[1], content.rotation, rank)


def _halves_of(content: Quantised | Halves) -> tuple[Halves, ...]:
    if isinstance(content, Quantised):
        return content.low_rank or ()
    return (content,)


def unpack_tensors(artifact: Artifact) -> dict[str, torch.Tensor]:
    """The float32 tensors that `pack_tensors` stored, names and shapes as they were."""
    tensors = {}
    for spec, content in _decode(artifact):
        weights = dequantise(content) if isinstance(content, Quantised) else content.astype(np.float32)
        tensors[spec.name] = torch.from_numpy(weights.reshape(spec.shape))
    return tensors


def describe_tensors(artifact: Artifact) -> list[TensorRow]:
    """What is inside, tensor by tensor, in the order of the file."""
    decoded = list(_decode(artifact))
    entropies = {s.name: entropy_bits(c.values) for s, c in decoded if isinstance(c, Quantised)}
    totals: dict[int, float] = {}
    counts: dict[int, int] = {}
    for spec, _ in decoded:
        totals[spec.q] = totals.get(spec.q, 0.0) + entropies.get(spec.name, 0.0)
        counts[spec.q] = counts.get(spec.q, 0) + spec.count
    sizes, scale_count = artifact.sizes, sum(spec.rows for spec, _ in decoded)
    rows = []
    for spec, _ in decoded:
        by_count = spec.count / max(counts[spec.q], 1)
        if spec.q:
            share = entropies[spec.name] / totals[spec.q] if totals[spec.q] else by_count
            packed = share * sizes[stream_name(spec.q)] + spec.rows / scale_count * sizes[SCALES]
        else:
            packed = by_count * sizes[HALVES]  # low-rank factors are not told apart
        bits = integer_bits(spec.q) if spec.q else 16
        raw = -(-spec.count * bits // 8) + 2 * spec.rows
        levels = 2 * spec.q + 1 if spec.q else 0
        rows.append(TensorRow(spec.name, spec.shape, spec.role, spec.count, bits, levels, spec.q, raw, packed))
    return rows


class _Packer:
    """One state dict, packed with as many matrix ranges as the ladder asks for; what does not change is done once."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        config: QuantConfig,
        meta: Mapping[str, Any],
        extra: Mapping[str, bytes],
    ) -> None:
        self.weights = {name: _to_numpy(name, tensor) for name, tensor in tensors.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.config, self.meta, self.extra = config, meta, extra
        self.matrix_count = sum(spec.count for spec in plan(self.shapes, config, 1) if spec.role == "matrix")
        self._fixed: dict[str, Quantised | Halves] = {}

    def build(self, matrix_q: int, *, clip: bool) -> bytes:
        """The whole file with matrices in -q..q, with or without the clip search."""
        specs = plan(self.shapes, self.config, matrix_q)
        contents = {spec.name: self._content(spec, clip) for spec in specs}
        return pack_contents(contents, {spec.name: spec.role for spec in specs}, self.meta, self.extra)

    def _content(self, spec: Spec, clip: bool) -> Quantised | Halves:
        weights = self.weights[spec.name]
        if spec.role == "matrix":
            return quantise_rows(weights, spec.q, self.config.clip_fractions if clip else (1.0,), name=spec.name)
        if spec.name not in self._fixed:
            self._fixed[spec.name] = (
                quantise_rows(weights, spec.q, self.config.clip_fractions, name=spec.name)
                if spec.q
                else to_half(weights, name=spec.name)
            )
        return self._fixed[spec.name]


def _search(packer: _Packer, config: QuantConfig, cap: int | None, code_bytes: int) -> Packed:
    """The configured range with clipping if it fits, else the largest unclipped q that does, found in few builds.

    Clipping lowers the error at one q, but under an entropy coder it costs more bytes than a larger q would: at equal
    size the unclipped range had the smaller error in every measurement (docs/quantisation.md), so the ladder has none.

    A range k times as wide costs log2(k) bits more per weight. From one measured size that law guesses the q that just
    fits; every build then narrows the bracket until two neighbours lie on either side of the cap.
    """
    q, lowest = config.matrix_q, config.min_matrix_q
    data = packer.build(q, clip=True)
    attempts, best = [(q, len(data))], None
    if cap is None or len(data) <= cap:
        return Packed(data, q, True, tuple(attempts))
    fits, exceeds = lowest - 1, q + 1
    while exceeds - fits > 1 and packer.matrix_count:
        if len(attempts) <= 3:
            guess = math.floor(q * 2 ** (8 * (cap - len(data)) / packer.matrix_count))
        else:  # far from Gaussian: the law misleads, halving does not
            guess = (fits + exceeds) // 2
        q = min(max(guess, fits + 1), exceeds - 1)
        data = packer.build(q, clip=False)
        attempts.append((q, len(data)))
        if len(data) <= cap:
            fits, best = q, data
        else:
            exceeds = q
    if best is None:
        raise _too_big(packer, config, attempts, cap, code_bytes)
    return Packed(best, fits, False, tuple(attempts))


def _too_big(
    packer: _Packer, config: QuantConfig, attempts: list[tuple[int, int]], cap: int, code_bytes: int
) -> ArtifactError:
    q, smallest = min(attempts, key=lambda attempt: attempt[1])
    code = f" plus {code_bytes:,} bytes of code" if code_bytes else ""
    coarser = "lower quant.min_matrix_bits, " if packer.matrix_count and config.min_matrix_bits > 2 else ""
    return ArtifactError(
        f"the model does not fit: the smallest artifact reached is {smallest:,} bytes{code} (matrices in -{q}..{q}), "
        f"the cap is {cap + code_bytes:,}; raise --max-bytes, {coarser}or train fewer or narrower layers"
    )


def _to_numpy(name: str, tensor: torch.Tensor) -> Floats:
    if not tensor.dtype.is_floating_point:
        raise ArtifactError(f"{name} has dtype {tensor.dtype}; only floating-point tensors can be packed")
    return tensor.detach().to("cpu", torch.float32).contiguous().numpy()


def _decode(artifact: Artifact) -> Iterator[tuple[Spec, Quantised | Halves]]:
    """Every tensor of the file. All sizes are checked before any weight is decoded, and sections are decoded whole."""
    specs = _read_table(artifact)
    streams = _read_streams(artifact, specs)
    position = dict.fromkeys(streams, 0)

    def take(section: str, count: int) -> Any:
        position[section] += count
        return streams[section][position[section] - count : position[section]]

    for spec in specs:
        if spec.q:
            values = take(stream_name(spec.q), spec.count).reshape(spec.shape)
            scales = take(SCALES, spec.rows).reshape(spec.shape[0], spec.groups)
            low_rank = None
            if spec.rank:
                rows, cols = spec.shape
                low_rank = (
                    take(HALVES, rows * spec.rank).reshape(rows, spec.rank),
                    take(HALVES, spec.rank * cols).reshape(spec.rank, cols),
                )
            yield spec, Quantised(values, scales, spec.q, spec.rotation, low_rank)
        else:
            yield spec, take(HALVES, spec.count)


def _read_streams(artifact: Artifact, specs: list[Spec]) -> dict[str, np.ndarray]:
    counts: dict[str, int] = {}
    for spec in specs:
        section = stream_name(spec.q) if spec.q else HALVES
        counts[section] = counts.get(section, 0) + spec.count
        if spec.q:
            counts[SCALES] = counts.get(SCALES, 0) + spec.rows
        if spec.factors:
            counts[HALVES] = counts.get(HALVES, 0) + spec.factors
    found = {name for name in artifact.sections if name.startswith(PREFIX)}
    if found != {TABLE, *counts}:
        raise _damaged(artifact, f"its weight sections are {sorted(found)}, its table needs {sorted({TABLE, *counts})}")
    streams: dict[str, np.ndarray] = {}
    for section, count in counts.items():
        source, stream = f"{artifact.source} ({section})", artifact.sections[section]
        if section in (SCALES, HALVES):
            streams[section] = decode_halves(stream, count, source=source)
        else:
            streams[section] = decode_integers(stream, count, int(section.rpartition("/")[2]), source=source)
    if SCALES in streams and np.signbit(streams[SCALES]).any():
        raise _damaged(artifact, "it holds a negative scale")
    return streams


def _read_table(artifact: Artifact) -> list[Spec]:
    if TABLE not in artifact.sections:
        raise ArtifactError(
            f"{artifact.source} holds no weights (sections: {sorted(artifact.sections)}); give a packed model"
        )
    try:
        text = decode_bytes(artifact.sections[TABLE], None, source=f"{artifact.source} ({TABLE})")
        if len(text) > _MAX_TABLE_BYTES:
            raise ValueError("too long")
        specs = [_read_spec(row) for row in json.loads(text)]
    except (ValueError, TypeError, RecursionError):
        raise _damaged(artifact, "its table of tensors is malformed") from None
    names = [spec.name for spec in specs]
    if names != sorted(set(names)):
        raise _damaged(artifact, "its table of tensors is out of order or repeats a name")
    return specs


def _read_spec(row: Any) -> Spec:
    name, shape, kind, q, *more = row
    groups, rotation, rank = more or (1, 0, 0)
    sizes = [q, *shape, groups, rotation, rank]
    sound = isinstance(name, str) and kind in ROLES and len(shape) <= _MAX_RANK
    sound = sound and all(type(n) is int and 0 <= n < 2**40 for n in sizes) and q <= _MAX_Q
    if not sound or (q and (len(shape) != 2 or 0 in shape)):
        raise ValueError("malformed row")
    if q and (not groups or shape[1] % groups or (rotation and (rotation & (rotation - 1) or shape[1] % rotation))):
        raise ValueError("malformed row")
    return Spec(name, tuple(shape), kind, q, groups, rotation, rank)


def _damaged(artifact: Artifact, what: str) -> ArtifactError:
    return ArtifactError(f"{artifact.source} is damaged: {what}; copy it again, or write it anew with `parbank pack`")
