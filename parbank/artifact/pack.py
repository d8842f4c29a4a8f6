"""A state dict as one artifact under a byte cap, and back.

Every tensor has a role: matrices and embeddings become integers per row, the rest float16. If the configured range
exceeds the cap, the matrices get smaller ranges, one level at a time if needed, until the file fits.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parbank.artifact.container import Artifact, decode_artifact, read_artifact
from parbank.artifact.contents import Content, Spec, StoredTensor, pack_contents, read_contents
from parbank.errors import ArtifactError
from parbank.files import write_file
from parbank.quant.bank import Contents
from parbank.quant.calibration import Calibration
from parbank.quant.coders.base import entropy_bits
from parbank.quant.coders.fixed import integer_bits
from parbank.quant.config import QuantConfig
from parbank.quant.integers import Floats, Quantised, dequantise, quantise_rows, to_half
from parbank.quant.roles import Role, Shape
from parbank.quant.solver import solve


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
    """Its part of the compressed streams. The sum over tensors is the size of the streams, less some bytes at their ends."""
    integer_bits: float
    """Bits its integers take in the file, including the description of their models; 0 for float16. If lzma coded them, an
    estimate whose sum over tensors is exact."""
    entropy_bits: float
    """Bits of its integers under their own histogram: the bound of a coder that treats all weights alike."""
    extras: str = ""
    """Groups, rotation and low rank, where it has them."""

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.packed_bytes / max(self.count, 1)


@dataclass(frozen=True)
class Packed:
    """An artifact in memory, and how it was made."""

    data: bytes = field(repr=False)
    """The whole file."""
    matrix_q: int
    """The integer range -q..q the matrices got."""
    clipped: bool
    """Whether the clip search was used: only at the configured range (see `_search`)."""
    attempts: tuple[tuple[int, int], ...]
    """(q, file size) of every range that was tried, in order; the first is clipped."""
    uncalibrated: tuple[str, ...] = ()
    """Tensors of integers that calibration found no Hessian for: their errors were taken to matter alike."""
    code_bytes: int = 0
    """Bytes of code that were counted beside the file."""
    size: int = field(init=False)
    """Bytes of the file."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.data))

    @property
    def artifact(self) -> Artifact:
        return decode_artifact(self.data)

    @property
    def rows(self) -> list[TensorRow]:
        return describe_tensors(self.artifact)

    def write(self, path: str | Path) -> int:
        """Writes the file atomically and returns its size."""
        return write_file(path, self.data)


def plan(
    shapes: Mapping[str, Shape],
    config: QuantConfig,
    matrix_q: int | None = None,
    roles: Mapping[str, Role] | None = None,
) -> list[Spec]:
    """The specs of all tensors, sorted by name, so that the order of the dict does not matter. Matrices have the range
    -q..q of `matrix_q`, or the finest one."""
    specs = []
    for name, shape in sorted(shapes.items()):
        known = roles[name] if roles else None
        storage = config.choose_storage(name, tuple(shape), known_role=known, matrix_q=matrix_q)
        specs.append(Spec(name, tuple(shape), storage.role, storage.q, storage.groups))
    return specs


def pack_tensors(
    tensors: Mapping[str, torch.Tensor],
    config: QuantConfig,
    *,
    roles: Mapping[str, Role] | None = None,
    max_bytes: int | None = None,
    meta: Mapping[str, Any] | None = None,
    extra_sections: Mapping[str, bytes] | None = None,
    code_bytes: int = 0,
) -> Packed:
    """Packs a state dict: at the configured bits if that fits, else with the finest matrix range that fits.

    `max_bytes` caps the file plus `code_bytes`, which a recipe may count. Nothing is written here, so no file over
    the cap reaches the disk. `roles` default to those of the tensors' names.
    """
    packer = _Packer(tensors, config, meta or {}, extra_sections or {}, roles)
    cap = None if max_bytes is None else max_bytes - code_bytes
    return _search(packer, config, cap, code_bytes)


