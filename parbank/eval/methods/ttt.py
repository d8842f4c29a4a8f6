"""Test-time training, score-first: a model that learns from the text it is scored on, but never before it has scored it.

The driver here owns the text. It scores a chunk with the weights as they are, and only then shows the adapter that chunk,
as a copy of its own. An adapter never holds the text, the scores, or anything that leads to them, so no token can have
touched the weights that score it. The last chunk is not learnt from: nothing is scored after it.

Under streaming scores the keys and values carried into a chunk were made by the weights of their time. They too came from
tokens already scored, so the order holds; it is another model than one that would recompute them, and a cheaper one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from parbank.config import require
from parbank.data.shards import TokenSet
from parbank.eval.adaptation import AdaptConfig, Adapter, make_adapter, restored
from parbank.eval.methods.streaming import StreamScorer, even_segment
from parbank.eval.score import (
    Pace,
    Progress,
    Scored,
    Scorer,
    Text,
    check_context,
    silent,
    tokens_together,
)
from parbank.eval.windows import make_window_scorer
from parbank.model import GPT
from parbank.model.gpt import MAX_POSITIONS
from parbank.runtime import Runtime


@dataclass(frozen=True)
class Piece:
    """Targets first .. last of a text."""

    first: int
    last: int
    fresh: bool
    """A document begins with it."""
    goes_on: bool
    """What comes after it is of the same document, or documents do not matter: learning from it may help."""


def plan_pieces(tokens: np.ndarray, chunk: int, bos_id: int | None) -> Iterator[Piece]:
    """Chunks of a text; with a bos_id, chunks of each document. Where a piece ends follows from tokens up to its end."""
    last, first = len(tokens) - 1, 0
    while first < last:
        end = min(first + chunk, last)
        fresh = bos_id is not None and (first == 0 or tokens[first] == bos_id)
        if bos_id is not None:
            closing = np.flatnonzero(tokens[first + 1 : end + 1] == bos_id)
            end = first + 1 + int(closing[0]) if len(closing) else end
        yield Piece(first, end, fresh, end < last and (bos_id is None or tokens[end] != bos_id))
        first = end


def is_learnt_from(piece: Piece, chunk: int) -> bool:
    return piece.goes_on and piece.last - piece.first == chunk


def check_learning(context: int, chunk: int) -> None:
    """An adapter learns through the model's plain forward pass."""
    width = min(context, chunk)
    require(
        width <= MAX_POSITIONS,
        f"ttt learns from windows of {width} tokens; a model has {MAX_POSITIONS} positions: lower --context or --chunk",
    )


def score_ttt(
    model: GPT,
    tokens: TokenSet,
    *,
    context: int,
    stride: int,
    runtime: Runtime,
    config: AdaptConfig | None = None,
    adapter: Callable[[GPT], Adapter] | None = None,
    segment: int | None = None,
    batch_tokens: int | None = None,
    compiled: bool = False,
    progress: Progress = silent,
) -> Scored:
    """Scores a text by chunks and adapts the model after each. `adapter` makes another one than the config's. The weights
    are the old ones again afterwards, also after an error."""
    check_context(context)
    config = (config or AdaptConfig()).resolve(context)
    assert config.chunk is not None
    text = Text.load(tokens, runtime)
    chunk = min(config.chunk, text.targets)
    check_learning(context, chunk)
    nats = text.new_nats()
    training = model.training
    with restored(model):
        model.eval()
        try:
            scorer: Scorer
            if config.scores == "streaming":
                together = tokens_together(model.config.vocab_size, runtime) if segment is None else segment
                length = even_segment(chunk, together)
                window = min(context, text.targets)  # as in score_streaming
                scorer = StreamScorer(model, runtime, context=window, segment=length, compiled=compiled)
            else:
                scorer = make_window_scorer(
                    model,
                    runtime,
                    targets=text.targets,
                    piece=chunk,
                    context=context,
                    stride=stride,
                    batch_tokens=batch_tokens,
                    compiled=compiled,
                )
            learner: Adapter = (
                adapter(model)
                if adapter is not None
                else make_adapter(model, runtime, config, context=context, compiled=compiled)
            )
            bos_id = model.config.bos_id if config.adapter == "low-rank" else None
            _run(text, nats, scorer, learner, chunk, bos_id, progress)
        finally:
            model.train(training)
    return Scored.gather(text, nats, runtime)


def _run(
    text: Text,
    nats: torch.Tensor,
    scorer: Scorer,
    learner: Adapter,
    chunk: int,
    bos_id: int | None,
    progress: Progress,
) -> None:
    chunks = -(-text.targets // chunk)
    pace = Pace(text.ids.device)
    for piece in plan_pieces(text.tokens, chunk, bos_id):
        if piece.fresh:
            learner.reset()
        scorer.score(text.upto(piece.last), piece.first, nats, more=piece.last < text.targets)
        progress(piece.last / text.targets)
        if is_learnt_from(piece, chunk):
            # A copy, which a cast is: a view would lead to all of the text. From the text that is on the device already: a copy
            # from the host would be waited for. The share is 0 at the first chunk and 1 at the last.
            seen = text.ids[piece.first : piece.last + 1].long()
            learner.learn(seen, piece.first // chunk / max(1, chunks - 1))
        pace.step()
