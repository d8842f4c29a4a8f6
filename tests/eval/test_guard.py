"""The guard of adaptive scores: no prefix of a document loses more than its bytes allow, whatever the predictions are."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbank.eval.mixing.guard import guard

ALLOWANCE = 0.002  # bits per byte, the default
AT_ONCE: dict[str, float] = {"prior": 0.5, "allowance": 1e9}  # Bayes' mixture of the two from the first byte on
GUARDED: dict[str, float] = {"prior": 0.5, "allowance": ALLOWANCE}
NATS = st.one_of(st.just(0.0), st.floats(0, 60), st.sampled_from([1e-9, 700.0]))  # of one token


@st.composite
def make_texts(draw: Any) -> tuple[np.ndarray, ...]:
    """Nats of both predictions, bytes, and where documents start. Runs make an adversary: a lead, then its loss."""
    runs = draw(st.lists(st.tuples(NATS, NATS, st.integers(0, 40), st.integers(1, 60)), min_size=1, max_size=8))
    plain, other, sizes = (np.repeat([run[n] for run in runs], [run[3] for run in runs]) for n in range(3))
    starts = draw(st.sets(st.integers(1, max(1, len(plain) - 1)), max_size=4))
    return (
        plain.astype(float),
        other.astype(float),
        sizes,
        np.array(sorted({0} | {s for s in starts if s < len(plain)})),
    )


def find_losses(text: tuple[np.ndarray, ...], **how: float) -> tuple[np.ndarray, np.ndarray]:
    """Bits lost to the plain prediction after every prefix of every document, and the bytes of these prefixes."""
    plain, other, sizes, starts = text
    lost = (guard(plain, other, sizes, starts, prior=how["prior"], allowance=how["allowance"]) - plain) / np.log(2)
    parts = [slice(*cut) for cut in itertools.pairwise([*starts, len(plain)])]
    return tuple(np.concatenate([np.cumsum(values[part]) for part in parts]) for values in (lost, sizes))  # type: ignore[return-value]


@settings(deadline=None, max_examples=300)
@given(make_texts())
def test_no_prefix_of_a_document_loses_more_than_its_bytes_allow(text: tuple[np.ndarray, ...]) -> None:
    lost, sizes = find_losses(text, **GUARDED)
    rounding = 1e-12 * (1 + text[0].sum() + text[1].sum())
    assert (lost <= np.minimum(1, ALLOWANCE * sizes) + rounding).all()


@pytest.mark.parametrize("tokens", [2, 3, 10, 100])
def test_half_of_the_weight_at_once_would_lose_more_in_short_documents(tokens: int) -> None:
    """As the guard was before. The bound above is not true by itself."""
    text = np.full(tokens, 2.0), np.full(tokens, 20.0), np.full(tokens, 4), np.zeros(1, np.int64)
    lost, sizes = find_losses(text, **AT_ONCE)
    assert lost[-1] == pytest.approx(1), "one bit"
    assert lost[-1] > ALLOWANCE * sizes[-1]
    lost, sizes = find_losses(text, **GUARDED)
    assert 0 < lost[-1] <= ALLOWANCE * sizes[-1]


def test_it_is_the_mixture_over_the_token_of_change() -> None:
    """By the definition, with one term for each token at which the prediction may change."""
    rng = np.random.default_rng(0)
    plain, sizes = rng.exponential(1.0, 40), rng.integers(0, 30, 40)
    other = plain * rng.uniform(0.3, 1.5, 40)
    kept = 0.5 ** np.minimum(1, 0.01 * np.concatenate([[0], np.cumsum(sizes)[:-1]]))  # when each token is scored
    mass = -np.diff(kept, prepend=1.0)
    for count in (1, 2, 17, 40):
        changes = sum(mass[t] * np.exp(-plain[:t].sum() - other[t:count].sum()) for t in range(count))
        total = kept[count - 1] * np.exp(-plain[:count].sum()) + changes
        found = guard(plain, other, sizes, np.zeros(1, np.int64), prior=0.5, allowance=0.01)
        assert found[:count].sum() == pytest.approx(-np.log(total))
    assert mass.min() >= 0
    assert mass.sum() == pytest.approx(0.5)


def test_a_document_starts_anew() -> None:
    rng = np.random.default_rng(0)
    plain, other, sizes = rng.exponential(1.0, 90), rng.exponential(0.8, 90), rng.integers(0, 9, 90)
    starts = np.array([0, 1, 30, 31, 70])
    found = guard(plain, other, sizes, starts, **AT_ONCE | {"allowance": 0.01})
    for first, last in itertools.pairwise([*starts, 90]):
        own = slice(first, last)
        alone = guard(plain[own], other[own], sizes[own], np.zeros(1, np.int64), prior=0.5, allowance=0.01)
        np.testing.assert_allclose(found[own], alone, atol=1e-12)


def test_a_better_prediction_wins_in_a_document_of_usual_length() -> None:
    """At 0.05 bits a token, of 4.5 bytes, as adapting gains on good models: after 1,500 tokens all but 4 bits are kept."""
    rng = np.random.default_rng(0)
    plain = rng.exponential(2.0, 1500)
    other = plain - np.log(2) * 0.05
    sizes, start = rng.integers(2, 8, 1500), np.zeros(1, np.int64)
    gains = {
        name: (plain - guard(plain, other, sizes, start, **how)).sum() / np.log(2)
        for name, how in {"guarded": GUARDED, "at once": AT_ONCE}.items()
    }
    assert 75 - 1.1 < gains["at once"] < 75
    assert gains["at once"] - 4 < gains["guarded"] < gains["at once"]


def test_probabilities_sum_to_1_though_tokens_differ_in_bytes() -> None:
    """A token's own bytes must not weigh its prediction. Every token of the vocabulary takes the last place in turn."""
    rng = np.random.default_rng(0)
    plain, other = (-np.log(rng.dirichlet(np.ones(6), 12)) for _ in range(2))  # (places, vocabulary)
    lengths, text, start = np.array([0, 1, 2, 30, 100, 4000]), rng.integers(0, 4, 12), np.zeros(1, np.int64)
    for count in (1, 2, 12):
        total = 0.0
        for token in range(6):
            own = np.append(text[: count - 1], token)
            place = np.arange(count)
            found = guard(plain[place, own], other[place, own], lengths[own], start, prior=0.5, allowance=0.02)
            total += np.exp(-found[-1])
        assert total == pytest.approx(1, abs=1e-12)
