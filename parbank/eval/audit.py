"""An audit of a score: at scored positions, the probabilities of all tokens must sum to 1.

At a sample of positions of every pass, the model gives the logits of the whole vocabulary, from the same features and
with the weights of that moment. The score gives the nats of the target. If these nats are right, the normaliser that they
imply fits the other logits too: sum over v of exp(logit_v - logit_target - nats) is 1, here in float64. A loss that is too
low anywhere makes the sum larger than 1.

A method that mixes these predictions with others audits its mixture too (`Method.audit`).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from parbank.errors import ParbankError
from parbank.eval.score import IGNORED
from parbank.model import GPT
from parbank.runtime import Runtime

POSITIONS = 16  # of each pass of the model, which scores some thousand tokens: less than 1% of the work
# Rounded logits: up to 30 (the softcap) with 8 bits of mantissa are off by 0.06, and a sum of exponentials by as much.
TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.02}
TOLERANCE_FLOAT32 = 1e-3


class Audit:
    """The checks so far, on this rank."""

    def __init__(self) -> None:
        self._positions = 0
        self._worst = 0.0
        self._tolerance = TOLERANCE_FLOAT32

    def check(self, logits: Tensor, targets: Tensor, nats: Tensor, dtype: torch.dtype) -> None:
        """logits (k, vocabulary); targets and nats (k,). `dtype` is the model's, which decides the rounding."""
        wide = logits.double()
        own = wide.gather(-1, targets[:, None])
        sums = (wide - own - nats.double()[:, None]).exp().sum(-1)
        self._tolerance = max(self._tolerance, TOLERANCE.get(dtype, 0.0))
        for total in sums.tolist():
            self.add(total)

    def add(self, total: float) -> None:
        """One more position, with the sum of its probabilities."""
        deviation = abs(total - 1)
        self._worst = max(self._worst, math.inf if math.isnan(deviation) else deviation)
        self._positions += 1

    def finish(self, runtime: Runtime) -> dict[str, Any]:
        """Over all ranks: how many positions, and the worst deviation. Beyond the tolerance, the score is refused."""
        count = torch.tensor([self._positions], device=runtime.device)
        positions = int(runtime.sum(count)[0])
        worst, tolerance = runtime.agree([self._worst, self._tolerance])
        if worst > tolerance:
            raise ParbankError(
                f"the probabilities of a scored position sum to 1 only within {worst:.3g}, where rounding explains {tolerance:g}; "
                "the score is not one of probabilities: score on another device (--device cpu), and report it"
            )
        return {"positions": positions, "worst_deviation": worst, "tolerance": tolerance}


@contextmanager
def audited(model: GPT) -> Iterator[Audit]:
    """Watches every pass that scores tokens one by one, whatever the method. CUDA graphs must be off: they replay passes."""
    audit, read_out = Audit(), model.read_out

    def watch(x: Tensor, targets: Tensor | None, reduction: str = "mean") -> Tensor:
        nats = read_out(x, targets, reduction)
        if targets is not None and reduction == "none":
            flat = targets.flatten()
            if len(scored := (flat != IGNORED).nonzero().flatten()):
                count = min(POSITIONS, len(scored))
                chosen = scored[torch.linspace(0, len(scored) - 1, count, device=flat.device).long()]
                with torch.no_grad():  # a pass that scores may also be learnt from
                    logits = read_out(x.flatten(0, -2)[chosen], None)
                    audit.check(logits, flat[chosen].long(), nats.flatten()[chosen], x.dtype)
        return nats

    model.read_out = watch  # type: ignore[method-assign]
    try:
        yield audit
    finally:
        del model.read_out
