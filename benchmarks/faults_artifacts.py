"""Mutated artifacts: read, inspected, or loaded as a model that then computes. For faults.py.

Half of them have sound checksums. Without new checksums every change must be refused. With them, the readers behind the
checksums are tested.
"""

import functools
import hashlib
import json
import lzma
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faults_cases import Outcome, Part, make_reference
from faults_mutators import NUMBERS, judge, mutate_bytes, mutate_json, odd_value
from faults_processes import measure

from parbank.artifact.container import DIGEST_BYTES, MAGIC, Artifact, decode_artifact, read_artifact
from parbank.artifact.contents import HALVES, INTEGERS, SCALES, TABLE, pack_contents
from parbank.artifact.load import load_artifact
from parbank.artifact.model import pack_model
from parbank.artifact.pack import describe_tensors, pack_tensors, unpack_tensors
from parbank.artifact.state_dict import KIND, pack_state_dict, split_state_dict, unpack_state_dict
from parbank.artifact.streams import decode_bytes, encode_bytes
from parbank.compress import FILTERS
from parbank.config import override
from parbank.data.tokenizer import Tokenizer
from parbank.model import GPT
from parbank.quant.calibration import Calibration
from parbank.quant.config import QuantConfig
from parbank.quant.integers import Quantised
from parbank.recipes import get_recipe
from parbank.training.load import describe_run

CPU = torch.device("cpu")
TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class Shared:
    folder: Path
    seed: int
    originals: list[Artifact]
    weights: list[int]
    """How often each original is drawn."""


def prepare(folder: Path, seed: int) -> Shared:
    reference = make_reference(folder)
    load(
        reference.out / "model.pbk"
    )  # now, in the process that cases are forked from: it imports what a first load needs
    model = read_artifact(reference.out / "model.pbk")
    rng = np.random.default_rng(0)
    tensors = {"a": torch.randn(48, 64, generator=torch.Generator().manual_seed(0)), "b": torch.ones(7)}
    uniform = {"a": torch.arange(32 * 32.0).reshape(32, 32) * 37 % 63 - 31}  # fixed width: nothing to gain by a coder
    state = {
        **tensors,
        "stack": torch.randn(3, 20, 24),
        "mask": torch.tril(torch.ones(64, 64)).bool(),
        "ids": torch.arange(9),
    }
    split = split_state_dict(state)
    generic = pack_state_dict(split, QuantConfig(method="rows"), Calibration(), max_bytes=1 << 20).artifact
    originals = [
        model,
        with_every_feature(rng),
        pack_tensors(tensors, QuantConfig(coder="lzma")).artifact,
        pack_tensors(uniform, QuantConfig()).artifact,
        generic,
        large_model(model.sections[TOKENIZER]),
    ]
    old = [read_artifact(path) for path in sorted((Path(__file__).parents[1] / "tests/artifact/data").glob("v*.pbk"))]
    return Shared(folder, seed, [*originals, *old], [8, 4, 3, 2, 3, 1, *(2 for _ in old)])


def with_every_feature(rng: np.random.Generator) -> Artifact:
    """Groups, rotation, low rank, several ranges and float16."""

    def integers(rows: int, cols: int, q: int, groups: int = 1, rotation: int = 0, rank: int = 0) -> Quantised:
        values = np.clip(np.rint(rng.standard_normal((rows, cols)) * q / 3), -q, q).astype(np.int8)
        scales = np.exp(rng.standard_normal((rows, groups))).astype(np.float16)
        factors = tuple(rng.standard_normal(shape).astype(np.float16) for shape in ((rows, rank), (rank, cols)))
        return Quantised(values, scales, q, rotation, (factors[0], factors[1]) if rank else None)

    contents = {
        "a": integers(20, 24, 31, groups=3),
        "b": integers(16, 32, 7, rotation=32),
        "c": integers(40, 30, 127, rank=2),
        "d": rng.standard_normal((3, 5)).astype(np.float16),
        "e": integers(1, 1, 1),
    }
    roles: dict[str, Any] = dict.fromkeys("abe", "matrix") | {"c": "embedding", "d": "other"}
    return decode_artifact(pack_contents(contents, roles, {}, {}))


def large_model(tokenizer: bytes) -> Artifact:
    """A model of some 900 kB."""
    bos = Tokenizer.from_bytes(tokenizer).bos_id
    config = override(
        get_recipe("nano"),
        f"model.bos_id={bos}",
        "model.width=256",
        "model.heads=8",
        "model.kv_heads=4",
        "quant.method=rows",
        "quant.min_matrix_bits=2",
    )
    torch.manual_seed(0)
    state = {name: torch.randn_like(tensor) for name, tensor in GPT(config.model).state_dict().items()}
    packed = pack_model(state, describe_run(config), tokenizer, config.quant, max_bytes=990_000)
    return packed.artifact


