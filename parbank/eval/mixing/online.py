"""A mixture of predictions whose weights learn from the text, a block of tokens at a time, once the block is scored.

p = sum over experts of w_i p_i, with w the softmax of numbers that a context selects. The mixture of distributions is a
distribution, so probabilities sum to 1 whatever the weights. Weights follow the gradient of log p, as in the mixers of
PAQ (Mahoney 2005); those mix in the logistic domain, bit by bit, where our experts predict whole tokens.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class MixConfig:
    """How weights learn."""

    rate: float = 0.02
    """Step of the gradient, per token."""
    block: int = 64
    """Tokens scored with the same weights, and then learnt from."""


def mix_online(
    nats: np.ndarray, contexts: np.ndarray, start: np.ndarray, config: MixConfig
) -> tuple[np.ndarray, np.ndarray]:
    """The mixture's nats (n,) and the final weights (contexts, experts).

    nats (n, experts): what each expert pays for each token, in the order of the text. contexts (n,): which weights a
    token is predicted with; it may depend on tokens before this one only. start (experts,): the weights at first.
    """
    logits = np.repeat(np.log(start)[None], int(contexts.max(initial=0)) + 1, axis=0)
    found = np.empty(len(nats))
    for first in range(0, len(nats), config.block):
        own = slice(first, first + config.block)
        weights = _softmax(logits[contexts[own]])
        joint = np.log(weights) - nats[own]
        total = _log_sum(joint)
        found[own] = -total
        np.add.at(logits, contexts[own], config.rate * (np.exp(joint - total[:, None]) - weights))
    return found, _softmax(logits)


def _softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(raised / raised.sum(-1, keepdims=True))


def _log_sum(values: np.ndarray) -> np.ndarray:
    high = values.max(-1)
    return np.asarray(high + np.log(np.exp(values - high[..., None]).sum(-1)))
