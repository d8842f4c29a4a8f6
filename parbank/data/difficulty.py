"""How hard parts of a text are: the bits a token that a bigram model of the whole text needs for each part.

Pairs of tokens share counts by a hash, so the model takes a few megabytes at any vocabulary. It only ranks parts of one
text: the numbers themselves are rough.
"""

from itertools import pairwise

import numpy as np

from parbank.data.windows import Tokens

PARTS = 64
"""About as many as the shards that were ordered by difficulty in parameter-golf (80)."""
_SAMPLE = 1 << 20  # tokens of a part that are read at most
_BUCKETS = 1 << 20
# 2^64 over the golden ratio: spreads neighbouring pairs (Knuth's multiplicative hash).
_MIX = np.uint64(0x9E3779B97F4A7C15)


def rank_parts(tokens: Tokens) -> np.ndarray:
    """The parts 0 .. PARTS - 1 of a text, the hardest first. Fewer parts where there are few tokens."""
    count = max(1, min(PARTS, len(tokens) // 2))
    bounds = [len(tokens) * part // count for part in range(count + 1)]
    texts = [tokens.read(first, min(_SAMPLE, last - first)) for first, last in pairwise(bounds)]
    pairs, singles = np.zeros(_BUCKETS, dtype=np.int64), np.zeros(1 << 16, dtype=np.int64)
    for text in texts:
        pairs += np.bincount(_hash(text), minlength=_BUCKETS)
        singles += np.bincount(text[:-1], minlength=1 << 16)
    bits = [np.log2(singles[text[:-1]] / pairs[_hash(text)]).mean() for text in texts]
    # rounded, so that another library's last bit of a logarithm does not change the order of a resumed run
    return np.argsort(-np.round(bits, 9), kind="stable")


def _hash(text: np.ndarray) -> np.ndarray:
    pair = text[:-1].astype(np.uint64) << np.uint64(16) | text[1:].astype(np.uint64)
    return (pair * _MIX >> np.uint64(44)).astype(np.int64)
