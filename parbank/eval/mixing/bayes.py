"""Bayes' mixture of predictions over a text, where one prediction is the best throughout.

The mixture weighs each prediction by the probability that it gave to all tokens before. So its cost exceeds that of the
best prediction by at most log K nats over the whole text, K being the number of predictions. That suits
scoring temperatures: predictions at 1 and 1.05 differ so little at each token that weights which follow a gradient
(online.py) need tens of thousands of tokens to choose.
"""

from collections.abc import Iterable

import numpy as np


def mix_bayes(blocks: Iterable[np.ndarray]) -> np.ndarray:
    """The mixture's nats, (n,). blocks (length, predictions) each: the costs of the same tokens, in the order of the text.
    Where it is cut into blocks changes nothing but memory.

    By the chain rule, the nats of a token are the change of -log(mean over predictions of exp(-nats so far))."""
    found: list[np.ndarray] = []
    so_far, known = np.zeros(1), 0.0
    for nats in blocks:
        total = np.cumsum(np.concatenate([nats[:1] + so_far, nats[1:]]), axis=0, dtype=np.float64)
        low = total.min(-1)
        evidence = low - np.log(np.exp(low[:, None] - total).mean(-1))
        found.append(np.diff(evidence, prepend=known))
        so_far, known = total[-1], evidence[-1]
    return np.concatenate(found)
