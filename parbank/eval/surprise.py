"""The bits of a text, token by token and piece by piece, so that a page can colour the text while it is scored."""

import math
from collections.abc import Iterator

import numpy as np

from parbank.data.shards import TokenSet
from parbank.eval.methods.streaming import make_stream_scorer
from parbank.eval.score import Text
from parbank.model import GPT
from parbank.runtime import Runtime

PIECE = 2048
"""Tokens scored together. A reader waits some tenths of a second for a piece on a CPU."""


def score_pieces(model: GPT, ids: np.ndarray, *, context: int, piece: int = PIECE) -> Iterator[np.ndarray]:
    """Yields the bits of each token after the first, `piece` tokens at a time, in the order of the text.

    `ids` begin with BOS. Every token is scored with a full window of context, as by the method streaming.
    """
    runtime = Runtime(device=next(model.parameters()).device)
    text = Text.load(TokenSet([ids]), runtime)
    scorer = make_stream_scorer(model, runtime, targets=text.targets, piece=piece, context=context)
    nats = text.new_nats()
    training = model.training
    model.eval()
    try:
        for start in range(0, text.targets, piece):
            end = min(start + piece, text.targets)
            scorer.score(text.upto(end), start, nats, more=end < text.targets)
            yield (nats[start:end].double() / math.log(2)).cpu().numpy()
    finally:
        model.train(training)
