"""Sliding scores: overlapping windows, each of which scores the tokens at its end. The public protocol."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from parbank.eval.methods.base import PieceMethod, random_tokens
from parbank.eval.score import window_tokens_together
from parbank.eval.windows import WindowScorer, check_windows, find_window_reach, make_window_scorer
from parbank.model import GPT, ModelConfig
from parbank.runtime import Runtime

STRIDE = 64  # of the public protocol


@dataclass(frozen=True, kw_only=True)
class Sliding(PieceMethod):
    """Windows that move by `stride` tokens."""

    name = "sliding"
    help = "the public protocol: every token with nearly a full window, most work done many times over"
    any_model = True
    rounding = PieceMethod.rounding | {"batch_tokens"}

    stride: int | None = None
    """The distance between windows in tokens; none takes 64, or the context if that is smaller."""
    batch_tokens: int | None = None
    """Tokens that go through the model together; none takes a number that memory allows. Rounding only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_windows(self.context, self.step)

    @property
    def step(self) -> int:
        """The distance between two windows, in tokens."""
        return min(STRIDE, self.context) if self.stride is None else self.stride

    def make_scorer(self, model: GPT, runtime: Runtime, *, targets: int, piece: int | None = None) -> WindowScorer:
        return make_window_scorer(
            model,
            runtime,
            targets=targets,
            piece=piece,
            context=self.context,
            stride=self.step,
            batch_tokens=self.batch_tokens,
            graphed=self.graphed and runtime.is_cuda,
        )

    def rehearse(self, model: GPT, runtime: Runtime) -> None:
        """One batch: a second one would capture a graph of nothing."""
        together = self.batch_tokens or window_tokens_together(model, runtime)
        more = max(1, together // self.context) - 1  # windows after the first
        self.score(model, random_tokens(model.config, self.context + more * self.step), runtime)

    def find_reach_in(self, pieces: Iterable[tuple[int, int]], targets: int) -> np.ndarray:
        return find_window_reach(pieces, targets, self.context, self.step)

    def find_idle(self, tokens: np.ndarray, model: ModelConfig) -> str | None:
        if self.step < self.context:
            return None
        return (
            f"windows of {self.context} tokens that move by {self.step} lie side by side: these are chunked scores; "
            "lower --stride for more context"
        )

    def describe(self) -> dict[str, Any]:
        return {"method": self.name, "context": self.context, "stride": self.step, "adapt": None}
