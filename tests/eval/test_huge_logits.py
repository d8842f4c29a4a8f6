"""An artifact may hold any weights: logits too large for float32's digits give an honest score, or none."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import parbank
from parbank.artifact.about import About
from parbank.artifact.load import LoadedModel
from parbank.artifact.model import pack_model
from parbank.data.dataset import open_dataset
from parbank.data.shards import TokenSet
from parbank.errors import ParbankError
from parbank.eval.compressor.archive import compress, decompress
from parbank.eval.methods import METHODS, make_method
from parbank.eval.score import Score
from parbank.model import GPT, ModelConfig
from parbank.ops.backend import use_backend
from parbank.quant.config import QuantConfig
from parbank.runtime import Runtime
from tests.eval.sizes import TOKENIZER

CPU = Runtime(device=torch.device("cpu"))
VOCAB, CONTEXT = 320, 16
SETTINGS: dict[str, dict[str, Any]] = {
    "ttt": {"chunk": 16, "epochs": 1, "lr": 0.0},
    "adaptive": {"chunk": 16, "lr": 0.0, "rank": 2, "rows": 2, "orders": ()},
}


def make_huge(size: float) -> GPT:
    """Every logit is `size`, so that every token costs log(320) nats. Without a softcap nothing makes them smaller."""
    config = ModelConfig(
        vocab_size=VOCAB, bos_id=1, layers=1, width=256, heads=4, kv_heads=2, rope_dims=16, tied=False, softcap=0.0
    )
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.token_embedding.weight.fill_(1.0)
        assert model.head is not None
        model.head.weight.fill_(size / config.width)
    return model


def make_loaded(model: GPT, text_spec: str) -> LoadedModel:
    tokenizer = open_dataset(text_spec, vocab_size=VOCAB, say=lambda line: None).tokenizer
    return LoadedModel(model=model, tokenizer=tokenizer, context=CONTEXT, data=None, meta={}, source=Path("m.pbk"))


def score(method: str, size: float, targets: int = 99) -> Score:
    tokens = np.random.default_rng(0).integers(2, VOCAB, targets + 1).astype(np.uint16)
    tokens[[0, targets // 2]] = 1
    scoring = make_method(method, context=CONTEXT, graphed=False, **SETTINGS.get(method, {}))
    return scoring.score(make_huge(size), TokenSet([tokens]), CPU, tokenizer=TOKENIZER).total(TOKENIZER)


@pytest.mark.parametrize("size", [1e6, 1e9])
@pytest.mark.parametrize("method", METHODS)
def test_equal_logits_cost_the_logarithm_of_their_number(method: str, size: float) -> None:
    """Before, the temperatures of `adaptive` cost next to nothing with logits of 1e9."""
    assert score(method, size).loss == pytest.approx(math.log(VOCAB), rel=1e-4)


@pytest.mark.parametrize("method", ["chunked", "streaming"])
def test_the_kernels_agree(method: str) -> None:
    """Before, -80 bits a byte with the kernels, by any method."""
    with use_backend("triton"):
        assert score(method, 1e9, targets=10).loss == pytest.approx(math.log(VOCAB), rel=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_infinite_logits_have_no_score(method: str) -> None:
    with np.errstate(invalid="ignore"), pytest.raises(ParbankError, match="not a number from token 1 of 99"):
        score(method, math.inf)


def test_an_artifact_with_huge_weights_scores_as_what_it_is(text_spec: str, tmp_path: Path) -> None:
    loaded, path = make_loaded(make_huge(1e9), text_spec), tmp_path / "huge.pbk"
    about = About(model=loaded.model.config, context=CONTEXT, data="stdlib", recipe="custom", seed=0)
    quant = QuantConfig(method="rows", matrix_bits=8, embedding_bits=8)
    pack_model(loaded.model.state_dict(), about, loaded.tokenizer.model_bytes, quant, max_bytes=1 << 20, out=path)
    model = parbank.load(path, device="cpu")
    for method, settings in (("chunked", {}), ("adaptive", {"orders": (), "lr": 0.0})):
        found = model.score(b"The sea was calm. " * 5, method=method, **settings)
        assert found.loss == pytest.approx(math.log(VOCAB), rel=1e-3)


def test_a_text_compressed_with_huge_logits_comes_back(text_spec: str, tmp_path: Path) -> None:
    """The weights of its tokens were negative, and the text was lost: `compress` said nothing of it."""
    loaded, text = make_loaded(make_huge(1e9), text_spec), b"The sea was calm. " * 9
    (tmp_path / "a.txt").write_bytes(text)
    written = compress([tmp_path / "a.txt"], loaded, tmp_path / "a.pbz")
    assert written.tally.bits == pytest.approx(math.log2(VOCAB) * written.tally.tokens, rel=1e-4)
    (back,) = decompress(tmp_path / "a.pbz", loaded, tmp_path / "back")
    assert back.read_bytes() == text


@pytest.mark.parametrize("size", [math.inf, math.nan])
def test_a_model_without_probabilities_compresses_nothing(text_spec: str, tmp_path: Path, size: float) -> None:
    (tmp_path / "a.txt").write_bytes(b"The sea was calm. " * 9)
    with pytest.raises(ParbankError, match="text that it compressed would be lost: use another model"):
        compress([tmp_path / "a.txt"], make_loaded(make_huge(size), text_spec), tmp_path / "a.pbz")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
