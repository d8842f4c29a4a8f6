"""The codecs: errors within half a step, rows of every size, and weights that are the same on every machine."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from parbank.errors import ArtifactError
from parbank.quant.coders.ans import coded_bits
from parbank.quant.config import QuantConfig
from parbank.quant.integers import Quantised, _recover, butterfly, dequantise, quantise_rows, recover, to_half

RANGES = [1, 2, 3, 5, 7, 8, 15, 20, 31, 63, 100, 127]
matrices = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=12),
    elements=st.floats(-60000, 60000, width=32, allow_subnormal=True),
)


@settings(deadline=None)
@given(weights=matrices, q=st.sampled_from(RANGES))
def test_unclipped_error_is_within_half_a_step(weights, q):
    quantised = quantise_rows(weights, q)
    step = quantised.scales.astype(np.float64)
    error = np.abs(dequantise(quantised).astype(np.float64) - weights)
    # float32 rounding of weight / scale and of the product: a few units in the last place of the weight
    assert (error <= step / 2 + 4e-7 * np.abs(weights)).all()
    assert np.abs(quantised.values.astype(int)).max() <= q
    assert quantised.values.dtype == np.int8
    assert quantised.scales.dtype == np.float16


@settings(deadline=None)
@given(weights=matrices, q=st.sampled_from(RANGES))
def test_clip_search_never_raises_the_error_of_a_row(weights, q):
    def row_errors(fractions):
        difference = dequantise(quantise_rows(weights, q, fractions)).astype(np.float64) - weights
        return (difference**2).sum(axis=1)

    plain, searched = row_errors((1.0,)), row_errors(QuantConfig().clip_fractions)
    assert (searched <= plain * (1 + 1e-5)).all()


def test_clip_search_pays_on_a_row_with_an_outlier():
    row = np.random.default_rng(0).standard_normal((1, 512)).astype(np.float32)
    row[0, 7] = 5.0
    plain, searched = quantise_rows(row, 7), quantise_rows(row, 7, QuantConfig().clip_fractions)
    assert searched.scales[0] < plain.scales[0]
    assert ((dequantise(searched) - row) ** 2).sum() < 0.95 * ((dequantise(plain) - row) ** 2).sum()


@settings(deadline=None)
@given(weights=matrices, q=st.sampled_from(RANGES))
def test_quantising_what_was_quantised_changes_nothing(weights, q):
    weights = np.where(
        np.abs(weights) < 0.01, 0, weights
    )  # below, float16 scales are subnormal and too coarse for this
    once = dequantise(quantise_rows(weights, q))
    assert np.array_equal(dequantise(quantise_rows(once, q)), once)


def test_rows_of_zeros_and_of_tiny_weights():
    weights = np.array([[0, 0, -0.0], [1e-7, -5e-8, 0], [1e-12, 0, 0], [1e-42, 0, 0], [1e-4, -1e-4, 5e-5]], np.float32)
    quantised = quantise_rows(weights, 31, QuantConfig().clip_fractions)
    back = dequantise(quantised)
    assert quantised.scales[0] == 0
    assert (back[0] == 0).all()
    assert (quantised.scales[1:] >= 2.0**-24).all()
    assert (
        np.abs(back - weights).max(axis=1) <= np.maximum(quantised.scales[:, 0].astype(np.float32), 2.0**-24) / 2
    ).all()
    assert np.allclose(back[4], weights[4], rtol=0.02)


def test_rows_have_scales_of_their_own():
    base = np.linspace(-1, 1, 32, dtype=np.float32)
    back = dequantise(quantise_rows(np.stack([base, base * 1000, base * 1e-3]), 31))
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


def test_groups_have_scales_of_their_own():
    values = np.arange(-6, 6, dtype=np.int8).reshape(2, 6)
    scales = np.array([[1, 2, 4], [0.5, 0, 8]], np.float16)
    expected = values.astype(np.float32) * np.repeat(scales.astype(np.float32), 2, axis=1)
    assert np.array_equal(dequantise(Quantised(values, scales, 6)), expected)


@pytest.mark.parametrize("block", [1, 2, 8, 32])
def test_rotation_is_undone_exactly(block):
    """Integers rotated stay integers, so that the whole way back is exact arithmetic."""
    rng = np.random.default_rng(block)
    weights = rng.integers(-1, 2, (5, 96)).astype(np.float64)
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    rotated = (weights.reshape(5, -1, block) @ matrix).reshape(5, 96)
    assert np.array_equal(butterfly(weights, block), rotated)
    scales = np.full((5, 1), 0.25, np.float16)
    back = dequantise(Quantised(rotated.astype(np.int8), scales, 127, rotation=block))
    assert np.array_equal(back, (weights / 4).astype(np.float32))


def as_specified(quantised: Quantised) -> np.ndarray:
    """docs/reference/artifact.md to the letter, without slices or whole numbers."""
    (rows, cols), groups = quantised.values.shape, quantised.scales.shape[1]
    scales = np.repeat(quantised.scales.astype(np.float32), cols // groups, axis=1)
    wide, half = (quantised.values.astype(np.float32) * scales).astype(np.float64), 1
    while half < quantised.rotation:
        pairs = wide.reshape(rows, -1, 2, half)
        wide = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(rows, cols)
        half *= 2
    wide /= max(quantised.rotation, 1)
    for left, right in zip(quantised.low_rank[0].T, quantised.low_rank[1]) if quantised.low_rank else ():
        wide += np.outer(left.astype(np.float64), right.astype(np.float64))
    return wide.astype(np.float32)


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(1, 1), (3, 8), (5, 96), (300, 512), (2, 4096), (1, 1 << 17)]),
    q=st.sampled_from([1, 31, 127]),
    groups=st.sampled_from([1, 1, 2]),
    rank=st.sampled_from([0, 0, 1, 3]),
    zeros=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_weights_are_what_the_specification_says_bit_for_bit(seed, shape, q, groups, rank, zeros):
    rng = np.random.default_rng(seed)
    (rows, cols), groups, rank = shape, min(groups, shape[1]), min(rank, *shape)
    scales = np.exp2(rng.uniform(-24, 15, (rows, groups))).astype(np.float16)
    scales *= rng.random(scales.shape) > 0.3 * zeros  # zeros of both signs
    factors = [rng.standard_normal(s).astype(np.float16) for s in ((rows, rank), (rank, cols))]
    values, rotation = rng.integers(-q, q + 1, shape).astype(np.int8), rng.choice([0, 1, cols & -cols])
    made = Quantised(values, scales, q, int(rotation), tuple(factors) if rank else None)
    assert dequantise(made).tobytes() == as_specified(made).tobytes()


def test_undoing_a_rotation_takes_little_more_memory_than_the_weights():
    values = np.random.default_rng(0).integers(-31, 32, (2048, 512)).astype(np.int8)
    made = Quantised(values, np.ones((2048, 1), np.float16), 31, 512)
    tracemalloc.start()
    weights = dequantise(made)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.5 * weights.nbytes


def test_low_rank_is_added_after_the_rotation_rank_by_rank():
    rng = np.random.default_rng(0)
    values, scales = rng.integers(-7, 8, (4, 8)).astype(np.int8), np.full((4, 2), 0.1, np.float16)
    left, right = rng.standard_normal((4, 3)).astype(np.float16), rng.standard_normal((3, 8)).astype(np.float16)
    expected = dequantise(Quantised(values, scales, 7, rotation=8)).astype(np.float64)
    for rank in range(3):
        expected += np.outer(left[:, rank].astype(np.float64), right[rank].astype(np.float64))
    found = dequantise(Quantised(values, scales, 7, rotation=8, low_rank=(left, right)))
    assert np.abs(found - expected).max() < 1e-6
    assert not np.array_equal(found, dequantise(Quantised(values, scales, 7, rotation=8)))


@settings(deadline=None)
@given(weights=matrices, q=st.sampled_from(RANGES))
def test_integers_are_found_again_in_the_weights_they_made(weights, q):
    made = dequantise(quantise_rows(weights, q))
    plain, found = _recover(made, 0), recover(made)
    assert plain is not None
    assert plain.q <= q
    assert found is not None  # a rotation where that is cheaper, e.g. for a row of equal weights
    assert coded_bits(found.values, found.q) <= coded_bits(plain.values, plain.q)
    assert np.array_equal(dequantise(found), made)


@pytest.mark.parametrize("rotation", [0, 64])
def test_coarse_integers_are_found_the_way_they_were_stored(rotation):
    """Sums of a few are whole multiples too: both ways dequantise to the same weights, one of them takes more bits."""
    values = (np.random.default_rng(0).random((128, 64)) < 0.1).astype(np.int8)
    values[:, 5] = -1
    made = Quantised(values, np.full((128, 1), 0.25, np.float16), 1, rotation)
    other = _recover(dequantise(made), 64 - rotation)
    assert other is not None
    assert np.array_equal(dequantise(other), dequantise(made))
    found = recover(dequantise(made))
    assert found is not None
    assert (found.rotation, found.q) == (rotation, 1)
    assert np.array_equal(found.values, values)


@given(st.integers(0, 2**32 - 1), st.sampled_from([(3, 8), (5, 24), (16, 512)]), st.sampled_from([3, 31, 127]))
@settings(max_examples=30)
def test_rotated_integers_are_found_again_too(seed, shape, q):
    rng = np.random.default_rng(seed)
    values = rng.integers(-q, q + 1, shape).astype(np.int8)
    scales = np.exp2(rng.integers(-60, 8, (shape[0], 1)) / 8).astype(np.float16)
    made = dequantise(Quantised(values, scales, q, rotation=shape[1] & -shape[1]))
    found = recover(made)
    assert found is not None
    assert np.array_equal(dequantise(found), made)


def test_weights_that_no_integers_made_are_not_recovered():
    assert recover(np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)) is None
    assert recover(np.array([[1.0, np.pi]], np.float32)) is None


@settings(deadline=None)
@given(weights=matrices, q=st.sampled_from(RANGES), data=st.data())
def test_groups_are_rows_of_their_own(weights, q, data):
    groups = data.draw(st.sampled_from([n for n in range(1, weights.shape[1] + 1) if weights.shape[1] % n == 0]))
    found = quantise_rows(weights, q, QuantConfig().clip_fractions, groups=groups)
    rows = quantise_rows(weights.reshape(len(weights) * groups, -1), q, QuantConfig().clip_fractions)
    assert found.scales.shape == (len(weights), groups)
    assert np.array_equal(dequantise(found), dequantise(rows).reshape(weights.shape))


@settings(deadline=None)
@given(weights=matrices, q=st.sampled_from(RANGES))
def test_exponents_are_the_next_powers_of_two(weights, q):
    plain, found = quantise_rows(weights, q), None
    try:
        found = quantise_rows(weights, q, exponents=True)
    except ArtifactError:  # the next power of two is beyond float16
        assert plain.scales.max() > 2**15
        return
    steps, powers = plain.scales.astype(np.float64), found.scales.astype(np.float64)
    assert (np.frexp(powers[powers > 0])[0] == 0.5).all()
    assert ((powers == 0) == (steps == 0)).all()
    assert (steps <= powers).all()
    assert (powers < 2 * steps)[steps > 0].all()


def test_deviations_say_where_to_clip():
    weights = np.random.default_rng(0).standard_t(4, (8, 512)).astype(np.float32)
    found = quantise_rows(weights, 31, deviations=3.0)
    assert found.scales[:, 0] == pytest.approx(3 * weights.std(axis=1) / 31, rel=2e-3)
    assert (np.abs(found.values).max(axis=1) == 31).all()
    wide = quantise_rows(weights, 31, deviations=100.0)
    assert np.array_equal(wide.values, quantise_rows(weights, 31).values), "never wider than the largest weight"
