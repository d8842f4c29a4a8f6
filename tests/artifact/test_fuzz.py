"""Hostile artifacts: whatever is done to a file, reading it ends in ArtifactError or in a whole model, soon and small.

Checksums don't help against somebody who computes them anew, so here they always are: what is tested is the parsers behind.
More of the same, for an afternoon:  FUZZ_EXAMPLES=100000 python -m pytest tests/artifact/test_fuzz.py
"""

import hashlib
import json
import lzma
import os
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parbank.artifact.container import DIGEST_BYTES, Artifact, decode_artifact, encode_artifact, read_artifact
from parbank.artifact.contents import HALVES, INTEGERS, SCALES, TABLE, pack_contents
from parbank.artifact.load import load_artifact
from parbank.artifact.pack import describe_tensors, pack_tensors, unpack_tensors
from parbank.artifact.streams import decode_bytes, encode_bytes
from parbank.compress import FILTERS
from parbank.errors import ArtifactError
from parbank.quant.config import QuantConfig
from parbank.quant.integers import Quantised

DATA = Path(__file__).parent / "data"
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "500"))
# What a reader may take for a file of a few kilobytes: it may hold 8 Mi weights (docs/reference/artifact.md), each 1 byte as an
# integer and 4 as a weight; a rotation of 2^18 columns takes 12 MB more.
MAX_MEMORY = 64 << 20
MAX_SECONDS = 10  # a thousand times what the whole file takes; a busy machine has its moments
fuzz = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


def seal(artifact: Artifact) -> bytes:
    """The file of these sections, every checksum right, in the version it says."""
    data = encode_artifact(artifact.meta, artifact.sections)
    (length,) = struct.unpack("<I", data[12:16])
    start, header, body = data[:8] + struct.pack("<I", artifact.version) + data[12:16], data[32:][:length], 32 + length
    digest = hashlib.blake2b(start + header, digest_size=DIGEST_BYTES).digest()
    return start + digest + header + data[body:]


def with_every_feature() -> Artifact:
    """Groups, rotation, low rank and several ranges, in a file of 3 KB."""
    rng = np.random.default_rng(0)

    def integers(rows, cols, q, groups=1, rotation=0, rank=0):
        factors = [rng.standard_normal(s).astype(np.float16) for s in ((rows, rank), (rank, cols))]
        values = np.clip(np.rint(rng.standard_normal((rows, cols)) * q / 3), -q, q).astype(np.int8)
        scales = np.exp(rng.standard_normal((rows, groups))).astype(np.float16)
        return Quantised(values, scales, q, rotation, tuple(factors) if rank else None)

    contents = {
        "a": integers(20, 24, 31, groups=3),
        "b": integers(16, 32, 7, rotation=32),
        "c": integers(40, 30, 127, rank=2),
        "d": rng.standard_normal((3, 5)).astype(np.float16),
        "e": integers(1, 1, 1),
    }
    roles = dict.fromkeys("abe", "matrix") | {"c": "embedding", "d": "other"}
    return decode_artifact(pack_contents(contents, roles, {}, {}))


def originals() -> list[Artifact]:
    tensors = {"a": torch.randn(32, 32, generator=torch.Generator().manual_seed(0)), "b": torch.ones(7)}
    lzma = pack_tensors(tensors, QuantConfig(coder="lzma")).artifact
    uniform = {"a": torch.arange(32 * 32.0).reshape(32, 32) * 37 % 63 - 31}  # nothing to gain: fixed width
    files = [read_artifact(path) for path in sorted(DATA.glob("v*.pbk"))]
    return [with_every_feature(), lzma, pack_tensors(uniform, QuantConfig()).artifact, *files]


ORIGINALS = originals()
numbers = st.sampled_from(
    [0, 1, -1, 2, 3, 7, 16, 31, 127, 128, 255, 256, 1 << 20, 1 << 24, 2**31, 2**39, 2**40, 2**63, 10**30]
)
odd = numbers | st.booleans() | st.none() | st.floats() | st.text(max_size=3) | st.lists(numbers, max_size=9)


@st.composite
def hostile_files(draw):
    """One of the files above after up to three changes."""
    artifact = draw(st.sampled_from(ORIGINALS))
    sections = dict(artifact.sections)
    for _ in range(draw(st.integers(1, 3))):
        change = draw(st.sampled_from([flip, cut, grow, recode, splice, drop, edit_table, edit_table]))
        change(draw, sections)
    version = draw(st.sampled_from([artifact.version] * 4 + [3 - artifact.version]))
    return Artifact(artifact.meta, sections, "evil.pbk", version=version)


def pick(draw, sections):
    return draw(st.sampled_from(sorted(name for name in sections if name.startswith("weights/")) or [TABLE]))


