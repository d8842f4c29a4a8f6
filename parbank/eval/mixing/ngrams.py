"""The n-grams of a text so far: at each token, how often its context, and its context with this token, came before.

Counts are exact (no hashing), and everything is sorted rather than looped over, so a million tokens take seconds on one
core. A count at a token is a rank among equal n-grams in the order of the text: it cannot depend on later tokens.

The prediction interpolates all orders with absolute discounting and falls back on a model's own probability p(-1):

    p(n) = (max(count(context, token) - D, 0) + (S + D * kinds(context)) * p(n - 1)) / (count(context) + S)

(Kneser and Ney 1995; with a strength S as in the hierarchical Pitman-Yor process, Teh 2006; a cache over a model: Kuhn
and De Mori 1990.) Over the vocabulary the counts sum to count(context) and the discounts to D * kinds(context), so p(n)
sums to 1 if p(n - 1) does.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Counts:
    """Of one order, at each target of a text: counts over the text before it."""

    context: np.ndarray  # (N - 1,) occurrences of the context
    pair: np.ndarray  # (N - 1,) of them followed by the target
    kinds: np.ndarray  # (N - 1,) different tokens that followed


def count_ngrams(tokens: np.ndarray, scope: np.ndarray, orders: tuple[int, ...]) -> Iterator[Counts]:
    """The counts of contexts of `orders` tokens, shortest first.

    `scope` (N,) numbers the parts of the text, such as documents, that share no n-grams. A context ends where its
    scope begins: there it is shorter than its order, and equals only contexts that are cut in the same way.
    """
    wide, targets = tokens[:-1].astype(np.int64), tokens[1:].astype(np.int64)
    span = int(tokens.max()) + 2
    own = scope[:-1].astype(np.int64)
    begins = np.concatenate([[True], own[1:] != own[:-1]])
    context = own  # of no tokens: the scope alone
    for order in range(max(orders) + 1):
        if order:
            before = np.concatenate([[0], context[:-1]])
            context = _number(np.where(begins, own * span + span - 1, before * span + wide))
        if order in orders:
            yield _count(context, context * span + targets)


def predict(
    base: np.ndarray, counts: Iterator[Counts], *, discount: float, strength: float
) -> tuple[np.ndarray, np.ndarray]:
    """The nats of each target, and how many orders have seen its context. `base` (N - 1,) are a model's nats."""
    p = np.exp(-base.astype(np.float64))
    matched = np.zeros(len(p), dtype=np.int64)
    for found in counts:
        kept = np.maximum(found.pair - discount, 0.0)
        seen = found.context > 0
        p = np.where(seen, (kept + (strength + discount * found.kinds) * p) / (found.context + strength), p)
        matched += seen
    return -np.log(np.maximum(p, np.finfo(np.float64).tiny)), matched


def _number(keys: np.ndarray) -> np.ndarray:
    """Equal keys get equal numbers, from 0."""
    return np.unique(keys, return_inverse=True)[1].astype(np.int64)


def _count(context: np.ndarray, pair: np.ndarray) -> Counts:
    pairs = _rank(pair)[0]
    seen, order, firsts = _rank(context)
    new = (pairs == 0)[order]  # where, in the order of contexts, a context meets a token for the first time
    before = np.cumsum(new) - new
    kinds = np.empty_like(before)
    kinds[order] = before - before[firsts]
    return Counts(seen, pairs, kinds)


def _rank(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How many equal keys come before each; the stable order of the keys; and where, in that order, a run begins."""
    order = np.argsort(keys, kind="stable")
    ordered, place = keys[order], np.arange(len(keys))
    firsts = np.maximum.accumulate(np.where(np.concatenate([[True], ordered[1:] != ordered[:-1]]), place, 0))
    ranks = np.empty_like(place)
    ranks[order] = place - firsts
    return ranks, order, firsts
