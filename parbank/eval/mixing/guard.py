"""A guard that keeps an adaptive score from losing to the plain one: Bayes' mixture of the two, anew for each document.

With a prior weight q on the plain model, the mixture gives a document at least q times the plain model's probability.
So no document costs more than -log2 q bits over the plain score: 1 bit at q = 1/2. The weight of a token follows from
the document's tokens before it alone, and a mixture of distributions sums to 1. (Littlestone and Warmuth 1994; with
switching, fixed share: Herbster and Warmuth 1998.)
"""

import numpy as np


def guard(plain: np.ndarray, other: np.ndarray, starts: np.ndarray, prior: float) -> np.ndarray:
    """The nats of the mixture, (n,). plain and other (n,): nats of the two; starts: the first targets of documents.

    The chain rule gives the mixture's nats without a loop: they are differences of the documents' running totals,
    -log(prior * exp(-plain so far) + (1 - prior) * exp(-other so far)).
    """
    lead = _running(plain - other, starts)  # how much the other leads so far, in nats, this token included
    before = lead - (plain - other)  # and before this token
    odds = np.log1p(-prior) - np.log(prior)
    # plain cost plus the change of -log(prior + (1 - prior) * exp(lead)); logaddexp(0, x) = log(1 + e^x)
    return np.asarray(plain - np.logaddexp(0, odds + lead) + np.logaddexp(0, odds + before))


def _running(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Running sums that begin at zero with each document."""
    total = np.cumsum(values)
    before = np.concatenate([[0.0], total])[starts]
    return np.asarray(total - np.repeat(before, np.diff([*starts, len(values)])))