def flip(draw, sections):
    data = bytearray(sections.get(name := pick(draw, sections), b""))
    for _ in range(draw(st.integers(1, 4)) if data else 0):
        data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    sections[name] = bytes(data)


def cut(draw, sections):
    data = sections.get(name := pick(draw, sections), b"")
    sections[name] = data[: draw(st.integers(0, len(data)))]


def grow(draw, sections):
    name = pick(draw, sections)
    sections[name] = sections.get(name, b"") + draw(st.binary(max_size=9))


def recode(draw, sections):
    data = sections.get(name := pick(draw, sections), b"")
    sections[name] = bytes([draw(st.integers(0, 5))]) + data[1:]


def splice(draw, sections):
    """A section, or the front of one, from another place or another file."""
    other = draw(st.sampled_from(ORIGINALS)).sections
    source = other[draw(st.sampled_from(sorted(other)))]
    data = sections.get(name := pick(draw, sections), b"")
    at = draw(st.integers(0, min(len(data), len(source))))
    sections[draw(st.just(name) | st.sampled_from(sorted(other)))] = source[:at] + data[at:]


def drop(draw, sections):
    sections.pop(pick(draw, sections), None)


def edit_table(draw, sections):
    try:
        table = json.loads(decode_bytes(sections[TABLE], None, source=""))
        row = table[draw(st.integers(0, len(table) - 1))]
        if draw(st.booleans()) and row[1]:
            row[1][draw(st.integers(0, len(row[1]) - 1))] = draw(numbers | odd)
        else:
            row[draw(st.integers(0, len(row) - 1))] = draw(numbers | odd)
        sections[TABLE] = encode_bytes(json.dumps(table).encode())
    except (ArtifactError, KeyError, IndexError, TypeError, ValueError, RecursionError):
        pass  # an earlier change was here


def attempt(read):
    """What a reader gives, or the message of its ArtifactError; anything else it raises is a failure."""
    try:
        return read(), ""
    except ArtifactError as error:
        return None, str(error)


@fuzz
@given(hostile_files())
def test_hostile_weights_end_in_an_error_or_whole(artifact):
    data = seal(artifact)
    for read in (unpack_tensors, describe_tensors):
        tracemalloc.start()
        began = time.monotonic()
        found, error = attempt(lambda read=read: read(decode_artifact(data, source="evil.pbk")))
        seconds, peak = time.monotonic() - began, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MAX_MEMORY
        assert seconds < MAX_SECONDS
        assert found is not None or "evil.pbk" in error
        if isinstance(found, dict):
            assert all(torch.isfinite(tensor).all() for tensor in found.values())


json_values = st.recursive(odd, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))


