"""Validation during training: the averaged weights on a fixed sample of the validation text, counted in the clock."""

import math
import time

from parbank.config import require
from parbank.data.dataset import Dataset
from parbank.data.shards import TokenSet
from parbank.errors import ParbankError
from parbank.eval.windows import score_chunked
from parbank.model import GPT
from parbank.runtime import Runtime
from parbank.training.averaging import Averages
from parbank.training.config import RunConfig


class Validator:
    """Decides when to validate, and does it. The text is the beginning of the validation text, the same in every run."""

    def __init__(self, config: RunConfig, model: GPT, averages: Averages, dataset: Dataset, runtime: Runtime) -> None:
        self._unit, self._every = config.train.read_validate_every()
        self._context = config.batch.sequence_length
        self._tokens = config.train.validate_tokens
        self._model, self._averages, self._dataset, self._runtime = model, averages, dataset, runtime
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
            try:
                found = score_chunked(
                    self._model,
                    self._read(),
                    self._dataset.tokenizer,
                    context=self._context,
                    runtime=self._runtime,
                ).bpb
            except ParbankError:
                found = math.nan
        self._cost = time.perf_counter() - began
        return found

    def _read(self) -> TokenSet:
        if self._sample is None:
            whole = self._dataset.val
            windows = max(1, self._tokens // self._context)
            self._sample = TokenSet([whole.read(0, min(len(whole), windows * self._context + 1))])
            require(
                len(self._sample) > 1, "the validation text has no token to validate on; set train.validate_every=off"
            )
        return self._sample
