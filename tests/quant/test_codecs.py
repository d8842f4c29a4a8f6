"""The codecs: errors within half a step, rows of every size, streams that come back exactly and never expand."""

import contextlib
import lzma
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from parbank.errors import ArtifactError
from parbank.quant.codecs import (
    _FILTERS,
    decode_bytes,
    decode_halves,
    decode_integers,
    dequantise_rows,
    encode_bytes,
    encode_halves,
    encode_integers,
    entropy_bits,
    fixed_bytes,
    quantise_rows,
    to_half,
)
from parbank.quant.config import QuantConfig

RANGES = [1, 2, 3, 5, 7, 8, 15, 20, 31, 63, 100, 127]
matrices = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=12),
    elements=st.floats(-60000, 60000, width=32, allow_subnormal=True),
)


@given(weights=matrices, q=st.sampled_from(RANGES))
def test_unclipped_error_is_within_half_a_step(weights, q):
    quantised = quantise_rows(weights, q)
    step = quantised.scales.astype(np.float64)
    error = np.abs(dequantise_rows(quantised).astype(np.float64) - weights)
    # float32 rounding of weight / scale and of the product: a few units in the last place of the weight
    assert (error <= step / 2 + 4e-7 * np.abs(weights)).all()
    assert np.abs(quantised.values.astype(int)).max() <= q
    assert quantised.values.dtype == np.int8
    assert quantised.scales.dtype == np.float16


@given(weights=matrices, q=st.sampled_from(RANGES))
def test_clip_search_never_raises_the_error_of_a_row(weights, q):
    def row_errors(fractions):
        difference = dequantise_rows(quantise_rows(weights, q, fractions)).astype(np.float64) - weights
        return (difference**2).sum(axis=1)

    plain, searched = row_errors((1.0,)), row_errors(QuantConfig().clip_fractions)
    assert (searched <= plain * (1 + 1e-5)).all()


def test_clip_search_pays_on_a_row_with_an_outlier():
    row = np.random.default_rng(0).standard_normal((1, 512)).astype(np.float32)
    row[0, 7] = 5.0
    plain, searched = quantise_rows(row, 7), quantise_rows(row, 7, QuantConfig().clip_fractions)
    assert searched.scales[0] < plain.scales[0]
    assert ((dequantise_rows(searched) - row) ** 2).sum() < 0.95 * ((dequantise_rows(plain) - row) ** 2).sum()


@given(weights=matrices, q=st.sampled_from(RANGES))
def test_quantising_what_was_quantised_changes_nothing(weights, q):
    weights = np.where(
        np.abs(weights) < 0.01, 0, weights
    )  # below, float16 scales are subnormal and too coarse for this
    once = dequantise_rows(quantise_rows(weights, q))
    assert np.array_equal(dequantise_rows(quantise_rows(once, q)), once)


def test_rows_of_zeros_and_of_tiny_weights():
    weights = np.array([[0, 0, -0.0], [1e-7, -5e-8, 0], [1e-12, 0, 0], [1e-42, 0, 0], [1e-4, -1e-4, 5e-5]], np.float32)
    quantised = quantise_rows(weights, 31, QuantConfig().clip_fractions)
    back = dequantise_rows(quantised)
    assert quantised.scales[0] == 0
    assert (back[0] == 0).all()
    assert (quantised.scales[1:] >= 2.0**-24).all()
    assert (
        np.abs(back - weights).max(axis=1) <= np.maximum(quantised.scales[:, 0].astype(np.float32), 2.0**-24) / 2
    ).all()
    assert np.allclose(back[4], weights[4], rtol=0.02)


def test_rows_have_scales_of_their_own():
    base = np.linspace(-1, 1, 32, dtype=np.float32)
    back = dequantise_rows(quantise_rows(np.stack([base, base * 1000, base * 1e-3]), 31))
    for row, factor in zip(back, (1, 1000, 1e-3)):
        assert np.abs(row / factor - base).max() < 0.02


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_by_name(bad):
    weights = np.ones((4, 4), np.float32)
    weights[2, 1] = bad
    with pytest.raises(ArtifactError, match=r"blocks\.0\.up.*not finite"):
        quantise_rows(weights, 31, name="blocks.0.up")
    with pytest.raises(ArtifactError, match=r"gain.*float16"):
        to_half(weights, name="gain")


