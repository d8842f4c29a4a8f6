"""Validation during training: the averaged weights on a fixed sample of the validation text, counted in the clock."""

import math
import time

import numpy as np

from parbank.config import require
from parbank.data.dataset import Dataset
from parbank.data.shards import TokenSet
from parbank.eval.windows import score_windows
from parbank.model import GPT
from parbank.runtime import Runtime
from parbank.training.averaging import Averages
from parbank.training.config import RunConfig


class Validator:
    """Decides when to validate, and does it. The sample is the same in every run: windows of the validation text, evenly
    spread over it, since the beginning of a text may be unlike the rest."""

    def __init__(self, config: RunConfig, model: GPT, averages: Averages, dataset: Dataset, runtime: Runtime) -> None:
        self._unit, self._every = config.train.read_validate_every()
        self._context = config.batch.sequence_length
        self._tokens = config.train.validate_tokens
        self._model, self._averages, self._dataset, self._runtime = model, averages, dataset, runtime
        require(
            not self.is_on or self._context > 1, "windows of 1 token cannot be validated; set train.validate_every=off"
        )
        self._sample: TokenSet | None = None
        self._next = math.inf
        self._cost = 0.0

    @property
    def is_on(self) -> bool:
        return self._every > 0

    def start(self, step: int, seconds: float) -> None:
        """Training begins, or goes on, here. The next validation is at a whole multiple of the interval."""
        now = step if self._unit == "steps" else seconds
        self._next = (math.floor(now / self._every) + 1) * self._every if self.is_on else math.inf

    def is_due(self, step: int, seconds: float, left: float) -> bool:
        """Whether to validate after a step. With less time `left` than twice the cost, the promise of the clock comes
        first."""
        due = (step if self._unit == "steps" else seconds) >= self._next
        return due and left > 2 * self._cost

    def measure(self) -> float:
        """Bits per byte. Not a number where the weights are not: training ends by its own rule then."""
        began = time.perf_counter()
        with self._averages.applied():
            scored = score_windows(
                self._model, self._read(), context=self._context, stride=self._context, runtime=self._runtime
            )
        # The token after a window belongs to the next window of the sample, which lies elsewhere in the text.
        inside = np.arange(1, len(scored.tokens)) % self._context != 0
        size = int(scored.byte_counts(self._dataset.tokenizer)[inside].sum(dtype=np.int64))
        nats = float(scored.nats[inside].sum(dtype=np.float64))
        self._cost = time.perf_counter() - began
        return nats / math.log(2) / size if size else math.nan

    def _read(self) -> TokenSet:
        if self._sample is None:
            found = spread(self._dataset.val, self._tokens, self._context)
            require(len(found) > 1, "the validation text has no token to validate on; set train.validate_every=off")
            self._sample = TokenSet([found])
        return self._sample


def spread(text: TokenSet, tokens: int, context: int) -> np.ndarray:
    """About `tokens` tokens of a text: some of the windows that score it at the end, as far from each other as
    possible. A text of less than one window is taken as it is."""
    there = len(text) // context
    if not there:
        return text.read(0, len(text))
    count = min(there, max(1, tokens // context))
    return np.concatenate([text.read((2 * n + 1) * there // (2 * count) * context, context) for n in range(count)])
