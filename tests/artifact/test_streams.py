"""Streams: they come back exactly, never exceed their bound, and never expand beyond what was announced."""

import contextlib
import lzma
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from parbank.artifact.pack import pack_tensors, unpack_tensors
from parbank.artifact.streams import decode_bytes, decode_halves, encode_bytes, encode_halves
from parbank.compress import FILTERS
from parbank.config import walk
from parbank.errors import ArtifactError, ConfigError
from parbank.quant.coders import CODERS, find_reader
from parbank.quant.coders.base import FREE_WEIGHTS, MAX_WEIGHTS_PER_BYTE, Coder, entropy_bits
from parbank.quant.config import QuantConfig
from parbank.quant.integers import quantise_rows
from parbank.quant.streams import decode_integers, decode_scales, encode_integers, encode_scales, fixed_bytes

RANGES = [1, 2, 3, 5, 7, 8, 15, 20, 31, 63, 100, 127]


@st.composite
def integer_tensors(draw):
    """A few matrices of any shape, range and spread, with rows and columns that differ."""
    tensors = []
    for _ in range(draw(st.integers(0, 4))):
        rows, cols, q = draw(st.integers(1, 60)), draw(st.integers(1, 60)), draw(st.sampled_from(RANGES))
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        spread = draw(st.floats(0, 2)) * q * np.exp(rng.standard_normal((rows, 1)) + rng.standard_normal(cols))
        values = np.clip(np.rint(rng.standard_normal((rows, cols)) * spread), -q, q)
        tensors.append((values.astype(np.int8), q))
    return tensors


def shapes_of(tensors):
    return [(*values.shape, q) for values, q in tensors]


def bound(tensors):
    return fixed_bytes([(values.size, q) for values, q in tensors])


@settings(deadline=None)
@given(tensors=integer_tensors(), coder=st.sampled_from(sorted(CODERS)))
def test_integer_streams_come_back_and_keep_their_bound(tensors, coder):
    stream = encode_integers(tensors, coder)
    assert len(stream) <= bound(tensors)
    assert encode_integers(tensors, coder) == stream
    found = decode_integers(stream, shapes_of(tensors), source="file")
    assert len(found) == len(tensors)
    assert all(np.array_equal(a, b) and a.dtype == np.int8 for (a, _), (b, _) in zip(found, tensors))


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("q", RANGES)
def test_uniform_integers_are_stored_at_fixed_width_at_most(q, coder):
    values = np.random.default_rng(q).integers(-q, q + 1, (301, 997)).astype(np.int8)
    stream = encode_integers([(values, q)], coder)
    assert entropy_bits(values) / 8 < len(stream) <= bound([(values, q)])
    ((back, bits),) = decode_integers(stream, [(301, 997, q)], source="file")
    assert np.array_equal(back, values)
    assert bits == pytest.approx(8 * len(stream), abs=64)


@pytest.mark.parametrize(
    ("coder", "q", "margin"),
    [
        ("lzma", 31, 1.03),
        ("lzma", 15, 1.04),
        ("lzma", 7, 1.025),
        ("ans", 127, 1.002),
        ("ans", 31, 1.0),
        ("ans", 15, 1.0),
        ("ans", 7, 1.0),
    ],
)
def test_gaussian_integers_come_close_to_their_entropy(coder, q, margin):
    weights = np.random.default_rng(0).standard_normal((600, 512)).astype(np.float32)
    values = quantise_rows(weights, q).values
    assert len(encode_integers([(values, q)], coder)) <= entropy_bits(values) / 8 * margin


scale_tensors = st.lists(
    hnp.arrays(np.float16, st.integers(0, 60), elements=st.floats(0, 65504, width=16).map(abs))
    | hnp.arrays(np.float16, st.integers(0, 60), elements=st.sampled_from([0.0, 0.25, 0.5, 65504, 2.0**-24])),
    max_size=4,
)


@settings(deadline=None)
@given(scale_tensors)
def test_scale_streams_come_back_bit_for_bit(tensors):
    stream = encode_scales(tensors)
    assert len(stream) <= 1 + 2 * sum(scales.size for scales in tensors)
    found = decode_scales(stream, [scales.size for scales in tensors], source="file")
    assert [scales.tobytes() for scales, _ in found] == [scales.tobytes() for scales in tensors]


def test_scales_on_a_grid_cost_few_bits():
    """Eight steps to an octave over two octaves: 4 bits at most, and what it takes to list the 17 values."""
    rng = np.random.default_rng(0)
    grid = (0.01 * 2 ** (np.arange(17) / 8)).astype(np.float16)
    tensors = [grid[np.clip(np.rint(rng.standard_normal(512) * 2 + 8), 0, 16).astype(int)] for _ in range(20)]
    assert len(encode_scales(tensors)) < 20 * 512 * 3.3 / 8


@pytest.mark.parametrize("bad", [-1.0, -0.0, np.nan, np.inf])
def test_raw_scales_that_are_negative_or_not_finite_are_refused(bad):
    with pytest.raises(ArtifactError, match="scale"):
        decode_scales(b"\0" + np.array([1, bad], "<f2").tobytes(), [2], source="file")


@given(hnp.arrays(np.float16, st.integers(0, 60), elements=st.floats(-65504, 65504, width=16)))
def test_half_streams_come_back_bit_for_bit(halves):
    stream = encode_halves(halves)
    assert len(stream) <= 1 + 2 * halves.size
    assert decode_halves(stream, halves.size, source="file").tobytes() == halves.tobytes()


