"""benchmarks/compression.py: the scores of segments are the bits that the coder counts for the same segments."""

from collections.abc import Callable
from types import ModuleType

import pytest

from parbank.data.dataset import open_dataset
from parbank.eval.compressor.coder import Coder
from tests.eval.test_compressor import make_loaded


def test_scored_segments_are_the_coded_ones(benchmark: Callable[[str], ModuleType], text_spec: str) -> None:
    loaded = make_loaded(open_dataset(text_spec, vocab_size=320, say=lambda line: None).tokenizer)
    script = benchmark("compression")
    tokens = script.read_text(loaded, text_spec, 400)
    assert 300 < len(loaded.tokenizer.decode_bytes(tokens)) <= 400
    for segments in (5, 20):
        _, bits = Coder(loaded.model, loaded.context).encode(tokens[1:], segments)
        assert script.score_segments(loaded, tokens, segments) == pytest.approx(bits, rel=1e-5)


def test_other_compressors_give_the_text_back_smaller(benchmark: Callable[[str], ModuleType]) -> None:
    for compress in benchmark("compression").find_compressors().values():
        assert 0 < len(compress(b"abc" * 1000)) < 300