def test_values_beyond_float16_are_refused_by_name():
    with pytest.raises(ArtifactError, match=r"up.*too large"):
        quantise_rows(np.full((2, 2), 1e30, np.float32), 31, name="up")
    with pytest.raises(ArtifactError, match=r"gain.*float16"):
        to_half(np.array([70000.0], np.float32), name="gain")
    assert to_half(np.array([65504.0], np.float32))[0] == 65504


@settings(deadline=None)
@given(q=st.sampled_from(RANGES), count=st.integers(0, 400), seed=st.integers(0, 2**32 - 1), spread=st.floats(0, 2))
def test_integer_streams_come_back_and_keep_their_bound(q, count, seed, spread):
    rng = np.random.default_rng(seed)
    values = np.clip(np.rint(rng.standard_normal(count) * q * spread), -q, q).astype(np.int8)
    stream = encode_integers(values, q)
    assert len(stream) <= fixed_bytes(count, q)
    assert np.array_equal(decode_integers(stream, count, q, source="file"), values)


@pytest.mark.parametrize("q", RANGES)
def test_uniform_integers_are_stored_at_fixed_width_at_most(q):
    values = np.random.default_rng(q).integers(-q, q + 1, 300_001).astype(np.int8)
    stream = encode_integers(values, q)
    assert entropy_bits(values) / 8 < len(stream) <= fixed_bytes(values.size, q)
    assert np.array_equal(decode_integers(stream, values.size, q, source="file"), values)


@pytest.mark.parametrize(("q", "margin"), [(31, 1.03), (15, 1.04), (7, 1.025)])
def test_gaussian_integers_come_close_to_their_entropy(q, margin):
    weights = np.random.default_rng(0).standard_normal((600, 512)).astype(np.float32)
    values = quantise_rows(weights, q).values
    assert len(encode_integers(values, q)) <= entropy_bits(values) / 8 * margin


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
        lambda: decode_integers(stream, count, q, source="file"),
        lambda: decode_halves(stream, count, source="file"),
        lambda: decode_bytes(stream, None, source="file"),
    ):
        with contextlib.suppress(ArtifactError):
            decode()


def test_integers_outside_the_range_are_refused():
    beyond = b"\x01" + lzma.compress(bytes([63]), format=lzma.FORMAT_RAW, filters=_FILTERS)
    with pytest.raises(ArtifactError, match="outside"):
        decode_integers(beyond, 1, 31, source="file")
    joined = b"\x01" + lzma.compress(
        bytes([255]), format=lzma.FORMAT_RAW, filters=_FILTERS
    )  # 15 * 15 - 1 = 224 is the last
    with pytest.raises(ArtifactError, match="outside"):
        decode_integers(joined, 2, 7, source="file")


def test_bombs_are_stopped():
    """A stream that expands further than its announced size, and one that honestly announces far too much."""
    huge = (1 << 24) + 1
    bomb = b"\x01" + lzma.compress(bytes(huge), format=lzma.FORMAT_RAW, filters=_FILTERS)
    assert len(bomb) < huge // 1000
    for size in (1000, huge, 1 << 50, None):
        tracemalloc.start()
        with pytest.raises(ArtifactError, match="damaged"):
            decode_bytes(bomb, size, source="file")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert size is None or peak < 1 << 20


def test_the_writer_keeps_to_the_expansion_limit_of_the_reader():
    zeros = np.zeros((1 << 24) + 1, np.int8)  # lzma would make 3 KB of it, which the reader would take for a bomb
    stream = encode_integers(zeros, 127)
    assert len(stream) == fixed_bytes(zeros.size, 127)
    assert not decode_integers(stream, zeros.size, 127, source="file").any()
