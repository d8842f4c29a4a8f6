"""The entropy coder: exact frequencies, a stream anyone could decode, sizes below the histogram's entropy, no way to fail."""

import builtins
import contextlib
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbank.errors import ArtifactError
from parbank.quant.coders import models
from parbank.quant.coders.ans import (
    _END,
    _END_RANGE,
    coded_bits,
    decode_scales,
    decode_tensors,
    encode_scales,
    encode_tensors,
)
from parbank.quant.coders.base import entropy_bits
from parbank.quant.coders.models import choose_model, flat_weights
from parbank.quant.integers import quantise_rows


def trained_like(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Heavy tails, rows and columns of different widths."""
    rng = np.random.default_rng(seed)
    widths = np.exp(0.3 * rng.standard_normal((rows, 1))) * np.exp(0.3 * rng.standard_normal(cols))
    return (rng.standard_t(6, (rows, cols)) * widths).astype(np.float32)


class Reference:
    """The stack coder of docs/reference/artifact.md in plain whole numbers: no library, no floats."""

    def __init__(self, stream: bytes) -> None:
        self.words = np.frombuffer(stream, "<u4").tolist()
        self.state = 0
        while self.words and self.state >> 32 == 0:
            self.state = self.state << 32 | self.words.pop()

    def pull(self, weights: np.ndarray, count: int) -> np.ndarray:
        frequencies = [int(w) + 1 for w in weights]
        starts = np.cumsum([0, *frequencies]).tolist()
        assert starts[-1] == 1 << 24
        found = []
        for _ in range(count):
            place = self.state & (1 << 24) - 1
            symbol = int(np.searchsorted(starts, place, side="right")) - 1
            self.state = (self.state >> 24) * frequencies[symbol] + place - starts[symbol]
            if self.state >> 32 == 0 and self.words:
                self.state = self.state << 32 | self.words.pop()
            found.append(symbol)
        return np.array(found, np.int32)


def test_a_stream_can_be_read_without_the_library():
    from parbank.quant.coders.ans import _read_tensor

    tensors = [(quantise_rows(trained_like(48, 40), 31).values, 31), (np.zeros((3, 2), np.int8), 1)]
    reference = Reference(encode_tensors(tensors))
    for values, q in tensors:
        assert np.array_equal(_read_tensor(reference.pull, *values.shape, q), values)
    assert reference.pull(flat_weights(_END_RANGE), 1)[0] == _END
    assert (reference.state, reference.words) == (0, [])


@settings(deadline=None, max_examples=200)
@given(
    counts=st.lists(st.integers(0, 10**6) | st.just(0), min_size=2, max_size=255).filter(any),
    centre=st.floats(0, 1),
)
def test_every_model_gives_every_symbol_a_frequency(counts, centre):
    counts = np.array(counts)
    at = int(centre * (len(counts) - 1))
    total, weights, about = choose_model(counts, at)
    assert weights.min() >= 0
    assert weights.sum() + len(weights) == 1 << 24
    entropy = -(counts[counts > 0] * np.log2(counts[counts > 0] / counts.sum())).sum()
    assert total >= 0.999999 * entropy
    for piece in about:
        assert piece.weights.sum() + len(piece.weights) == 1 << 24
        assert piece.symbols.min() >= 0
        assert piece.symbols.max() < len(piece.weights)


def test_frequencies_are_whole_numbers_from_whole_numbers():
    """Written down once: another machine, NumPy or Python must get the same."""
    decay = [2262789, 2364431, 2470614, 2581541, 2470614, 2364431, 2262789]
    assert models.decay_weights(100, 3, 3, 7).tolist() == decay
    assert models.decay_weights(60, 80, 2, 5).tolist() == [3337051, 3366194, 3370721, 3366194, 3337051]
    assert models.level_weights(np.array([72, 60, 41, 3, 0])).tolist() == [14851618, 1856452, 68990, 95, 56]
    assert models.flat_weights(3).tolist() == [5592405, 5592404, 5592404]


@pytest.mark.parametrize("q", [1, 3, 7, 15, 31, 63, 127])
def test_rows_and_columns_of_different_width_are_coded_below_the_entropy(q):
    values = quantise_rows(trained_like(512, 512), q).values
    size = 8 * len(encode_tensors([(values, q)]))
    assert size < 0.995 * entropy_bits(values)
    assert size == pytest.approx(coded_bits(values, q), rel=0.001)


def test_columns_alone_pay():
    """Loud inputs have small weights: scales per row cannot take that away."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((256, 768)) * np.exp(0.7 * rng.standard_normal(768))
    values = quantise_rows(weights.astype(np.float32), 31).values
    assert 8 * len(encode_tensors([(values, 31)])) < 0.93 * entropy_bits(values)


def test_small_and_even_tensors_stay_near_the_entropy():
    """Nothing to tell apart: what remains is the price of the description."""
    rng = np.random.default_rng(0)
    tensors = [(np.clip(np.rint(rng.standard_normal((32, 32)) * 9), -31, 31).astype(np.int8), 31) for _ in range(30)]
    size = 8 * len(encode_tensors(tensors))
    # The histogram of 1,024 integers fits their noise: its entropy is (63 - 1) / (2 ln 2) = 45 bits below the truth.
    assert size < sum(entropy_bits(values) + 45 + 30 for values, _ in tensors)


def test_prediction_is_what_the_coder_takes():
    for seed, (rows, cols, q) in enumerate([(16, 16, 31), (100, 30, 7), (300, 200, 127), (512, 300, 2)]):
        values = quantise_rows(trained_like(rows, cols, seed), q).values
        assert 8 * len(encode_tensors([(values, q)])) == pytest.approx(coded_bits(values, q), abs=64)
    assert coded_bits(np.zeros((0, 5), np.int8)) == 0
    assert coded_bits(np.zeros((50, 50), np.int8)) < 100


@settings(deadline=None, max_examples=300)
@given(
    words=st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**32 - 1]), max_size=40),
    cut=st.integers(0, 3),
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 127)), max_size=3),
)
def test_garbage_decodes_or_is_refused(words, cut, shapes):
    stream = np.array(words, "<u4").tobytes()
    stream = stream[: len(stream) - cut]
    with contextlib.suppress(ArtifactError):
        decode_tensors(stream, shapes, source="file")
    with contextlib.suppress(ArtifactError):
        decode_scales(stream, [rows for rows, _, _ in shapes], source="file")


