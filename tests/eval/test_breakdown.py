"""Every cut of a score adds up to all of it, and says where a token stood by counting it out."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from parbank.data.dataset import Dataset, open_dataset
from parbank.data.shards import TokenSet
from parbank.errors import ConfigError
from parbank.eval.adaptation import ADAPTERS
from parbank.eval.breakdown import Breakdown, Part, break_down, draw, is_picture
from parbank.eval.methods import make_method
from parbank.eval.methods.base import Method, place_in_document
from parbank.eval.methods.chunked import Chunked
from parbank.eval.methods.sliding import Sliding
from parbank.eval.methods.streaming import Streaming
from parbank.runtime import Runtime
from tests.eval.test_score import make_model

CPU = Runtime(device=torch.device("cpu"))
BOS = 1
METHODS = [
    make_method("chunked", context=16),
    make_method("sliding", context=16, stride=5),
    make_method("streaming", context=16, segment=9),
    make_method("ttt", context=16, chunk=30, scores="sliding", stride=5),
    make_method("ttt", context=16, chunk=30, adapter="low-rank", scores="sliding", stride=5),
    make_method("ttt", context=16, chunk=30, epochs=1),
]


@pytest.fixture(scope="module")
def dataset(text_spec: str) -> Dataset:
    return open_dataset(text_spec, vocab_size=320, say=lambda line: None)


@pytest.fixture(scope="module")
def tokens(dataset: Dataset) -> np.ndarray:
    return np.concatenate([dataset.val.read(0, 70), dataset.val.read(0, 9), dataset.val.read(0, 41)])


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_part_is_counted_once(method: Method, dataset: Dataset, tokens: np.ndarray, tmp_path: Path) -> None:
    model = make_model()
    scored = method.score(model, TokenSet([tokens]), CPU)
    total = scored.total(dataset.tokenizer)
    found = break_down(scored, dataset.tokenizer, method, model.config)
    for parts in (found.by_context, found.by_place, found.by_document):
        assert sum(part.tokens for part in parts) == total.tokens
        assert sum(part.bytes for part in parts) == total.bytes
        assert sum(part.bits for part in parts) == pytest.approx(total.bits)
    assert [part.tokens for part in found.by_document] == [70, 9, 40]
    opening = " ".join(dataset.tokenizer.decode(tokens[:24]).split())
    assert [part.opening for part in found.by_document] == [
        opening,
        opening[: len(found.by_document[1].opening)],
        opening,
    ]
    assert found.by_context[-1].last <= 15
    draw(found, r"a$\frac$b", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert set(found.as_dict()) == {"by_context", "by_place_in_document", "by_document"}


def test_what_ttt_never_learnt_from_is_said_by_what_it_is_shown(
    tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three documents of 70, 9 and 40 targets: low-rank adapters start anew with each."""
    model = make_model().config
    for settings, message in (
        ({"chunk": 119}, "the text is one chunk of 119 tokens"),
        ({"chunk": 200}, "the text is one chunk of 119 tokens"),
        ({"chunk": 118}, None),
        ({"chunk": 70, "adapter": "low-rank"}, "no document goes on after a whole chunk of 70 tokens"),
        ({"chunk": 69, "adapter": "low-rank"}, None),
    ):
        method, seen = make_method("ttt", context=16, epochs=1, **settings), _Watch()
        for config in ADAPTERS.values():
            monkeypatch.setattr(config, "make_adapter", lambda *_, _seen=seen, **__: _seen)
        method.score(make_model(), TokenSet([tokens]), CPU)
        found = method.find_idle(tokens, model)
        assert (found is None) == bool(seen.chunks)
        assert found is None if message is None else message in str(found)


class _Watch:
    """An adapter that only counts what it is shown."""

    def __init__(self) -> None:
        self.chunks = 0

    def learn(self, tokens: torch.Tensor, progress: float) -> None:
        self.chunks += 1

    def reset(self) -> None: ...


def test_contexts_are_what_the_windows_give() -> None:
    tokens, model = np.full(24, 5), make_model().config
    tokens[[0, 9]] = BOS
    chunked, sliding, streaming = (
        method.find_contexts(tokens, model).tolist()
        for method in (Chunked(context=8), Sliding(context=8, stride=3), Streaming(context=8))
    )
    assert chunked == [*range(8), *range(8), *range(7)]
    assert sliding == [*range(8), *[5, 6, 7] * 5]
    assert streaming == [*range(8), *[7] * 15]
    isolated = Chunked(context=8).find_contexts(tokens, replace(model, isolate_documents=True)).tolist()
    assert isolated == [*range(8), 0, 0, 1, 2, 3, 4, 5, 6, *range(7)]
    assert place_in_document(tokens, BOS).tolist() == [*range(9), *range(14)]


@pytest.mark.parametrize("name", ["x.png", "x.svg", "x.pdf", "X.JPG"])
def test_a_picture_says_that_parbank_drew_it(name: str, tmp_path: Path) -> None:
    """Else a second score could not replace it."""
    pytest.importorskip("matplotlib")
    parts = [Part(0, 0, 1, 1, 2.0)]
    draw(Breakdown(parts, parts, parts), "", tmp_path / name)
    assert is_picture(tmp_path / name)


def test_without_matplotlib_the_message_says_what_to_install(
    dataset: Dataset, tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, method = make_model(), METHODS[0]
    found = break_down(method.score(model, TokenSet([tokens]), CPU), dataset.tokenizer, method, model.config)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib.*parbank\[bench\]"):
        draw(found, "", tmp_path / "x.png")
