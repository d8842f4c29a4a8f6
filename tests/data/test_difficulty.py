"""Parts of a text by difficulty, and the order that visits the hardest first."""

import numpy as np
import pytest

from parbank.data.batches import BatchStream
from parbank.data.difficulty import PARTS, rank_parts
from parbank.data.orders import shuffle_parts
from parbank.data.shards import TokenSet

LENGTH = 16


def text_of(kinds: list[str], size: int) -> TokenSet:
    """Parts of random tokens (hard), of a few tokens (middle), and of one cycle (easy)."""
    generator = np.random.default_rng(7)
    made = {
        "hard": lambda: generator.integers(2, 500, size),
        "middle": lambda: generator.integers(500, 504, size),
        "easy": lambda: 600 + np.arange(size) % 10,
    }
    return TokenSet([np.concatenate([made[kind]() for kind in kinds]).astype(np.uint16)])


def test_parts_are_ranked_by_what_a_bigram_cannot_tell() -> None:
    kinds = ["easy", "hard", "middle", "easy", "hard", "easy", "middle", "hard"] * (PARTS // 8)
    ranked = [kinds[part] for part in rank_parts(text_of(kinds, 4000))]
    assert ranked == sorted(kinds, key=["hard", "middle", "easy"].index)
    assert sorted(rank_parts(text_of(["hard"], 9))) == list(range(4)), "as many parts as few tokens allow"
    assert list(rank_parts(text_of(["easy"], 2))) == [0]


@pytest.mark.parametrize("windows", [1, 5, 64, 1000])
def test_an_epoch_visits_every_window_once_part_by_part(windows: int) -> None:
    parts = np.array([2, 0, 3, 1])
    order = shuffle_parts(windows, 3, 1, parts)
    assert sorted(order) == list(range(windows))
    visited = order * 4 // windows
    turns = [part for n, part in enumerate(visited) if n == 0 or part != visited[n - 1]]
    assert turns == [part for part in parts if part in visited]
    if windows == 1000:
        assert not np.array_equal(order, np.sort(order)), "shuffled inside a part"
        assert not np.array_equal(order, shuffle_parts(windows, 3, 2, parts)), "each epoch anew"


def test_batches_begin_with_the_hardest_part_and_resume() -> None:
    kinds = ["easy"] * 40 + ["hard"] * 8 + ["easy"] * 16
    tokens = text_of(kinds, 40 * LENGTH)

    def make() -> BatchStream:
        options = {"sequence_length": LENGTH, "batch_sequences": 4, "micro_sequences": 4}
        return BatchStream(tokens, **options, seed=1, order="hard_first")

    stream, windows = make(), []
    for step in range(60):
        out = np.empty(stream.shape, dtype=np.uint16)
        stream.fill(out)
        windows.append(out)
        if step == 29:
            state = stream.state_dict()
    assert all((batch[:, 1:-1] < 600).all() for batch in windows[:60])
    again, out = make(), np.empty(stream.shape, dtype=np.uint16)
    again.load_state_dict(state)
    for batch in windows[30:]:
        again.fill(out)
        assert np.array_equal(out, batch)
