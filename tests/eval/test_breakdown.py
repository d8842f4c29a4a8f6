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
from parbank.eval.adaptation import AdaptConfig
from parbank.eval.breakdown import break_down, draw
from parbank.eval.methods import EvalConfig, find_contexts, find_idle, place_in_document, score_text
from parbank.eval.methods.ttt import score_ttt
from parbank.runtime import Runtime
from tests.eval.test_score import make_model

CPU = Runtime(device=torch.device("cpu"))
BOS = 1
CONFIGS = [
    EvalConfig(method="chunked", context=16),
    EvalConfig(method="sliding", context=16, stride=5),
    EvalConfig(method="streaming", context=16, segment=9),
    EvalConfig(method="ttt", context=16, adapt=AdaptConfig(chunk=30, scores="sliding"), stride=5),
    EvalConfig(method="ttt", context=16, adapt=AdaptConfig(chunk=30, adapter="low-rank", scores="sliding"), stride=5),
    EvalConfig(method="ttt", context=16, adapt=AdaptConfig(chunk=30, epochs=1)),
]


@pytest.fixture(scope="module")
def dataset(text_spec: str) -> Dataset:
    return open_dataset(text_spec, vocab_size=320, say=lambda line: None)


@pytest.fixture(scope="module")
def tokens(dataset: Dataset) -> np.ndarray:
    return np.concatenate([dataset.val.read(0, 70), dataset.val.read(0, 9), dataset.val.read(0, 41)])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.method}-{config.scores}")
def test_every_part_is_counted_once(config: EvalConfig, dataset: Dataset, tokens: np.ndarray, tmp_path: Path) -> None:
    model = make_model()
    scored = score_text(model, TokenSet([tokens]), config, CPU)
    total = scored.total(dataset.tokenizer)
    found = break_down(scored, dataset.tokenizer, config, model.config)
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


def test_what_ttt_never_learnt_from_is_said_by_what_it_is_shown(tokens: np.ndarray) -> None:
    """Three documents of 70, 9 and 40 targets: low-rank adapters start anew with each."""
    model = make_model().config
    for settings, message in (
        ({"chunk": 119}, "the text is one chunk of 119 tokens"),
        ({"chunk": 200}, "the text is one chunk of 119 tokens"),
        ({"chunk": 118}, None),
        ({"chunk": 70, "adapter": "low-rank"}, "no document goes on after a whole chunk of 70 tokens"),
        ({"chunk": 69, "adapter": "low-rank"}, None),
    ):
        config, seen = AdaptConfig(epochs=1, **settings), _Watch()
        score_ttt(make_model(), TokenSet([tokens]), context=16, stride=16, config=config, adapter=seen, runtime=CPU)
        found = find_idle(tokens, EvalConfig(method="ttt", context=16, adapt=config), model)
        assert (found is None) == bool(seen.chunks)
        assert found is None if message is None else message in str(found)


class _Watch:
    """An adapter that only counts what it is shown."""

    def __init__(self) -> None:
        self.chunks = 0

    def __call__(self, model: object) -> "_Watch":
        return self

    def learn(self, tokens: torch.Tensor, progress: float) -> None:
        self.chunks += 1

    def reset(self) -> None: ...


def test_contexts_are_what_the_windows_give() -> None:
    tokens, model = np.full(24, 5), make_model().config
    tokens[[0, 9]] = BOS
    chunked, sliding, streaming = (
        find_contexts(
            tokens, replace(config, context=8, stride=3 if config.method == "sliding" else None), model
        ).tolist()
        for config in CONFIGS[:3]
    )
    assert chunked == [*range(8), *range(8), *range(7)]
    assert sliding == [*range(8), *[5, 6, 7] * 5]
    assert streaming == [*range(8), *[7] * 15]
    isolated = find_contexts(tokens, EvalConfig(context=8), replace(model, isolate_documents=True)).tolist()
    assert isolated == [*range(8), 0, 0, 1, 2, 3, 4, 5, 6, *range(7)]
    assert place_in_document(tokens, BOS).tolist() == [*range(9), *range(14)]


def test_without_matplotlib_the_message_says_what_to_install(
    dataset: Dataset, tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = make_model(), CONFIGS[0]
    found = break_down(score_text(model, TokenSet([tokens]), config, CPU), dataset.tokenizer, config, model.config)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib.*parbank\[bench\]"):
        draw(found, "", tmp_path / "x.png")


def test_settings_of_another_method_are_refused() -> None:
    with pytest.raises(ConfigError, match="--stride is for sliding windows"):
        EvalConfig(method="streaming", stride=64)
    with pytest.raises(ConfigError, match="--stride is for sliding windows"):
        EvalConfig(method="ttt", stride=64)
    with pytest.raises(ConfigError, match="settings of ttt were given with --method sliding"):
        EvalConfig(method="sliding", adapt=AdaptConfig())
    with pytest.raises(ConfigError, match="--segment is for streaming"):
        EvalConfig(method="chunked", segment=5)
    for method in ("streaming", "ttt"):
        with pytest.raises(ConfigError, match="--segment must be at least 1, got 0"):
            EvalConfig(method=method, segment=0)
    with pytest.raises(ConfigError, match="at least 1 token, got 0"):
        EvalConfig(context=0)
    assert EvalConfig(method="sliding", context=16).step == 16
    assert EvalConfig(method="sliding", context=2048).step == 64
