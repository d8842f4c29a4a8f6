"""Weight averages beside the weights: an exponential one every step, and a plain one over the tail of the run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

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


class Averages:
    """Averages of a fixed set of named parameters. Nothing here waits for the device."""

    def __init__(self, parameters: dict[str, Tensor], config: AverageConfig) -> None:
        self.config = config
        self._parameters = dict(parameters)
        self.reset()

    def reset(self) -> None:
        self._steps = 0
        self._snapshots = 0
        self._ema = self._copy() if self.config.ema_decay else None
        self._swa: list[Tensor] | None = None

    @torch.no_grad()
    def update(self, lr_share: float) -> None:
        """To be called after every optimizer step; `lr_share` is the learning rate over its peak."""
        self._steps += 1
        live = list(self._parameters.values())
        if self._ema is not None:
            # In its first steps the average follows quickly, so that it does not remember the random start.
            decay = min(self.config.ema_decay, self._steps / (self._steps + 10))
            torch._foreach_lerp_(self._ema, live, 1 - decay)
        if self.config.swa_every and lr_share <= self.config.swa_tail and self._steps % self.config.swa_every == 0:
            self._snapshots += 1
            self._swa = self._copy() if self._swa is None else self._swa
            torch._foreach_lerp_(self._swa, live, 1 / self._snapshots)

    def averaged(self) -> dict[str, Tensor]:
        """The weights to score and pack, by parameter name. A tail too short for one SWA snapshot falls back on the EMA,
        then on the weights themselves."""
        chosen = {"ema": self._ema, "swa": self._swa or self._ema, "none": None}[self.config.use]
        return dict(zip(self._parameters, chosen)) if chosen is not None else dict(self._parameters)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The parameters hold the average inside, and their own values again afterwards, also on an error."""
        saved = self._copy()
        live = list(self._parameters.values())
        with torch.no_grad():
            torch._foreach_copy_(live, list(self.averaged().values()))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(live, saved)

    def state_dict(self) -> dict[str, Any]:
        names = list(self._parameters)
        return {
            "steps": self._steps,
            "snapshots": self._snapshots,
            "ema": None if self._ema is None else dict(zip(names, self._ema)),
            "swa": None if self._swa is None else dict(zip(names, self._swa)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps, self._snapshots = state["steps"], state["snapshots"]
        self._ema = self._adopt(state["ema"])
        self._swa = self._adopt(state["swa"])

    def _adopt(self, tensors: dict[str, Tensor] | None) -> list[Tensor] | None:
        if tensors is None:
            return None
        return [tensors[name].to(live.device, copy=True).contiguous() for name, live in self._parameters.items()]

    def _copy(self) -> list[Tensor]:
        return [p.detach().clone() for p in self._parameters.values()]
