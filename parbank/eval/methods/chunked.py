"""Chunked scores: adjacent windows; each token sees the text before it in its window."""

from dataclasses import dataclass

import numpy as np

from parbank.data.shards import TokenSet
from parbank.data.tokenizer import Tokenizer
from parbank.eval.methods.base import Method, random_tokens
from parbank.eval.score import Progress, Scored, silent, window_tokens_together
from parbank.eval.windows import check_windows, find_window_reach, score_windows
from parbank.model import GPT, ModelConfig
from parbank.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class Chunked(Method):
    """Adjacent windows."""

    name = "chunked"
    help = "windows side by side: quick, little context at the start of each"
    any_model = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_windows(self.context, self.context)

    def score(
        self,
        model: GPT,
        tokens: TokenSet,
        runtime: Runtime,
        progress: Progress = silent,
        *,
        tokenizer: Tokenizer | None = None,
    ) -> Scored:
        """Never graphed: its passes are long, and it gives the same bits as the score at the end of training."""
        return score_windows(
            model, tokens, context=self.context, stride=self.context, runtime=runtime, progress=progress
        )

    def rehearse(self, model: GPT, runtime: Runtime) -> None:
        """A whole batch of windows."""
        targets = max(self.context, window_tokens_together(model, runtime))
        self.score(model, random_tokens(model.config, targets), runtime)

    def find_reach(self, tokens: np.ndarray, model: ModelConfig) -> np.ndarray:
        targets = len(tokens) - 1
        return find_window_reach([(0, targets)], targets, self.context, self.context)
