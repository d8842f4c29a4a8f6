"""Scores of a running text: each token once, with a full window of context (see parbank/model/stream.py)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from parbank.config import require
from parbank.eval.methods.base import PieceMethod, random_tokens
from parbank.eval.ring import RingCarry
from parbank.eval.score import IGNORED, Pace, Progress, Text, check_context, silent, tokens_together
from parbank.model import GPT
from parbank.model.stream import Carry, LocalCarry, Stream
from parbank.precision import autocast
from parbank.runtime import Runtime

SPARE = 32  # padding may be at most 1/32 of the text
# By default a segment on a GPU has 4 times the tokens of a batch of windows. The GPU must work on a layer for longer than the
# host takes to launch it. Still longer segments would only take memory.
LONGER = 4
# Segments up to this length are replayed as a graph. A longer segment is not host-bound, and its graph would hold memory.
GRAPHED = 65_536
ROUND = 128  # long segments are cut to a multiple of this: a whole number of tiles for products and attention


class StreamScorer:
    """Segments go round the ranks. A segment needs, layer by layer, the keys and values of the segment before it. So a
    rank starts on its segment as soon as its neighbour has finished the first layer."""

    def __init__(self, model: GPT, runtime: Runtime, *, context: int, segment: int, graphed: bool = False) -> None:
        check_context(context)
        self._runtime, self._segment, self._padded = runtime, segment, graphed
        self._bos = model.config.bos_id if model.config.isolate_documents else None
        self._ring = RingCarry(model, context, runtime) if runtime.world > 1 else None
        carry: Carry = LocalCarry() if self._ring is None else self._ring
        graph = graphed and self._ring is None and segment <= GRAPHED
        self._stream = Stream(model, context, carry=carry, graph=graph)
        self._number = 0  # segments read so far, by all ranks

    @torch.inference_mode()
    def score(self, text: Text, first: int, nats: Tensor, *, more: bool, progress: Progress = silent) -> None:
        last = text.targets
        documents = None if self._bos is None else np.flatnonzero(text.tokens == self._bos)
        pace = Pace(nats.device)
        for start in range(first, last, self._segment):
            end = min(start + self._segment, last)
            if self._number % self._runtime.world == self._runtime.rank:
                if self._ring is not None:
                    self._ring.begin(first=self._number == 0, last=end == last and not more)
                self._score_segment(text.ids, start, end, documents, nats)
                pace.step()
                progress((end - first) / (last - first))
            self._number += 1
        if self._ring is not None and not more:
            self._ring.finish()

    def _score_segment(self, ids: Tensor, start: int, end: int, documents: np.ndarray | None, nats: Tensor) -> None:
        length = self._segment if self._padded else end - start
        targets = F.pad(ids[start + 1 : end + 1].long(), (0, length - (end - start)), value=IGNORED)
        with autocast(nats.device):
            found = self._stream.read(ids, start, end, targets, length=length, documents=documents)
            nats[start:end] = found[: end - start].float()


def even_segment(targets: int, segment: int) -> int:
    """A length of at most `segment` that leaves little of the last segment empty. If little is empty anyway, the length
    stays as given, so that its graph also serves the next text."""
    require(segment >= 1, f"a segment has at least 1 token, got {segment}; raise --segment")
    pieces = math.ceil(targets / segment)
    if (pieces * segment - targets) * SPARE <= targets:
        return segment
    length = math.ceil(targets / pieces)
    return min(segment, math.ceil(length / ROUND) * ROUND) if segment >= 8 * ROUND else length


def make_stream_scorer(
    model: GPT,
    runtime: Runtime,
    *,
    targets: int,
    piece: int | None = None,
    context: int,
    segment: int | None = None,
    graphed: bool = False,
) -> StreamScorer:
    """For a text of so many targets that comes whole, or in pieces of at most so many. The segment's length changes
    rounding only; unless given it is what memory allows."""
    if segment is None:
        longer = LONGER if runtime.is_cuda and piece is None else 1
        segment = tokens_together(model.config.vocab_size, runtime) * longer
    length = even_segment(piece or targets, segment)
    window = min(context, targets)  # a longer window would see the same, and carry keys that are never filled
    return StreamScorer(model, runtime, context=window, segment=length, graphed=graphed)


@dataclass(frozen=True, kw_only=True)
class Streaming(PieceMethod):
    """A whole text in one pass."""

    name = "streaming"
    help = "every token computed once, with a full window of context"
    rounding = PieceMethod.rounding | {"segment"}

    segment: int | None = None
    """Tokens the model reads together; none takes a number that memory allows. Rounding only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.segment is None or self.segment >= 1, f"--segment must be at least 1, got {self.segment}")

    def make_scorer(self, model: GPT, runtime: Runtime, *, targets: int, piece: int | None = None) -> StreamScorer:
        return make_stream_scorer(
            model,
            runtime,
            targets=targets,
            piece=piece,
            context=self.context,
            segment=self.segment,
            graphed=self.graphed and runtime.is_cuda,
        )

    def rehearse(self, model: GPT, runtime: Runtime) -> None:
        """One segment: a second one would capture a graph of nothing."""
        targets = min(self.segment or LONGER * tokens_together(model.config.vocab_size, runtime), GRAPHED)
        self.score(model, random_tokens(model.config, targets), runtime)

    def find_reach_in(self, pieces: Iterable[tuple[int, int]], targets: int) -> np.ndarray:
        return np.minimum(np.arange(targets), self.context - 1)
