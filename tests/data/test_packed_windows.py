"""Documents packed into windows: each whole, each token a target as often as it should be, the same for any ranks."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbank.data.batches import BatchStream
from parbank.data.windows import PackedWindows, best_fit
from tests.data.test_batches import ArrayTokens, take, take_step

BOS = 1


def text(sizes: list[int], *, before: int = 0) -> tuple[ArrayTokens, list[list[int]]]:
    """Documents of these sizes, every token but BOS unlike all others, after so many tokens of an earlier document."""
    numbers = iter(range(2, 65_000))
    documents = [[next(numbers) for _ in range(before)]] if before else []
    documents += [[BOS, *(next(numbers) for _ in range(size - 1))] for size in sizes]
    return ArrayTokens([token for document in documents for token in document]), documents


def read_all(windows: PackedWindows, length: int) -> list[list[int]]:
    rows = np.empty((windows.count, length + 1), dtype=np.uint16)
    for number, row in enumerate(rows):
        windows.read(number, row)
    return rows.tolist()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=25), st.integers(1, 12), st.integers(0, 14))
def test_every_document_is_whole_or_cut_into_windows_of_its_own(sizes: list[int], length: int, before: int) -> None:
    tokens, documents = text(sizes, before=before)
    if len(tokens) < length + 1:
        return
    windows = PackedWindows(tokens, length, BOS)
    rows = read_all(windows, length)
    after = {a: b for document in documents for a, b in pairwise(document) if a != BOS}
    for row in rows:
        for a, b in pairwise(row):
            assert a == BOS or b in (BOS, after.get(a)), "text goes on, or a document begins"
    targets = [token for row in rows for token in row[1:]]
    for document in documents:
        if len(document) <= length + 1:
            whole = any(row[i : i + len(document)] == document for row in rows for i in range(length + 1))
            assert whole or len(document) == 1
        assert set(document[1:]) <= set(targets), "every token is a target"
    assert 0 <= windows.repeated < 1
    used = sum(map(len, documents)) + sum(max(0, -(-(len(d) - length - 1) // length)) for d in documents)
    assert windows.repeated == pytest.approx(1 - used / (windows.count * (length + 1)))


def test_a_small_text_by_hand() -> None:
    """A document of 10 in windows of 4 inputs fills two; its last two tokens begin the third, beside one of three."""
    tokens, _ = text([10, 3, 4, 2])
    windows = PackedWindows(tokens, 4, BOS)
    assert read_all(windows, 4) == [
        [1, 2, 3, 4, 5],
        [5, 6, 7, 8, 9],
        [9, 10, 1, 11, 12],
        [1, 13, 14, 15, 1],
        [1, 16, 1, 2, 3],
    ]
    assert windows.repeated == pytest.approx(4 / 25)
    assert windows.cut == 1 / 4


def test_best_fit_takes_the_least_room() -> None:
    assert best_fit([6, 4, 3, 3, 1], [4, 7], 8).tolist() == [1, 0, 2, 2, 1]


def test_nothing_to_pack_is_one_document() -> None:
    windows = PackedWindows(ArrayTokens(range(2, 23)), 4, BOS)
    assert windows.count == 5
    assert read_all(windows, 4)[-1] == [18, 19, 20, 21, 22]


def test_the_global_batch_is_the_same_for_any_ranks_and_goes_on_where_it_stopped() -> None:
    rng = np.random.default_rng(0)
    tokens, _ = text(rng.integers(1, 20, 300).tolist())
    common = {"sequence_length": 16, "batch_sequences": 12, "seed": 3, "order": "packed", "bos_id": BOS}
    alone, _ = take_step(tokens, 40, micro_sequences=12, **common)  # two epochs and a half
    together, state = take_step(tokens, 15, micro_sequences=2, world=3, **common)
    assert (alone[: 15 * 12] == together).all()
    rest, _ = take_step(tokens, 25, micro_sequences=3, world=2, states=json.loads(json.dumps(state)), **common)
    assert (alone[15 * 12 :] == rest).all()


def test_an_epoch_visits_every_window_once_in_its_own_order() -> None:
    tokens, _ = text([5, 9, 2, 7, 7, 3, 11, 4, 6, 8, 5, 5])
    stream = BatchStream(tokens, sequence_length=8, batch_sequences=1, micro_sequences=1, order="packed", bos_id=BOS)
    windows = PackedWindows(tokens, 8, BOS)
    epochs = [[tuple(take(stream)[0].tolist()) for _ in range(windows.count)] for _ in range(3)]
    assert all(sorted(epoch) == sorted(map(tuple, read_all(windows, 8))) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_few_tokens_are_lost_where_documents_are_short() -> None:
    """Sizes as those of pages: most far shorter than a window, some far longer."""
    sizes = np.random.default_rng(1).lognormal(4.5, 1.0, 4000).astype(int) + 2
    places = np.append(0, sizes.cumsum())
    tokens = np.full(places[-1], 7, dtype=np.uint16)
    tokens[places[:-1]] = BOS
    windows = PackedWindows(ArrayTokens(tokens), 512, BOS)
    assert windows.repeated < 0.01
    assert windows.cut == np.mean(sizes > 513)
