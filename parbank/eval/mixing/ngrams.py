"""The n-grams of a text so far: at each token, how often its context, and its context with this token, came before.

Counts are exact (no hashing), and everything is sorted rather than looped over, so a million tokens take seconds on one
core. A count at a token is a rank among equal n-grams in the order of the text: it cannot depend on later tokens.

The prediction interpolates all orders with absolute discounting and falls back on a model's own probability p(-1):

    p(n) = (max(count(context, token) - D, 0) + (S + D * kinds(context)) * p(n - 1)) / (count(context) + S)

(Kneser and Ney 1995; with a strength S as in the hierarchical Pitman-Yor process, Teh 2006; a cache over a model: Kuhn
and De Mori 1990.) Over the vocabulary the counts sum to count(context) and the discounts to D * kinds(context), so p(n)
sums to 1 if p(n - 1) does.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

MANY = 3  # followers of a context that are told apart


@dataclass(frozen=True)
class NgramCounts:
    """Counts of one order, for each target of a text, over the text before it."""

    context: np.ndarray  # (N - 1,) occurrences of the context
    pair: np.ndarray  # (N - 1,) of them followed by the target
    kinds: np.ndarray  # (N - 1,) different tokens that followed


def count_ngrams(tokens: np.ndarray, scope: np.ndarray, orders: Sequence[int]) -> Iterator[NgramCounts]:
    """The counts of contexts of `orders` tokens, shortest first.

    `scope` (N,) numbers the parts of the text, such as documents, that share no n-grams. A context ends where its
    scope begins: there it is shorter than its order, and equals only contexts that are cut in the same way.
    """
    targets, own = tokens[1:].astype(np.int64), scope[:-1].astype(np.int64)
    begins = np.concatenate([[True], own[1:] != own[:-1]])
    index = np.arange(len(own))
    place = index - np.maximum.accumulate(np.where(begins, index, 0))
    length, context = 1, _sort(_join(own, tokens[:-1].astype(np.int64)))
    for order in sorted(set(orders)):
        if order == 0:
            yield _count(_sort(own), targets)
            continue
        while length < order:
            longer = min(order, 2 * length)  # two contexts that overlap, or touch, make a longer one
            shift = longer - length
            earlier = np.where(place >= shift, context.numbers[np.maximum(index - shift, 0)] + 1, 0)
            length, context = longer, _sort(_join(context.numbers, earlier))
        yield _count(context, targets)


@dataclass(frozen=True)
class Prediction:
    """The prediction for every target, (N - 1,) each."""

    nats: np.ndarray
    orders: np.ndarray
    """The number of orders that have seen the context."""
    kinds: np.ndarray
    """The number of different tokens that followed the longest known context: 0 (no known context) to `MANY`."""


def predict(base: np.ndarray, counts: Iterable[NgramCounts], *, discount: float, strength: float) -> Prediction:
    """`base` (N - 1,): a model's nats. Contexts that were never seen leave them as they are."""
    p = np.exp(-base.astype(np.float64))
    orders, kinds = (np.zeros(len(p), dtype=np.int64) for _ in range(2))
    for found in counts:
        kept = np.maximum(found.pair - discount, 0.0)
        seen = found.context > 0
        p = np.where(seen, (kept + (strength + discount * found.kinds) * p) / (found.context + strength), p)
        orders += seen
        kinds = np.where(seen, np.minimum(found.kinds, MANY), kinds)
    return Prediction(-np.log(np.maximum(p, np.finfo(np.float64).tiny)), orders, kinds)


@dataclass(frozen=True)
class _Sorted:
    """Sorted keys; equal keys stay in the order of the text."""

    numbers: np.ndarray  # equal keys have equal numbers, from 0
    ranks: np.ndarray  # how many equal keys come before each
    order: np.ndarray  # the places of the keys, in order
    firsts: np.ndarray  # for each place in that order, where its run of equal keys begins


def _sort(keys: np.ndarray) -> _Sorted:
    order = np.argsort(keys, kind="stable")
    ordered, place = keys[order], np.arange(len(keys))
    new = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    firsts = np.maximum.accumulate(np.where(new, place, 0))
    numbers, ranks = np.empty_like(place), np.empty_like(place)
    numbers[order], ranks[order] = np.cumsum(new) - 1, place - firsts
    return _Sorted(numbers, ranks, order, firsts)


def _join(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """One number for each pair of numbers."""
    return np.asarray(first * (int(second.max(initial=0)) + 1) + second)


def _count(context: _Sorted, targets: np.ndarray) -> NgramCounts:
    pair = _sort(_join(context.numbers, targets)).ranks
    new = (pair == 0)[context.order]  # where, in the order of contexts, a context meets a token for the first time
    before = np.cumsum(new) - new
    kinds = np.empty_like(before)
    kinds[context.order] = before - before[context.firsts]
    return NgramCounts(*(counts.astype(np.int32) for counts in (context.ranks, pair, kinds)))