def pack_solved(
    tensors: Mapping[str, torch.Tensor],
    config: QuantConfig,
    calibration: Calibration,
    *,
    roles: Mapping[str, Role] | None = None,
    max_bytes: int,
    meta: Mapping[str, Any] | None = None,
    extra_sections: Mapping[str, bytes] | None = None,
    code_bytes: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Packed:
    """Like `pack_tensors`, by the solver. It meets every cap that `check_fits` accepted, whatever the weights: at worst
    by a file of zeros."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    roles = {spec.name: spec.role for spec in plan(shapes, config, roles=roles)}

    def build(contents: Contents) -> bytes:
        chosen = {name: roles[name] for name in contents}
        return pack_contents(contents, chosen, meta or {}, extra_sections or {}, coder=config.coder)

    solved = solve(tensors, roles, calibration, config, build, max_bytes - code_bytes, say=say)
    ranges = [c.q for n, c in solved.contents.items() if isinstance(c, Quantised) and roles[n] == "matrix"]
    widest = max(ranges, default=0)
    attempts = tuple((widest, size) for size in solved.builds)
    return Packed(solved.data, widest, False, attempts, solved.uncalibrated, code_bytes=code_bytes)


def pack_weights(
    tensors: Mapping[str, torch.Tensor],
    config: QuantConfig,
    calibration: Calibration | None = None,
    *,
    say: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> Packed:
    """Packs by the method that the config names, `pack_tensors` or `pack_solved`; see there for `settings`."""
    if config.method == "rows":
        return pack_tensors(tensors, config, **settings)
    return pack_solved(tensors, config, calibration or Calibration(), say=say, **settings)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The float32 tensors of an artifact on disk, with their names and shapes."""
    return unpack_tensors(read_artifact(path))


def unpack_tensors(artifact: Artifact) -> dict[str, torch.Tensor]:
    """The float32 tensors that `pack_tensors` stored, with their names and shapes."""
    contents = read_contents(artifact)
    found = {stored.spec.name: torch.empty(stored.spec.shape) for stored in contents}
    fill_tensors(contents, found)
    return found


def fill_tensors(contents: list[StoredTensor], weights: Mapping[str, torch.Tensor]) -> None:
    """Writes contents into tensors of their names and shapes, and empties the list. In a CPU's memory no tensor of floating
    point is held twice."""
    while contents:
        stored = contents.pop()  # its integers are freed with it
        _write(stored, weights[stored.spec.name])


def _write(stored: StoredTensor, weights: torch.Tensor) -> None:
    content, shape = stored.content, stored.spec.shape
    direct = weights.device.type == "cpu" and weights.dtype == torch.float32 and weights.is_contiguous()
    values = weights.numpy() if direct else np.empty(shape, np.float32)
    if isinstance(content, Quantised):
        dequantise(content, out=values)
    else:
        values[...] = content.reshape(shape)
    if not direct:
        weights.copy_(torch.from_numpy(values))


def describe_tensors(artifact: Artifact) -> list[TensorRow]:
    """The contents, tensor by tensor, in the order of the file."""
    rows = []
    for stored in read_contents(artifact):
        spec, content = stored.spec, stored.content
        bits = integer_bits(spec.q) if spec.q else 16
        rows.append(
            TensorRow(
                name=spec.name,
                shape=spec.shape,
                role=spec.role,
                count=spec.count,
                bits=bits,
                levels=2 * spec.q + 1 if spec.q else 0,
                q=spec.q,
                raw_bytes=-(-spec.count * bits // 8) + 2 * (spec.scales + spec.rank * sum(spec.shape)),
                packed_bytes=(stored.integer_bits + stored.side_bits) / 8,
                integer_bits=stored.integer_bits,
                entropy_bits=entropy_bits(content.values) if isinstance(content, Quantised) else 0.0,
                extras=_extras(spec),
            )
        )
    return rows


def _extras(spec: Spec) -> str:
    found = [f"{spec.groups} scales a row"] if spec.groups > 1 else []
    found += [f"rotation {spec.rotation}"] if spec.rotation else []
    found += [f"rank {spec.rank}"] if spec.rank else []
    return ", ".join(found)


class _Packer:
    """Packs one state dict with as many matrix ranges as needed; constant parts are computed once."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        config: QuantConfig,
        meta: Mapping[str, Any],
        extra: Mapping[str, bytes],
        roles: Mapping[str, Role] | None = None,
    ) -> None:
        self.weights = {name: _to_numpy(name, tensor) for name, tensor in tensors.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.config, self.meta, self.extra, self.roles = config, meta, extra, roles
        self.matrix_count = sum(spec.count for spec in self.plan(1) if spec.role == "matrix")
        self._fixed: dict[str, Content] = {}

    def plan(self, matrix_q: int) -> list[Spec]:
        return plan(self.shapes, self.config, matrix_q, self.roles)

    def build(self, matrix_q: int, *, clip: bool) -> bytes:
        """The whole file with matrices in -q..q, with or without the clip search."""
        specs = self.plan(matrix_q)
        contents = {spec.name: self._content(spec, clip) for spec in specs}
        roles = {spec.name: spec.role for spec in specs}
        return pack_contents(contents, roles, self.meta, self.extra, coder=self.config.coder)

    def _content(self, spec: Spec, clip: bool) -> Content:
        if spec.role == "matrix":
            return self._quantise(spec, clip)
        if spec.name not in self._fixed:
            weights = self.weights[spec.name]
            self._fixed[spec.name] = self._quantise(spec, True) if spec.q else to_half(weights, name=spec.name)
        return self._fixed[spec.name]

    def _quantise(self, spec: Spec, clip: bool) -> Quantised:
        config, rows = self.config, self.config.method == "rows"
        return quantise_rows(
            self.weights[spec.name],
            spec.q,
            config.clip_fractions if clip else (1.0,),
            groups=spec.groups,
            deviations=config.clip_deviations if rows and clip else 0.0,
            exponents=rows and config.scales == "exponent",
            name=spec.name,
        )


def _search(packer: _Packer, config: QuantConfig, cap: int | None, code_bytes: int) -> Packed:
    """The configured range with clipping if it fits, else the largest unclipped q that does, found in few builds.

    Clipping lowers the error at one q, but under an entropy coder it costs more bytes than a larger q would. At equal size
    the unclipped range had the smaller error in every measurement (docs/log/packing.md). So only the first file is clipped.

    A range k times as wide costs log2(k) bits more per weight. From one measured size that law guesses the q that just
    fits; every build then narrows the bracket until two neighbours lie on either side of the cap.
    """
    q, lowest = config.matrix_q, config.min_matrix_q
    data = packer.build(q, clip=True)
    attempts, best = [(q, len(data))], None
    if cap is None or len(data) <= cap:
        return Packed(data, q, True, tuple(attempts), code_bytes=code_bytes)
    fits, exceeds = lowest - 1, q + 1
    while exceeds - fits > 1 and packer.matrix_count:
        if len(attempts) <= 3:
            guess = math.floor(q * 2 ** (8 * (cap - len(data)) / packer.matrix_count))
        else:  # far from Gaussian the law misleads; halving does not
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
    return Packed(best, fits, False, tuple(attempts), code_bytes=code_bytes)


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
