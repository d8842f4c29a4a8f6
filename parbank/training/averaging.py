"""Weight averages: an exponential average of every step, and a plain average over the tail of a run (SWA, Izmailov et
al. 2018).
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from parbank.config import require


@dataclass(frozen=True, kw_only=True)
class AverageConfig:
    """Which averages are kept, and which one becomes the model."""

    ema_decay: float = 0.997
    """Decay of the exponential average, each step; 0 keeps none. A good value averages the last 5% or so of the steps."""
    swa_every: int = 0
    """Add the weights to a plain average every so many steps of the tail; 0 keeps none."""
    swa_tail: float = 0.2
    """The tail starts when the learning rate has fallen to this share of its peak."""
    use: Literal["ema", "swa", "none"] = "ema"
    """The average that is scored and packed; "none" takes the last weights."""

    def __post_init__(self) -> None:
        require(0 <= self.ema_decay < 1, f"average.ema_decay must lie in 0 <= d < 1, got {self.ema_decay}")
        require(self.swa_every >= 0, f"average.swa_every must be 0 (off) or a number of steps, got {self.swa_every}")
        require(self.use != "ema" or self.ema_decay > 0, "average.use=ema needs average.ema_decay > 0")
        require(self.use != "swa" or self.swa_every > 0, "average.use=swa needs average.swa_every > 0")


class _Average:
    """A copy of a model that holds an average of its weights, under the names of the model's own state dict."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.weights: list[Tensor] = list(self.model.parameters())


class Averages:
    """Averages of a model's weights. Nothing here waits for the device."""

    def __init__(self, model: nn.Module, config: AverageConfig) -> None:
        self.config = config
        self._model = model
        self._weights: list[Tensor] = list(model.parameters())
        self._steps = 0
        self._snapshots = 0
        self._ema = _Average(model) if config.ema_decay else None
        self._swa: _Average | None = None

    @torch.no_grad()
    def update(self, lr_share: float) -> None:
        """To be called after every optimizer step; `lr_share` is the learning rate over its peak."""
        self._steps += 1
        if self._ema is not None:
            # In its first steps the average follows quickly, so that it forgets the random start.
            decay = min(self.config.ema_decay, self._steps / (self._steps + 10))
            torch._foreach_lerp_(self._ema.weights, self._weights, 1 - decay)
        if self.config.swa_every and lr_share <= self.config.swa_tail and self._steps % self.config.swa_every == 0:
            self._snapshots += 1
            self._swa = self._swa or _Average(self._model)
            torch._foreach_lerp_(self._swa.weights, self._weights, 1 / self._snapshots)

    def averaged(self) -> dict[str, Tensor]:
        """The weights to score and pack, as a state dict of the model."""
        chosen = self._chosen()
        return (self._model if chosen is None else chosen.model).state_dict()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside this context the parameters hold the average; afterwards, also after an error, their own values."""
        chosen = self._chosen()
        saved = [weight.detach().clone() for weight in self._weights]
        with torch.no_grad():
            torch._foreach_copy_(self._weights, saved if chosen is None else chosen.weights)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, saved)

    def _chosen(self) -> _Average | None:
        """A tail too short for one SWA snapshot falls back on the EMA, then on the weights themselves."""
        return {"ema": self._ema, "swa": self._swa or self._ema, "none": None}[self.config.use]

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "snapshots": self._snapshots,
            "ema": None if self._ema is None else self._ema.model.state_dict(),
            "swa": None if self._swa is None else self._swa.model.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        counts = state["steps"], state["snapshots"]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"averages over {counts[0]!r:.100} steps and {counts[1]!r:.100} snapshots")
        self._steps, self._snapshots = counts
        self._ema = self._adopt(state["ema"])
        self._swa = self._adopt(state["swa"])

    def _adopt(self, weights: dict[str, Tensor] | None) -> _Average | None:
        if weights is None:
            return None
        average = _Average(self._model)
        average.model.load_state_dict(weights)
        return average
