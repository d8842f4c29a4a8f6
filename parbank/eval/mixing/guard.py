"""A guard that keeps an adaptive score from losing to the plain one, after every token of every document.

It is a mixture over the token at which a document changes from the plain prediction to the other one, and of no change
at all. As long as a prior mass of 1 - M has not changed, the mixture gives the document so far at least 1 - M times the
plain model's probability: a loss of at most -log2(1 - M) bits. Mass may change only as fast as the document grows, so
that this loss never exceeds an allowance for each byte already scored. A short document can lose next to nothing, and a
long one at most -log2 of the mass that never changes.

The mass that changes before a token follows from the bytes of the tokens before it, so the length of the document need
not be known, and a mixture of distributions sums to 1. (Littlestone and Warmuth 1994; with switching, fixed share:
Herbster and Warmuth 1998; one change at an unknown time: van Erven, Grünwald and de Rooij 2012.)
"""

import itertools

import numpy as np


def guard(
    plain: np.ndarray, other: np.ndarray, sizes: np.ndarray, starts: np.ndarray, *, prior: float, allowance: float
) -> np.ndarray:
    """The nats of the mixture, (n,).

    plain and other (n,): nats of the two. sizes (n,): bytes of the targets. starts: the first targets of documents; 0 is
    one. prior: the mass that never changes. allowance: bits per byte.
    """
    found = np.empty(len(plain))
    for first, last in itertools.pairwise([*starts.tolist(), len(plain)]):
        own = slice(first, last)
        spent = np.log(2) * allowance * (np.cumsum(sizes[own]) - sizes[own])  # nats, by the bytes before each token
        found[own] = _guard_document(plain[own], other[own], np.minimum(spent, -np.log(prior)))
    return found


def _guard_document(plain: np.ndarray, other: np.ndarray, spent: np.ndarray) -> np.ndarray:
    """A mass of exp(-spent) has not changed when a token is scored. spent (n,) never falls.

    The chain rule gives the mixture's nats without a loop: they are differences of the running totals of
    -log(exp(-spent - plain so far) + sum over changes of mass * exp(-plain before the change - other since)).
    """
    lead = np.cumsum(plain - other)  # how much the other leads so far, in nats, this token included
    before = lead - (plain - other)
    already = np.concatenate([[0.0], spent[:-1]])
    with np.errstate(divide="ignore"):  # log 0: no mass changes before this token
        changing = np.log(-np.expm1(already - spent)) - already
    changed = lead + np.logaddexp.accumulate(changing - before)
    evidence = np.logaddexp(-spent, changed)  # of the mixture over the plain score
    return np.asarray(plain - np.diff(evidence, prepend=0.0))
