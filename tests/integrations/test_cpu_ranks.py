"""Two ranks on a CPU in bfloat16."""

from pathlib import Path

import pytest

from parbank.data.dataset import open_dataset
from tests.distributed import run_distributed_test
from tests.training.test_trainer import nano, rank_losses, run


def test_two_ranks_in_bfloat16_give_the_losses_of_one(text_spec: str, tmp_path: Path) -> None:
    """Sums of gradients have another order, and a rounding to bfloat16 may fall the other way: 1e-4 was measured."""
    config = nano("train.precision=bfloat16")
    dataset = open_dataset(text_spec, vocab_size=320, say=lambda line: None)
    alone, _ = run(config, dataset, tmp_path / "one")
    cache = str(dataset.folder.parent)
    first, second = run_distributed_test(rank_losses, 2, args=(config, text_spec, cache, str(tmp_path / "two")))
    assert first == second
    assert first == pytest.approx(alone, rel=1e-3)
