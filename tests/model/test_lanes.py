"""Many texts side by side, one token at a time, against the streaming engine on each text alone."""

import numpy as np
import pytest
import torch

from parbank.model import ModelConfig
from parbank.model.lanes import Lanes
from parbank.model.stream import Stream
from tests.model.test_gpt import EVERYTHING, OPTIONS, random_model
from tests.model.test_stream import BOS, text

LENGTH = 24


def read_all(lanes: Lanes, texts: np.ndarray) -> torch.Tensor:
    """(lanes, T, vocabulary) logits."""
    lanes.restart()
    with torch.inference_mode():
        return torch.stack([lanes.read(torch.from_numpy(column)) for column in texts.T], dim=1)


def texts(config: ModelConfig) -> np.ndarray:
    return np.stack([text(config, LENGTH, seed) for seed in range(3)])


@pytest.mark.parametrize("window", [1, 7, 64])
@pytest.mark.parametrize("config", OPTIONS.values(), ids=OPTIONS)
def test_a_lane_is_a_stream(config: ModelConfig, window: int) -> None:
    model = random_model(config).eval()
    tokens = texts(config)
    found = read_all(Lanes(model, window, len(tokens)), tokens)
    for lane, own in zip(found, tokens):
        with torch.inference_mode():
            ids, documents = torch.from_numpy(own), np.flatnonzero(own == BOS)
            expected = Stream(model, window).read(ids, 0, LENGTH, documents=documents)
        torch.testing.assert_close(lane, expected, rtol=1e-4, atol=1e-4)


def test_the_same_tokens_give_the_same_bits_again() -> None:
    """A decoder depends on it: after other texts, and with other tokens in the neighbouring lanes' future."""
    model = random_model(EVERYTHING).eval()
    lanes, tokens = Lanes(model, 7, 3), texts(EVERYTHING)
    first = read_all(lanes, tokens)
    read_all(lanes, tokens[::-1].copy())
    assert torch.equal(read_all(lanes, tokens), first)
    assert torch.equal(read_all(Lanes(model, 7, 3), tokens), first)
