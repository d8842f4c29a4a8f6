"""Counts of n-grams against a plain loop over the text, and predictions that are distributions."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbank.eval.mixing.ngrams import MANY, NgramCounts, count_ngrams, predict

VOCAB = 4


def count_plainly(tokens: np.ndarray, scope: np.ndarray, order: int) -> NgramCounts:
    contexts, pairs = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    rows = []
    for place in range(len(tokens) - 1):
        first = max(0, place - order + 1)
        while scope[first] != scope[place] and first < place:
            first += 1
        # what is cut short by its scope's beginning carries a mark, so that it equals no longer context
        cut = place - first + 1 < order
        own = (int(scope[place]), int(cut), *tokens[first : place + 1].tolist()) if order else (int(scope[place]),)
        pair = (*own, -1, int(tokens[place + 1]))
        followers = sum(key[:-2] == own for key in pairs)
        rows.append((contexts[own], pairs[pair], followers))
        contexts[own] += 1
        pairs[pair] += 1
    return NgramCounts(*np.array(rows).T)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_counts_are_those_of_a_loop_over_the_text(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 40))
    tokens = np.array(data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size)))
    breaks = np.array(data.draw(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=size, max_size=size)))
    orders = tuple(data.draw(st.sets(st.integers(0, 9), min_size=1, max_size=4)))
    scope = np.cumsum(breaks)
    for order, found in zip(sorted(orders), count_ngrams(tokens, scope, orders), strict=True):
        expected = count_plainly(tokens, scope, order)
        np.testing.assert_array_equal(found.context, expected.context)
        np.testing.assert_array_equal(found.pair, expected.pair)
        np.testing.assert_array_equal(found.kinds, expected.kinds)


@pytest.mark.parametrize("orders", [(0,), (1, 2, 3), (2, 5)])
def test_a_prediction_is_a_distribution(orders: tuple[int, ...]) -> None:
    """The last token replaced by every other; the model below gives each its own probability."""
    rng = np.random.default_rng(0)
    tokens, model = rng.integers(0, VOCAB, 60), rng.dirichlet(np.ones(VOCAB))
    total = 0.0
    for token in range(VOCAB):
        text = np.append(tokens, token)
        base = -np.log(model[text[1:]])
        counts = count_ngrams(text, np.zeros_like(text), orders)
        total += float(np.exp(-predict(base, counts, discount=0.6, strength=0.7).nats[-1]))
    assert total == pytest.approx(1, abs=1e-12)


def test_unseen_contexts_leave_the_model_alone_and_repeats_are_believed() -> None:
    tokens = np.array([5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 9])
    base = np.full(10, 2.0)
    found = predict(base, count_ngrams(tokens, np.zeros_like(tokens), (2, 3)), discount=0.5, strength=0.5)
    np.testing.assert_allclose(found.nats[:5], 2.0)
    assert found.orders.tolist() == [0, 0, 0, 0, 0, 1, 2, 2, 2, 2]
    assert found.kinds.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert found.nats[8] < 1.0, "what followed before is likelier"
    assert found.nats[9] > 2.0, "and anything else less likely"
    assert found.kinds.max() <= MANY
