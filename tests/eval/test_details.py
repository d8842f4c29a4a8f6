"""The details of a score: they sum to it, and show the text itself."""

import json

import numpy as np
import pytest
import torch

from parbank.data.dataset import Dataset, open_dataset
from parbank.data.shards import TokenSet
from parbank.display import END
from parbank.eval.details import describe, examine
from parbank.eval.score import Scored
from parbank.eval.windows import score_chunked
from parbank.model import GPT
from parbank.recipes import get_recipe
from parbank.runtime import Runtime

PLACE = Runtime(device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parbank.eval.details.SAMPLE_TOKENS", 8)


@pytest.fixture(scope="module")
def dataset(text_spec: str) -> Dataset:
    return open_dataset(text_spec, vocab_size=320, say=lambda line: None)


@pytest.fixture(scope="module")
def text(dataset: Dataset) -> TokenSet:
    """The beginnings of both documents."""
    tokens = dataset.val.read(0, len(dataset.val))
    second = np.flatnonzero(tokens == dataset.tokenizer.bos_id)[1]
    return TokenSet([np.concatenate([tokens[:500], tokens[second : second + 500]])])


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(get_recipe("nano").model)


def test_the_score_is_that_of_score_chunked_and_the_details_sum_to_it(
    model: GPT, dataset: Dataset, text: TokenSet
) -> None:
    found = examine(model, text, dataset.tokenizer, context=64, runtime=PLACE)
    score, details = found.score, found.details
    assert score == score_chunked(model, text, dataset.tokenizer, context=64, runtime=PLACE)
    for key in ("by_context", "by_place"):
        assert sum(part["bytes"] for part in details[key]) == score.bytes
        assert sum(part["bits"] for part in details[key]) == pytest.approx(score.bits, abs=0.2)  # rounded
    assert sum(details["documents"]["bytes"]) == score.bytes
    assert sum(details["documents"]["bits"]) == pytest.approx(score.bits, abs=0.2)  # rounded
    assert len(details["documents"]["bytes"]) == 2
    assert details["documents"]["whole_text"]
    assert sum(details["bits_histogram"]["counts"]) == score.tokens
    assert [bool(sample["prompt"]) for sample in details["samples"]] == [False, True]
    json.dumps(details, allow_nan=False)


def test_pieces_are_the_text_with_characters_whole(dataset: Dataset) -> None:
    tokenizer = dataset.tokenizer
    text = "naïve 𝔘 text"
    tokens = np.array([tokenizer.bos_id, *tokenizer.encode(text), tokenizer.bos_id, *tokenizer.encode("b")], np.uint16)
    nats = np.full(len(tokens) - 1, np.log(2), np.float32)
    found = describe(Scored(tokens, nats), tokenizer, 8)["surprise"]
    assert "".join(found["pieces"]) == text + END + "b"
    assert sum(found["bits"]) == pytest.approx(len(nats), abs=0.01)
    assert found["bytes"] == len((text + "b").encode())


def test_details_that_fail_cost_no_score(
    model: GPT, dataset: Dataset, text: TokenSet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: object, **more: object) -> None:
        raise MemoryError("too long a text")

    monkeypatch.setattr("parbank.eval.details.describe", broken)
    found = examine(model, text, dataset.tokenizer, context=64, runtime=PLACE, say=print)
    assert found.score.bpb > 0
    assert "could not be described (MemoryError: too long a text)" in capsys.readouterr().out
    assert found.details["samples"]