def attempt(shared: Shared, index: int) -> Outcome:
    draw = random.Random(f"{shared.seed} {index}")
    artifact = draw.choices(shared.originals, shared.weights)[0]
    if index % 2:
        name = draw.choice(tuple(SOUND))
        kind, data = f"sound checksums: {name}", SOUND[name](draw, artifact, shared)
    else:
        kind, data = "bytes", mutate_bytes(draw, seal(artifact.meta, artifact.sections, artifact.version))
    path = shared.folder / "mutated.pbk"
    path.write_bytes(data)
    use = draw.choice((load, load, unpack, inspect))
    outcome = judge(index, kind, len(data), measure(lambda: use(path)))
    if (
        not index % 2
        and outcome.ending == "success"
        and data != seal(artifact.meta, artifact.sections, artifact.version)
    ):
        return Outcome(index, kind, "broken", "a changed file was read", outcome.seconds, outcome.megabytes)
    return outcome


def load(path: Path) -> None:
    """As `eval` and `sample` do: a model, which then computes."""
    meta = read_artifact(path).meta
    if meta.get("kind") == KIND:
        unpack_state_dict(read_artifact(path))
        return
    loaded = load_artifact(path, CPU)
    with torch.no_grad():
        loaded.model(torch.zeros(1, 8, dtype=torch.long))
    loaded.tokenizer.decode(loaded.tokenizer.encode("def f(x): return x"))


def unpack(path: Path) -> None:
    unpack_tensors(read_artifact(path))


def inspect(path: Path) -> None:
    describe_tensors(read_artifact(path))


def seal(meta: Any, sections: dict[str, bytes], version: int = 2) -> bytes:
    """The file of these sections with every checksum right."""
    table, offset = [], 0
    for name, data in sections.items():
        table.append({"name": name, "offset": offset, "size": len(data), "checksum": _digest(data)})
        offset += len(data)
    header = json.dumps({"meta": meta, "sections": table}, sort_keys=True, separators=(",", ":")).encode()
    return seal_header(header, version) + b"".join(sections.values())


def seal_header(header: bytes, version: int = 2) -> bytes:
    start = MAGIC + struct.pack("<II", version, len(header))
    return start + hashlib.blake2b(start + header, digest_size=DIGEST_BYTES).digest() + header


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def change_section(draw: random.Random, artifact: Artifact, shared: Shared) -> bytes:
    """The bytes of one section, or its coding, or a piece of another file's section."""
    sections, name = dict(artifact.sections), draw.choice(sorted(artifact.sections))
    action = draw.randrange(5)
    if action == 0:
        sections[name] = bytes([draw.randrange(6)]) + sections[name][1:]
    elif action == 1:
        other = draw.choice(shared.originals).sections
        source = other[draw.choice(sorted(other))]
        at = draw.randrange(min(len(source), len(sections[name])) + 1)
        sections[name] = source[:at] + sections[name][at:]
    elif action == 2:
        del sections[name]
    else:
        sections[name] = mutate_bytes(draw, sections[name])
    return seal(artifact.meta, sections, draw.choice((artifact.version, artifact.version, artifact.version, 1, 2, 3)))


def change_table(draw: random.Random, artifact: Artifact, shared: Shared) -> bytes:
    table = mutate_json(draw, read_table(artifact))
    sections = dict(artifact.sections) | {TABLE: encode_bytes(json.dumps(table).encode())}
    return seal(artifact.meta, sections, artifact.version)


def change_meta(draw: random.Random, artifact: Artifact, shared: Shared) -> bytes:
    meta = mutate_json(draw, artifact.meta)
    if isinstance(model := artifact.meta.get("model"), dict) and draw.random() < 0.7:
        field = draw.choice(sorted(model))
        meta = artifact.meta | {"model": model | {field: draw.choice((draw.choice(NUMBERS), odd_value(draw)))}}
    return seal(meta, artifact.sections, artifact.version)


def change_model(draw: random.Random, artifact: Artifact, shared: Shared) -> bytes:
    """Another config, and a table of exactly the tensors that it makes: only the streams can tell."""
    model = artifact.meta.get("model")
    if not isinstance(model, dict):
        return change_table(draw, artifact, shared)
    changed = model | {
        "layers": draw.choice((1, 2, 8, 64, 500, 10_000)),
        "width": draw.choice((32, 64, 256, 512, 1024, 4096, 1 << 20)),
        "mlp_multiple": draw.choice((1.0, 3.0, 1000.0)),
        "value_layers": [],
        "xsa_layers": 0,
    }
    meta = artifact.meta | {"model": changed}
    try:
        from parbank.config import from_dict
        from parbank.model.config import ModelConfig

        config = from_dict(ModelConfig, changed)
        if config.layers * config.width > 64 * 4096:
            return seal(meta, artifact.sections, artifact.version)
        with torch.device("meta"):
            shapes = {name: list(tensor.shape) for name, tensor in GPT(config).state_dict().items()}
    except Exception:
        return seal(meta, artifact.sections, artifact.version)
    known = {row[0]: row for row in read_table(artifact)}
    rows = [[name, shape, *known.get(name, [0, 0, "matrix" if len(shape) == 2 else "other", 7 * (len(shape) == 2), 1, 0, 0])[2:]]
            for name, shape in sorted(shapes.items())]  # fmt: skip
    sections = dict(artifact.sections) | {TABLE: encode_bytes(json.dumps(rows).encode())}
    return seal(meta, sections, artifact.version)