def test_more_or_fewer_weights_than_there_are_is_refused():
    values = quantise_rows(trained_like(40, 40), 31).values
    stream = encode_tensors([(values, 31)])
    for shapes in ([(40, 41, 31)], [(41, 40, 31)], [(40, 39, 31)], [(40, 40, 31), (1, 1, 1)], [], [(40, 40, 30)]):
        with pytest.raises(ArtifactError, match="file is damaged"):
            decode_tensors(stream, shapes, source="file")
    for damaged in (stream[:-4], stream[:-1], stream + bytes(4), stream + b"\1\0\0\0", b""):
        with pytest.raises(ArtifactError, match="file is damaged"):
            decode_tensors(damaged, [(40, 40, 31)], source="file")
    with pytest.raises(ArtifactError, match="claims to hold"):
        decode_tensors(stream, [(2**30, 2**9, 31)], source="file")
    scales = encode_scales([np.linspace(1, 2, 30).astype(np.float16)])
    with pytest.raises(ArtifactError, match="file is damaged"):
        decode_scales(scales, [31, 1], source="file")


def test_a_panic_of_the_library_is_an_error_of_the_file(monkeypatch):
    """No input is known to cause one; to Python it is no Exception, and would end the process."""
    import constriction

    class PanicException(BaseException):
        pass

    def panic(*_, **__):
        raise PanicException("index out of bounds")

    monkeypatch.setattr(constriction.stream.model, "Categorical", panic)
    with pytest.raises(ArtifactError, match="coded data is broken"):
        decode_tensors(bytes([1, 2, 3, 4]), [(4, 4, 7)], source="file")


def test_a_missing_library_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("constriction"):
            raise ImportError("No module named 'constriction'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ArtifactError, match="pip install constriction"):
        encode_tensors([(np.zeros((2, 2), np.int8), 1)])


def test_decoding_is_fast_enough():
    """27 million weights in 5 s: a twentieth of them here, with room for a busy machine."""
    values = quantise_rows(trained_like(1536, 880), 31).values
    stream = encode_tensors([(values, 31)])
    began = time.process_time()
    decode_tensors(stream, [(*values.shape, 31)], source="file")
    assert time.process_time() - began < 5 * values.size / 27e6
