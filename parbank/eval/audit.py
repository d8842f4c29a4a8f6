"""An audit of a score: at scored positions, the probabilities of all tokens must sum to 1.

At a sample of positions of every pass, the model gives the logits of the whole vocabulary, from the same features and
with the weights of that moment, and the nats of the target by the op that scores. If these nats are right, the normaliser
that they imply fits the other logits too: sum over v of exp(logit_v - logit_target - nats) is 1, here in float64. A loss
that is too low anywhere makes the sum larger than 1.

Logits and nats of the sample come from products of the same shape, so both have the same rounding, in bfloat16 too. Only
the float32 rounding of the loss remains: `TOLERANCE` allows for it. The pass itself rounds its logits differently. At a
position it may give fewer or more nats than the sample, but not on average: rounding goes both ways.

Every score is audited at `SAMPLE` positions of each pass, and `eval --audit` audits more. The numbers stay on the device,
so passes that are replayed as CUDA graphs are audited too. A method that mixes these predictions with others audits its
mixture as well (parbank/eval/mixing/audit.py).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parbank.errors import ParbankError
from parbank.model import GPT
from parbank.ops.loss import IGNORED
from parbank.runtime import Runtime

SAMPLE = 4  # positions of each pass of the model, which scores some thousand tokens; benchmarks/proof.py times it
POSITIONS = 64  # of each pass, under `eval --audit`
# The loss is computed in float32: its error is 2^-23 of the largest number in it, a cost or a capped logit, times a few.
# 2^-10 leaves room for costs up to a thousand nats; beyond, it grows with the cost.
TOLERANCE = 2.0**-10
# Units in the last place by which a logit may be wrong: a product adds some hundred numbers, perhaps in rounded parts.
ROUNDINGS = 64
SIGMAS = 4.0  # by chance, a mean is more than 4 standard errors off once in 16,000 scores


@dataclass(frozen=True)
class Audited:
    """The result of an audit."""

    positions: int = 0
    deviation: float = 0.0
    """The largest distance of a sum of probabilities from 1."""
    excess: float = 0.0
    """The largest deviation as a multiple of its tolerance."""
    bias: float = 0.0
    """The mean of a pass's nats minus the sample's, at the same positions."""
    spread: float = 0.0
    """The root mean square of that difference at a position."""
    rounding: float = 0.0
    """The largest error of a logit, by its size and the precision of the model."""

    def refuse_faults(self) -> None:
        """Raises an error if the nats are not those of probabilities."""
        if self.excess > 1:
            raise ParbankError(
                f"the probabilities of a scored position sum to 1 only within {self.deviation:.3g}, which is "
                f"{self.excess:.3g} times what rounding explains; the score is refused, since it is not one of probabilities: "
                "score on another device (--device cpu), and report it"
            )
        by_chance = SIGMAS * self.spread / math.sqrt(max(self.positions, 1))
        allowed = TOLERANCE + min(by_chance, self.rounding)
        if not abs(self.bias) <= allowed:
            raise ParbankError(
                f"scored positions cost {abs(self.bias):.3g} nats {'less' if self.bias < 0 else 'more'} on average than the same "
                f"positions computed again, where rounding explains {allowed:.3g}; the score is refused: score on another "
                "device (--device cpu), and report it"
            )

    def join(self, other: "Audited") -> "Audited":
        """The result of both audits together."""
        positions = self.positions + other.positions
        share = other.positions / max(positions, 1)
        return Audited(
            positions,
            max(self.deviation, other.deviation),
            max(self.excess, other.excess),
            (1 - share) * self.bias + share * other.bias,
            math.sqrt((1 - share) * self.spread**2 + share * other.spread**2),
            max(self.rounding, other.rounding),
        )

    def describe(self) -> dict[str, Any]:
        return {"positions": self.positions, "worst_deviation": self.deviation, "tolerance": TOLERANCE}


class Audit:
    """The checks so far, on this rank."""

    def __init__(self, device: torch.device) -> None:
        # One tensor each, at a fixed address: a CUDA graph adds to them when it is replayed.
        self._worst = torch.zeros(3, dtype=torch.float64, device=device)  # deviation, excess, rounding
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)  # positions, differences, their squares

    def check(
        self, logits: Tensor, targets: Tensor, nats: Tensor, passed: Tensor, count: Tensor | int, dtype: torch.dtype
    ) -> None:
        """logits (k, vocabulary), targets (k,), and their nats twice, (k,) each: by the sample, and by the pass. The first
        `count` positions count. Where the pass gives no number, nothing is checked: `Scored.total` refuses that. `dtype`
        is that of the products."""
        wide = logits.double()
        rounding = ROUNDINGS * torch.finfo(dtype).eps * wide.abs().amax(-1)
        wide = wide - wide.amax(-1, keepdim=True)
        exact = wide.logsumexp(-1) - wide.gather(-1, targets[:, None])[:, 0]
        counts = (torch.arange(len(targets), device=targets.device) < count) & passed.isfinite()
        deviation = (exact - nats.double()).expm1().abs()
        excess = deviation / (TOLERANCE * (1 + nats.double().abs() / 1024))
        found = torch.stack([deviation, excess, rounding]).nan_to_num(nan=math.inf)
        self._worst.copy_(torch.maximum(self._worst, torch.where(counts, found, 0.0).amax(-1)))
        apart = torch.where(counts, passed.double() - nats.double(), 0.0)
        self._sums += torch.stack([counts.double(), apart, apart * apart]).sum(-1)

    def add(self, total: float, nats: float, passed: float) -> None:
        """One more position: the sum of its probabilities, and its nats twice, as in `check`."""
        deviation = abs(total - 1) if math.isfinite(total) else math.inf
        found = torch.tensor([deviation, deviation / TOLERANCE, 0.0], dtype=torch.float64)
        self._worst.copy_(torch.maximum(self._worst, found.to(self._worst.device)))
        apart = passed - nats
        self._sums += torch.tensor([1.0, apart, apart * apart], dtype=torch.float64).to(self._sums.device)

    def gather(self, runtime: Runtime) -> Audited:
        """The result over all ranks."""
        deviation, excess, rounding = runtime.agree(self._worst.tolist())
        count, apart, squares = runtime.sum(self._sums.clone()).tolist()
        several = max(count, 1.0)
        return Audited(int(count), deviation, excess, apart / several, math.sqrt(squares / several), rounding)


@contextmanager
def audited(model: GPT, device: torch.device, positions: int = SAMPLE) -> Iterator[Audit]:
    """Watches every pass that scores tokens one by one, whatever the method."""
    audit, read_out, sample = Audit(device), model.read_out, partial(type(model).read_out, model)

    def watch(x: Tensor, targets: Tensor | None, reduction: str = "mean") -> Tensor:
        nats = read_out(x, targets, reduction)
        if targets is not None and reduction == "none":
            with torch.no_grad():  # a pass that scores may also be learnt from
                flat = targets.flatten()
                chosen, count = _choose(flat != IGNORED, positions)
                rows, own = x.flatten(0, -2)[chosen], flat[chosen].long().clamp(min=0)
                passed = nats.flatten()[chosen]
                audit.check(sample(rows, None), own, sample(rows, own, "none"), passed, count, x.dtype)
        return nats

    with reading_out_by(watch, model):
        yield audit


@contextmanager
def reading_out_by(read_out: Callable[..., Tensor], model: GPT) -> Iterator[None]:
    """Every pass of the model ends with `read_out` instead of its own."""
    before = vars(model).get("read_out")
    model.read_out = read_out  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.read_out
        if before is not None:
            model.read_out = before  # type: ignore[method-assign]


def _choose(scored: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Up to `most` places where `scored` (n,) is true, evenly over them, and their number. It never waits for the device."""
    number = scored.cumsum(0)
    count = number[-1]
    steps = torch.arange(most, device=scored.device)
    wanted = torch.where(count > most, steps * (count - 1) // max(most - 1, 1), steps.clamp(max=count - 1)) + 1
    return torch.searchsorted(number, wanted).clamp(max=len(scored) - 1), count.clamp(max=most)
