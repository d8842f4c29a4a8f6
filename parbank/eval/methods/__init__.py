"""The ways to score a text, by name."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from parbank.config import require, to_dict
from parbank.data.shards import TokenSet
from parbank.eval.adaptation import AdaptConfig
from parbank.eval.methods.streaming import score_streaming
from parbank.eval.methods.ttt import Piece, check_learning, is_learnt_from, plan_pieces, score_ttt
from parbank.eval.result import in_effect
from parbank.eval.score import Progress, Scored, check_context, silent
from parbank.eval.windows import check_windows, plan_windows, score_windows
from parbank.model import GPT, ModelConfig
from parbank.runtime import Runtime

Method = Literal["chunked", "sliding", "streaming", "ttt"]
STRIDE = 64  # of the public protocol


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How a text is scored: everything that changes what is measured, and two settings that change rounding only."""

    method: Method = "chunked"
    context: int = 1024
    """The window, in tokens."""
    stride: int | None = None
    """Of sliding windows; none takes 64, or the context where that is less."""
    adapt: AdaptConfig | None = None
    """Of ttt."""
    segment: int | None = None
    """Tokens a streaming model reads together. Rounding only."""
    compiled: bool = True
    """On a GPU, compile the model for scoring. Rounding only."""

    def __post_init__(self) -> None:
        check_context(self.context)
        slides = self.scores == "sliding"
        require(
            self.stride is None or slides,
            f"--stride is for sliding windows (--method sliding, or ttt with --ttt-scores sliding), not for {self.method}",
        )
        require(self.adapt is None or self.method == "ttt", f"settings of ttt were given with --method {self.method}")
        require(self.segment is None or self.scores == "streaming", "--segment is for streaming scores")
        require(self.segment is None or self.segment >= 1, f"--segment must be at least 1, got {self.segment}")
        if self.scores != "streaming":
            check_windows(self.context, self.step)
        if self.method == "ttt":
            check_learning(self.context, self.adaptation.chunk or self.context)

    @property
    def scores(self) -> str:
        """The method that scores, which for ttt is one of the others."""
        return (self.adapt or AdaptConfig()).scores if self.method == "ttt" else self.method

    @property
    def step(self) -> int:
        """How far a window moves."""
        if self.scores != "sliding":
            return self.context
        return min(STRIDE, self.context) if self.stride is None else self.stride

    @property
    def adaptation(self) -> AdaptConfig:
        """Of ttt, with every default filled in."""
        return (self.adapt or AdaptConfig()).resolve(self.context)

    def describe(self) -> dict[str, Any]:
        """What a score is a score of: two that differ here do not compare."""
        return {
            "method": self.method,
            "context": self.context,
            "stride": self.step if self.scores == "sliding" else None,
            "adapt": in_effect(to_dict(self.adaptation)) if self.method == "ttt" else None,
        }


def score_text(
    model: GPT, tokens: TokenSet, config: EvalConfig, runtime: Runtime, progress: Progress = silent
) -> Scored:
    """Scores a text by the method of the config."""
    compiled = config.compiled and runtime.is_cuda
    shared: dict[str, Any] = {"context": config.context, "runtime": runtime, "progress": progress}
    if config.method == "streaming":
        return score_streaming(model, tokens, segment=config.segment, compiled=compiled, **shared)
    if config.method == "ttt":
        return score_ttt(
            model, tokens, stride=config.step, config=config.adapt, segment=config.segment, compiled=compiled, **shared
        )
    # A chunked pass is over before it would be compiled, and is then the same as the score training ends with.
    sliding = config.method == "sliding"
    return score_windows(model, tokens, stride=config.step, compiled=compiled and sliding, **shared)


def find_contexts(tokens: np.ndarray, config: EvalConfig, model: ModelConfig) -> np.ndarray:
    """(N - 1,) how many tokens before the one it follows each target could see directly: 0 is a window's first."""
    targets = len(tokens) - 1
    if config.scores == "streaming":
        found = np.minimum(np.arange(targets), config.context - 1)
    else:
        pieces = [(0, targets)]
        if config.method == "ttt":
            pieces = [(piece.first, piece.last) for piece in _pieces(tokens, config, model)]
        width = min(config.context, targets)
        plans = [plan_windows(first, last, width, min(config.step, width)) for first, last in pieces]
        start, begin, end = np.concatenate(plans).T
        found = np.arange(targets) - np.repeat(start, end - begin)
    if model.isolate_documents:
        found = np.minimum(found, place_in_document(tokens, model.bos_id))
    return found


def find_idle(tokens: np.ndarray, config: EvalConfig, model: ModelConfig) -> str | None:
    """What was asked for and came to nothing on this text, in a line; None where all had its effect."""
    if config.method == "sliding" and config.step >= config.context:
        return (
            f"windows of {config.context} tokens that move by {config.step} lie side by side: these are chunked scores; "
            "lower --stride for more context"
        )
    targets = len(tokens) - 1
    if config.method != "ttt":
        return None
    chunk = min(config.adaptation.chunk or targets, targets)
    if any(is_learnt_from(piece, chunk) for piece in _pieces(tokens, config, model)):
        return None
    if targets == chunk:
        return f"nothing was learnt: the text is one chunk of {targets:,} tokens, and the last is never learnt from; lower --chunk"
    return f"nothing was learnt: no document goes on after a whole chunk of {chunk:,} tokens; lower --chunk"


def _pieces(tokens: np.ndarray, config: EvalConfig, model: ModelConfig) -> Iterator[Piece]:
    """What ttt scores at a time."""
    adapt = config.adaptation
    bos = model.bos_id if adapt.adapter == "low-rank" else None
    return plan_pieces(tokens, adapt.chunk or len(tokens), bos)


def place_in_document(tokens: np.ndarray, bos_id: int) -> np.ndarray:
    """(N - 1,) the place, in its document, of the token each target follows: 0 is the BOS."""
    place = np.arange(len(tokens) - 1)
    starts = np.where(tokens[:-1] == bos_id, place, 0)
    return place - np.maximum.accumulate(starts)