@settings(fuzz, max_examples=max(EXAMPLES // 3, 1))
@given(data=st.data())
def test_hostile_models_end_in_an_error_or_whole(data, tmp_path_factory):
    """The whole way, with a config and a tokenizer to be lied about."""
    artifact = read_artifact(data.draw(st.sampled_from(sorted(DATA.glob("v*.pbk")))))
    meta, sections = json.loads(json.dumps(artifact.meta)), dict(artifact.sections)
    where = data.draw(st.sampled_from([meta, meta["model"], meta["model"]]))
    value = data.draw(numbers | json_values.filter(lambda v: "NaN" not in (t := json.dumps(v)) and "Infinity" not in t))
    where[data.draw(st.sampled_from(sorted(where)))] = value
    if data.draw(st.booleans()):
        data.draw(st.sampled_from([flip, cut, splice]))(data.draw, sections)
    if data.draw(st.booleans()):
        broken = bytearray(sections["tokenizer"])
        broken[data.draw(st.integers(0, len(broken) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        sections["tokenizer"] = bytes(broken)
    path = tmp_path_factory.getbasetemp() / "evil.pbk"
    path.write_bytes(seal(Artifact(meta, sections, version=artifact.version)))
    began = time.monotonic()
    loaded, error = attempt(lambda: load_artifact(path, torch.device("cpu")))
    assert loaded is not None or "evil.pbk" in error
    assert time.monotonic() - began < MAX_SECONDS


@settings(fuzz, max_examples=EXAMPLES)
@given(data=st.data())
def test_damaged_files_end_in_an_error(data):
    """Without new checksums: nothing gets through."""
    whole = seal(data.draw(st.sampled_from(ORIGINALS[:3])))
    at, size = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 20))
    damaged = whole[:at] + data.draw(st.binary(max_size=20)) + whole[at + size :]
    if damaged == whole:
        return
    with pytest.raises(ArtifactError, match=r"evil\.pbk"):
        decode_artifact(damaged, source="evil.pbk")


@pytest.mark.parametrize(
    "row",
    [
        ["a", [2**39, 2**39], "matrix", 31, 1, 0, 0],
        ["a", [1024, 1024], "matrix", 31, 1, 0, 256],
        ["a", [1 << 20, 1], "matrix", 31, 1, 0, 0],
        ["a", [1, 1 << 20], "matrix", 31, 1 << 20, 1 << 20, 0],
        ["a", [1 << 12, 1 << 12], "matrix", 1, 1, 1 << 12, 0],
    ],
)
def test_a_table_that_claims_much_costs_little(row):
    """A few words that decode to as many weights as a reader believes at most, each under every stream."""
    words = np.array([123456789, 987654321, 5], "<u4").tobytes()
    sections = {TABLE: encode_bytes(json.dumps([row]).encode())}
    for coding in range(4):
        sections |= {f"weights/{name}": bytes([coding]) + words for name in ("integers", "scales")}
        if row[-1]:
            sections["weights/float16"] = bytes([coding]) + words
        tracemalloc.start()
        began = time.monotonic()
        with pytest.raises(ArtifactError, match=r"evil\.pbk"):
            unpack_tensors(decode_artifact(seal(Artifact({}, sections)), source="evil.pbk"))
        seconds, peak = time.monotonic() - began, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MAX_MEMORY
        assert seconds < MAX_SECONDS


def bomb(rows, cols, rotation, rank=0, groups=1):
    """All -1 of -1..1, five to a byte of lzma, under one large rotation and factors of zeros."""
    table = [["a", [rows, cols], "matrix", 1, groups, rotation, rank]]
    sections = {
        TABLE: json.dumps(table).encode(),
        INTEGERS: bytes(-(-rows * cols // 5)),
        HALVES: bytes(2 * rank * (rows + cols)),
    }
    filters = FILTERS
    packed = {n: b"\1" + lzma.compress(data, lzma.FORMAT_RAW, filters=filters) for n, data in sections.items() if data}
    return encode_artifact({}, packed | {SCALES: b"\0" + np.ones(rows * groups, "<f2").tobytes()})


@pytest.mark.parametrize(
    ("shape", "believed"),
    [
        ((4096, 20480, 4096), False),
        ((4096, 20480, 4096, 256), False),
        ((4096, 2048, 2048, 256), False),
        ((4000, 2048, 2048, 32), False),
        ((1, 1 << 23, 1 << 23, 0, 2), False),
        ((1, 1 << 23, 1 << 18, 0, 2), True),
        ((1 << 10, 1 << 13, 1 << 13, 0, 1), True),
        ((1 << 20, 1 << 3, 0, 0, 1), True),
    ],
)
def test_weights_that_lzma_makes_from_nothing_cost_little(shape, believed):
    data = bomb(*shape)
    assert len(data) < 15_000 or shape[0] == 1 << 20  # scales of ones are not compressed
    tracemalloc.start()
    began = time.monotonic()
    found, error = attempt(lambda: unpack_tensors(decode_artifact(data, source="evil.pbk")))
    seconds, peak = time.monotonic() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MAX_MEMORY
    assert seconds < MAX_SECONDS
    assert (found is not None) == believed
    assert believed or "claim" in error or "malformed" in error


def test_the_streams_of_version_1_share_one_allowance():
    rows = [[f"{q:03}", [1, 1 << 23], "matrix", q] for q in range(8, 128)]
    one = b"\1" + lzma.compress(bytes(1 << 23), lzma.FORMAT_RAW, filters=FILTERS)
    sections = {TABLE: encode_bytes(json.dumps(rows).encode()), SCALES: b"\0" + bytes(240)}
    sections |= {f"{INTEGERS}/{q}": one for q in range(8, 128)}
    with pytest.raises(ArtifactError, match=r"evil\.pbk.* claims to hold 1,006,632,960 weights"):
        unpack_tensors(decode_artifact(seal(Artifact({}, sections, version=1)), source="evil.pbk"))


@pytest.mark.parametrize("sides", [[2**39] * 7, [2**39, 2], [2**20, 2**20]])
def test_nothing_with_huge_sides_is_no_tensor(sides):
    def read(shape):
        sections = {TABLE: encode_bytes(json.dumps([["a", shape, "other", 0, 1, 0, 0]]).encode()), HALVES: bytes(1)}
        return unpack_tensors(decode_artifact(encode_artifact({}, sections), source="evil.pbk"))

    assert read([0, 2**30])["a"].shape == (0, 2**30)
    for shape in ([0, *sides], [*sides, 0]):
        with pytest.raises(ArtifactError, match=r"evil\.pbk is damaged: its table of tensors is malformed"):
            read(shape)