def change_tokenizer(draw: random.Random, artifact: Artifact, shared: Shared) -> bytes:
    artifact = artifact if TOKENIZER in artifact.sections else shared.originals[0]
    pieces = artifact.sections[TOKENIZER]
    changed = draw.choice((mutate_bytes(draw, pieces), many_pieces(draw), pieces * draw.choice((2, 3, 30))))
    return seal(artifact.meta, dict(artifact.sections) | {TOKENIZER: changed}, artifact.version)


def many_pieces(draw: random.Random) -> bytes:
    """A SentencePiece model of very many tokens, as few bytes as they can have."""
    count = draw.choice((1000, 65_536, 65_537, 150_000))
    return b"".join(b"\x0a\x04\x0a\x02" + struct.pack("<H", i % 65_536) for i in range(count))


def claim_much(draw: random.Random, artifact: Artifact, shared: Shared) -> bytes:
    """Zeros that lzma makes from nothing, under shapes near the limits of a reader."""
    rows, cols = draw.choice(
        ((1, 1 << 23), (1 << 20, 8), (4000, 2048), (1 << 12, 1 << 11), (1 << 15, 1 << 9), (20_000, 20_480))
    )
    q, groups = draw.choice((1, 1, 7, 127)), draw.choice((1, 1, 2, cols))
    rotation, rank = draw.choice((0, cols & -cols, min(cols & -cols, 1 << 18))), draw.choice((0, 0, 1, 32, 256))
    digits = {1: 5, 7: 2, 127: 1}[q]
    table = json.dumps([["a", [rows, cols], "matrix", q, groups, rotation, rank]]).encode()
    packed = {TABLE: b"\0" + table, INTEGERS: zeros(-(-rows * cols // digits))}
    if rank:
        packed[HALVES] = zeros(2 * rank * (rows + cols))
    words = draw.randbytes(4 * draw.choice((3, 1000, 20_000)))
    if draw.random() < 0.4:
        packed[INTEGERS] = b"\3" + words
    scales = rows * groups if rows * groups < 1 << 18 and draw.random() < 0.7 else 0
    packed[SCALES] = b"\0" + np.ones(scales, "<f2").tobytes() if scales else b"\3" + words
    return seal({}, packed)


def claim_halves(draw: random.Random, artifact: Artifact, shared: Shared) -> bytes:
    """float16 zeros, alone or beside integers, and exact tensors of zeros."""
    count = draw.choice((1 << 20, 1 << 22, 1 << 23, (1 << 23) + 1, 1 << 25))
    shape = draw.choice(([count], [count // 8, 8], [1, count], [0, count]))
    number = 0 if 0 in shape else count
    table = json.dumps([["a", shape, "other", 0, 1, 0, 0]]).encode()
    return seal({}, {TABLE: b"\0" + table, HALVES: zeros(2 * number)})


@functools.cache
def zeros(size: int) -> bytes:
    """A stream of zeros, as lzma writes it; of the first 32 MB where there are more, which no reader gets to."""
    return b"\1" + lzma.compress(bytes(min(size, 1 << 25)), lzma.FORMAT_RAW, filters=FILTERS)


def change_header(draw: random.Random, artifact: Artifact, shared: Shared) -> bytes:
    """A header that is whole by its checksum, and odd inside."""
    whole = seal(artifact.meta, artifact.sections, artifact.version)
    (length,) = struct.unpack("<I", whole[12:16])
    header, body = whole[32 : 32 + length], whole[32 + length :]
    size = draw.choice((3, 1000, 100_000, 900_000))
    repeated = draw.choice((b"[", b'{"a":', b"{},", b"[],", b"0,", b'"ab",', b'{"a":1},', b"1e999,", b"NaN,"))
    odd = draw.choice((
        b'{"meta":{"x":[' + repeated * (size // len(repeated)) + b'0]},"sections":[]}',
        repeated * (size // len(repeated)),
        mutate_bytes(draw, header),
        json.dumps(mutate_json(draw, json.loads(header)), allow_nan=True).encode(),
        b'{"meta":{},"meta":{},"sections":[]}',
        b'{"meta":{"kind":' + b"9" * size + b'},"sections":[]}',
    ))  # fmt: skip
    return seal_header(odd) + (body if draw.random() < 0.8 else b"")


def read_table(artifact: Artifact) -> list[Any]:
    found: list[Any] = json.loads(decode_bytes(artifact.sections[TABLE], None, source="an original"))
    return found


SOUND: dict[str, Callable[[random.Random, Artifact, Shared], bytes]] = {
    "a section": change_section,
    "the table": change_table,
    "the meta": change_meta,
    "another model": change_model,
    "the tokenizer": change_tokenizer,
    "zeros": claim_much,
    "float16 zeros": claim_halves,
    "the header": change_header,
}
PART = Part(prepare, attempt, ("benchmarks/faults_artifacts.py", "benchmarks/faults_mutators.py"))
