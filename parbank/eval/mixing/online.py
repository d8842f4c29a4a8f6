"""A mixture of predictions whose weights learn from the text, a block of tokens at a time, once the block is scored.

p = sum over experts of w_i p_i, with w the softmax of a sum of numbers, one set of numbers for each of several
contexts. A mixture of distributions is a distribution, so probabilities sum to 1 whatever the weights. Weights follow
the gradient of log p, and contexts select them, as in the mixers of PAQ (Mahoney 2005). Those mix in the logistic
domain, bit by bit; our experts predict whole tokens, and a linear mixture needs only what each gave to the token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SPAN = 16  # tokens; 64 did as well on held-out documents, and 256 gained nothing
LEADS = (-2.0, -0.5, 0.5, 2.0, 6.0)  # nats; classes on both sides of none


@dataclass(frozen=True, kw_only=True)
class MixConfig:
    """How weights learn."""

    rate: float
    """Step of the gradient, per token."""
    block: int
    """Tokens scored with the same weights, and then learnt from."""


def mix_online(
    nats: np.ndarray, contexts: Sequence[np.ndarray], start: Sequence[float], config: MixConfig
) -> np.ndarray:
    """The mixture's nats, (n,).

    nats (n, experts): what each expert pays for each token, in the order of the text. contexts, (n,) each: which sets of
    numbers weigh a token's prediction; they may depend on tokens before this one only. start: the weights at first.
    """
    tables = [np.zeros((int(context.max(initial=0)) + 1, nats.shape[1])) for context in contexts]
    tables[0] += np.log(start)
    found = np.empty(len(nats))
    for first in range(0, len(nats), config.block):
        own = slice(first, first + config.block)
        logits = np.sum([table[context[own]] for table, context in zip(tables, contexts)], axis=0)
        log_weights = logits - _log_sum(logits)[:, None]
        joint = log_weights - nats[own]
        total = _log_sum(joint)
        found[own] = -total
        gradient = np.exp(joint - total[:, None]) - np.exp(log_weights)
        for table, context in zip(tables, contexts):
            np.add.at(table, context[own], config.rate * gradient)
    return found


def classify_lead(gains: np.ndarray) -> np.ndarray:
    """A context: how many nats a prediction gained on another over the `SPAN` tokens before each token, in classes. As the
    match model of PAQ, it tells whether a repetition that was found goes on. gains (n,), in the order of the text."""
    total = np.concatenate([[0.0], np.cumsum(gains)])
    place = np.arange(len(gains))
    return np.digitize(total[place] - total[np.maximum(place - SPAN, 0)], LEADS)


def _log_sum(values: np.ndarray) -> np.ndarray:
    """log(sum(exp(values))) over the last dimension."""
    high = values.max(-1)
    return np.asarray(high + np.log(np.exp(values - high[..., None]).sum(-1)))
