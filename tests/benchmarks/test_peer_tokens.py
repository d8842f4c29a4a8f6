"""A peer's script sees our windows in our order, and is scored as our own models are."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from parbank.data.batches import BatchStream
from parbank.data.dataset import Dataset, open_dataset
from parbank.eval.windows import score_chunked
from parbank.model import GPT
from parbank.recipes import get_recipe
from parbank.runtime import Runtime

CPU = torch.device("cpu")


@pytest.fixture
def tokens(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("peers.tokens")


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    words = np.random.default_rng(0).choice(["sea", "wind", "harbour", "lamp", "rope", "oar"], size=(400, 60))
    text = tmp_path / "text"
    text.mkdir()
    for number, line in enumerate(words):
        (text / f"{number}.txt").write_text(f"{number} " + " ".join(line))
    return open_dataset(f"text:{text}", vocab_size=320, cache=tmp_path / "cache", say=lambda line: None)


def test_windows_are_those_of_our_run(tokens: ModuleType, dataset: Dataset) -> None:
    stream = BatchStream(dataset.train, sequence_length=64, batch_sequences=8, micro_sequences=4, seed=7)
    windows = tokens.Windows(dataset, length=64, batch_rows=8, rows=4, seed=7, device=CPU)
    wanted = np.empty(stream.shape, dtype=np.uint16)
    for _ in range(3):
        stream.fill(wanted)
        x, y = windows.next()
        assert np.array_equal(x.numpy(), wanted[:, :-1])
        assert np.array_equal(y.numpy(), wanted[:, 1:])


def test_the_score_is_our_chunked_score(tokens: ModuleType, dataset: Dataset) -> None:
    torch.manual_seed(0)
    model = GPT(get_recipe("nano").model).eval()
    ours = score_chunked(model, dataset.val, dataset.tokenizer, context=64, runtime=Runtime(device=CPU))
    assert (len(dataset.val) - 1) % (64 * 3), "the last batch must be a partial one for this to test anything"

    def total_nats(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = model(x, y.clamp(min=0), reduction="none")
        return losses[y >= 0].double().sum()

    theirs = tokens.score_chunked(total_nats, dataset, length=64, rows=3, ignored=-100, device=CPU)
    assert theirs.bpb == pytest.approx(ours.bpb, rel=1e-6)
    assert theirs.loss == pytest.approx(ours.loss, rel=1e-6)
