"""benchmarks/compression.py: the scores of segments are the bits that the coder counts for the same segments."""

import ctypes
import ctypes.util
from collections.abc import Callable
from types import ModuleType

import pytest

from parbank.data.dataset import open_dataset
from parbank.eval.compressor.coder import TokenCoder
from tests.eval.test_compressor import make_loaded


def test_scored_segments_are_the_coded_ones(benchmark: Callable[[str], ModuleType], text_spec: str) -> None:
    loaded = make_loaded(open_dataset(text_spec, vocab_size=320, say=lambda line: None).tokenizer)
    script = benchmark("compression")
    tokens = script.read_text(loaded, text_spec, 400)
    assert 300 < len(loaded.tokenizer.decode_bytes(tokens)) <= 400
    for segments in (5, 20):
        _, bits = TokenCoder(loaded.model, loaded.context).encode(tokens[1:], segments)
        assert script.score_segments(loaded, tokens, segments) == pytest.approx(bits, rel=1e-5)


def test_other_compressors_give_the_text_back_smaller(benchmark: Callable[[str], ModuleType]) -> None:
    for compress in benchmark("compression").find_compressors().values():
        assert 0 < len(compress(b"abc" * 1000)) < 300


def test_the_system_s_brotli_gives_the_text_back(benchmark: Callable[[str], ModuleType]) -> None:
    """By the library's own decoder, where the system has both."""
    encoder, decoder = (ctypes.util.find_library(name) for name in ("brotlienc", "brotlidec"))
    if encoder is None or decoder is None:
        pytest.skip("this system has no brotli libraries")
    text = b"".join(b"line %d of a text\n" % number for number in range(3000))
    packed = benchmark("compression").compress_by_library(ctypes.CDLL(encoder), text)
    assert len(packed) < len(text) // 5
    size, out = ctypes.c_size_t(len(text)), ctypes.create_string_buffer(len(text))
    read = ctypes.CDLL(decoder).BrotliDecoderDecompress
    assert read(ctypes.c_size_t(len(packed)), packed, ctypes.byref(size), out) == 1
    assert out.raw[: size.value] == text