@given(st.binary(max_size=300))
def test_byte_streams_come_back(data):
    assert len(encode_bytes(data)) <= 1 + len(data)
    assert decode_bytes(encode_bytes(data), len(data), source="file") == data
    assert decode_bytes(encode_bytes(data), None, source="file") == data


@settings(deadline=None)
@given(stream=st.binary(max_size=60), count=st.integers(0, 2**60), q=st.sampled_from(RANGES))
def test_arbitrary_streams_decode_or_are_refused(stream, count, q):
    for decode in (
        lambda: decode_integers(stream, [(1, count, q)], source="file"),
        lambda: decode_integers(stream, [(count, 1, q), (2, 3, 127)], source="file"),
        lambda: decode_scales(stream, [count, 3], source="file"),
        lambda: decode_halves(stream, count, source="file"),
        lambda: decode_bytes(stream, None, source="file"),
    ):
        with contextlib.suppress(ArtifactError):
            decode()


def test_integers_outside_the_range_are_refused():
    beyond = b"\x01" + lzma.compress(bytes([63]), format=lzma.FORMAT_RAW, filters=FILTERS)
    with pytest.raises(ArtifactError, match="outside"):
        decode_integers(beyond, [(1, 1, 31)], source="file")
    joined = b"\x01" + lzma.compress(
        bytes([255]), format=lzma.FORMAT_RAW, filters=FILTERS
    )  # 15 * 15 - 1 = 224 is the last
    with pytest.raises(ArtifactError, match="outside"):
        decode_integers(joined, [(1, 2, 7)], source="file")


def test_bombs_are_stopped():
    """A stream that expands further than its announced size, and one that honestly announces far too much."""
    huge = (1 << 24) + 1
    bomb = b"\x01" + lzma.compress(bytes(huge), format=lzma.FORMAT_RAW, filters=FILTERS)
    assert len(bomb) < huge // 1000
    for size in (1000, huge, 1 << 50, None):
        tracemalloc.start()
        with pytest.raises(ArtifactError, match="damaged"):
            decode_bytes(bomb, size, source="file")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert size is None or peak < 1 << 20


@pytest.mark.parametrize(
    ("coder", "q", "count", "most"),
    [("ans", 127, (1 << 20) + 1, 1 / 40), ("lzma", 127, (1 << 23) + 1, 1.1), ("lzma", 1, (1 << 23) + 1, 0.3)],
)
def test_the_writer_keeps_to_the_expansion_limit_of_the_reader(coder, q, count, most):
    """Some bytes would hold it, which the reader would take for a bomb."""
    values = np.zeros((1, count), np.int8)
    values[0, ::100_000] = 1
    stream = encode_integers([(values, q)], coder)
    assert len(stream) < most * values.size
    assert values.size <= max(FREE_WEIGHTS, MAX_WEIGHTS_PER_BYTE * len(stream))
    ((back, _),) = decode_integers(stream, [(*values.shape, q)], source="file")
    assert np.array_equal(back, values)


def test_no_two_coders_share_a_tag():
    known = {tag: coder for tag in range(256) if (coder := find_reader(tag)) is not None}
    assert sorted(known) == [1, 2, 3], "the tags of docs/reference/artifact.md; a new coder gets a new one"
    assert len(known) == len(CODERS) + 1
    assert all(known[coder.tag] is coder for coder in CODERS.values())


def test_a_new_coder_is_an_object_and_a_name(monkeypatch):
    def encode(tensors):
        return zlib.compress(b"".join(values.tobytes() for values, _ in tensors), 9)

    def decode(body, shapes, *, source):
        values = np.frombuffer(zlib.decompress(body), np.int8)
        ends = np.cumsum([rows * cols for rows, cols, _ in shapes])
        return [
            (part.reshape(rows, cols), 8.0 * len(body) / len(shapes))
            for part, (rows, cols, _) in zip(np.split(values, ends[:-1]), shapes)
        ]

    coder = Coder(name="zlib", tag=200, margin=1.1, encode=encode, decode=decode)
    monkeypatch.setitem(CODERS, "zlib", coder)
    state = {"blocks.0.mlp.up.weight": torch.randn(64, 32, generator=torch.Generator().manual_seed(0))}
    packed = pack_tensors(state, QuantConfig(coder="zlib"))
    assert packed.artifact.sections["weights/integers"][0] == 200
    ans = pack_tensors(state, QuantConfig())
    assert torch.equal(
        unpack_tensors(packed.artifact)["blocks.0.mlp.up.weight"],
        unpack_tensors(ans.artifact)["blocks.0.mlp.up.weight"],
    )
    with pytest.raises(ConfigError, match=r"quant\.coder must be one of ans, lzma, zlib, got 'huffman'"):
        QuantConfig(coder="huffman")
    docs = {path: doc for path, _, doc in walk(QuantConfig())}
    assert docs["coder"].endswith("There are: ans, lzma, zlib."), "`parbank recipes` lists it"
    monkeypatch.setitem(CODERS, "zlib", replace(coder, tag=CODERS["ans"].tag))
    with pytest.raises(
        ConfigError, match=r"another coder than 'zlib' has the tag 3; give each coder in CODERS its own"
    ):
        pack_tensors(state, QuantConfig(coder="zlib"))
