"""Tensors of one shape, rounded together at one price of a bit. parbank.quant.solver derives the steps.

**Rows of logits.** The cost of an error is quadratic only while it is small. A logit enters the loss through its exponential: an
error of variance v raises the sum of the exponentials by the row's share p times e^(v/2) - 1 (for Gaussian errors). The second
order, p v / 2, allows the rows of rare tokens any error, and such a row at zero is a token that is suddenly likely. Where a bit
has the price lambda, the v of a row of n weights that costs least in all solves u e^u = a with v = 2 u and a = n lambda / (2 ln 2
p). The second order says u = a. So such a row is treated as if its sensitivity were a / u times as high.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parbank.errors import ArtifactError
from parbank.quant.gptq import HessianFactors, factorise, round_bank
from parbank.quant.integers import Halves, Quantised
from parbank.quant.low_rank import correct
from parbank.quant.pruning import prices
from parbank.quant.rate import measure
from parbank.quant.rotation import block_size, rotate, rotate_hessian

Contents = dict[str, Quantised | Halves]
MAX_Q = 127
GRID = 8  # steps of scales an octave
_SMALLEST_HALF, _LARGEST_HALF = 2.0**-24, 65504.0
_SAMPLE = 1 << 20  # weights of a bank that a prediction looks at: entropies are then right to a tenth of a percent
# A sensitivity far below its tensor's mean is mostly calibration noise: it does not justify dropping a row.
_FLOOR = 1e-3
MOST_EXPONENT = 50.0  # of an error of logits, so that its cost is finite


@dataclass(frozen=True)
class Rounded:
    """One bank at one multiplier."""

    values: Tensor
    scales: Tensor
    """(N, rows, 1), float16."""
    distortion: Tensor
    """(N,): nats a token."""
    bits: Tensor
    """(N,)"""


@dataclass(frozen=True)
class QuantBank:
    """Tensors of one shape and treatment, stacked."""

    names: tuple[str, ...]
    weights: Tensor
    """(N, rows, cols): the weights to round, rotated if the bank is."""
    hessians: Tensor
    sensitivity: Tensor
    """(N, rows)"""
    factors: HessianFactors
    rotation: int = 0
    low_rank: tuple[Tensor, Tensor] | None = None
    """(N, rows, r) and (N, r, cols), float16: already taken out of the weights."""
    pruning: float = 1.0
    """The price of a bit in rounding, over the price in choosing steps; 0 rounds to nearest."""
    logits: Tensor | None = None
    """(N,): whether the outputs of a tensor are logits; None where none are."""

    @classmethod
    def stack(
        cls,
        names: tuple[str, ...],
        weights: Tensor,
        hessians: Tensor,
        sensitivity: Tensor,
        damping: float,
        activation_order: bool = True,
    ) -> "QuantBank":
        floor = _FLOOR * sensitivity.mean(1, keepdim=True)
        sensitivity = torch.maximum(sensitivity, floor.clamp(min=torch.finfo(torch.float32).tiny))
        factors = factorise(hessians, damping=damping, activation_order=activation_order)
        return cls(names, weights, hessians, sensitivity, factors)

    def rotated(self, damping: float, activation_order: bool = True) -> "QuantBank":
        """The same tensors with rotated columns: outlying columns are spread, and curvatures evened."""
        block = block_size(self.weights.shape[2])
        weights, hessians = rotate(self.weights, block), rotate_hessian(self.hessians, block)
        turned = QuantBank.stack(self.names, weights, hessians, self.sensitivity, damping, activation_order)
        return replace(turned, rotation=block, low_rank=self.low_rank, pruning=self.pruning, logits=self.logits)

    def lowered(self, rank: int) -> "QuantBank":
        """The same tensors with their strongest directions removed as factors: the rest has less to code.

        Correcting the error after rounding (LQER) is weaker here: the error of a uniform step is white, and a few
        directions hold little of it.
        """
        tall, flat = correct(self.weights, self.hessians, self.sensitivity, rank)
        return replace(self, weights=self.weights - tall.float() @ flat.float(), low_rank=(tall, flat))

    def pick(self, chosen: list[bool]) -> "QuantBank | None":
        """The chosen tensors as a new bank."""
        if not any(chosen):
            return None
        index = torch.tensor([i for i, flag in enumerate(chosen) if flag], device=self.weights.device)
        return replace(
            self,
            names=tuple(name for name, flag in zip(self.names, chosen) if flag),
            weights=self.weights[index],
            hessians=self.hessians[index],
            sensitivity=self.sensitivity[index],
            factors=HessianFactors(self.factors.order[index], self.factors.upper[index], self.factors.curvature[index]),
            low_rank=None if self.low_rank is None else (self.low_rank[0][index], self.low_rank[1][index]),
            logits=None if self.logits is None else self.logits[index],
        )

    @property
    def stiffness(self) -> Tensor:
        """(N, rows): each row's sensitivity times the mean curvature of its columns."""
        return self.sensitivity * self.factors.curvature.mean(1)[:, None]

    def sensitivity_at(self, multiplier: float) -> Tensor:
        """(N, rows): the sensitivities; those of logits as the top of this file says."""
        if self.logits is None:
            return self.sensitivity
        allowed = self.weights.shape[2] * multiplier / (2 * math.log(2)) / self.sensitivity.double()
        raised = self.sensitivity * (allowed / solve_exponential(allowed)).to(self.sensitivity.dtype)
        return torch.where(self.logits[:, None], raised, self.sensitivity)

    @property
    def largest(self) -> Tensor:
        return self.weights.abs().amax(2)

    def bounds(self) -> tuple[float, float]:
        """log2 of the multipliers below which every row has its finest step, and above which all integers are zero."""
        unit = math.log(2) / 12 * self.stiffness.double() * self.largest.double().square()
        unit = unit[unit > 0]
        if not unit.numel():
            return 0.0, 0.0
        return math.log2(float(unit.min())) - 2 * math.log2(MAX_Q), math.log2(float(unit.max())) + 5.0

    def steps(self, multiplier: float) -> Tensor:
        """(N, rows, 1), float16 on the log grid: parbank.quant.solver derives them."""
        unit = math.sqrt(12 * multiplier / math.log(2))
        largest = self.largest.double()
        stiffness = self.sensitivity_at(multiplier).double() * self.factors.curvature.double().mean(1)[:, None]
        exponent = torch.round(-GRID / 2 * torch.log2(stiffness))
        finest = torch.ceil(GRID * torch.log2(largest / (MAX_Q * unit)))
        # A row whose step would be four times its largest weight is dropped. Rounding alone would give zeros, but the errors that
        # GPTQ moves from column to column add up beyond any weight, and would be stored in useless steps.
        worth = (largest > 0) & (exponent <= torch.ceil(GRID * torch.log2(4 * largest / unit)))
        scales = unit * torch.exp2(torch.maximum(exponent, finest) / GRID)
        scales = torch.where(worth, scales.clamp(_SMALLEST_HALF, _LARGEST_HALF), 0.0).half()
        if not scales.isfinite().all() or float(largest.max()) > MAX_Q * _LARGEST_HALF:
            raise ArtifactError(
                f"{', '.join(self.names)}: weights up to {float(largest.max()):.3g} are too large for float16 scales; the "
                "run diverged, pack an earlier checkpoint"
            )
        return scales[:, :, None]

    def _guess(self, multiplier: float, stride: int = 1) -> Tensor:
        scales = self.steps(multiplier).float()
        scaled = self.weights[:, :, ::stride] / torch.where(scales > 0, scales, torch.inf)
        return scaled.round_().clamp_(-MAX_Q, MAX_Q).to(torch.int8)

    def round(self, multiplier: float) -> Rounded:
        """GPTQ on the steps of this multiplier, rate-aware at the same price."""
        scales = self.steps(multiplier)
        thresholds = None
        if self.pruning:
            rate = measure(self._guess(multiplier))
            sensitivity = self.sensitivity_at(multiplier)
            thresholds = prices(rate, scales, sensitivity, self.pruning * multiplier, MAX_Q)
        values, error = round_bank(self.weights, scales, MAX_Q, self.factors, thresholds)
        return Rounded(values, scales, self._cost(error.double()), self._with_factors(measure(values).bits))

    def _cost(self, error: Tensor) -> Tensor:
        """(N,): nats a token, from the variance of each row's error: of logits as the top of this file says."""
        cost = 0.5 * error
        if self.logits is not None:
            cost = torch.where(self.logits[:, None], raise_exponential(cost), cost)
        return (self.sensitivity.double() * cost).sum(1)

    def predicted_bits(self, multiplier: float) -> float:
        """The rate by plain rounding of evenly spaced columns: close to that of `round`, at a fraction of the time."""
        stride = max(1, min(self.weights.numel() // _SAMPLE, self.weights.shape[2] // 16))
        bits = measure(self._guess(multiplier, stride)).bits * stride
        return float(self._with_factors(bits).sum())

    def _with_factors(self, bits: Tensor) -> Tensor:
        return bits if self.low_rank is None else bits + 16 * sum(factor[0].numel() for factor in self.low_rank)

    def contents(self, rounded: Rounded) -> Contents:
        """The stored contents of each tensor."""
        found: Contents = {}
        values, scales = rounded.values.cpu(), rounded.scales.cpu()
        for i, name in enumerate(self.names):
            integers = values[i].numpy()
            halves = torch.where(values[i].any(1, keepdim=True), scales[i], torch.zeros_like(scales[i])).numpy()
            low_rank = None
            if self.low_rank is not None:
                low_rank = self.low_rank[0][i].cpu().numpy(), self.low_rank[1][i].cpu().numpy()
            q = max(1, int(abs(integers.astype("int16")).max(initial=0)))
            found[name] = Quantised(integers, halves, q, self.rotation, low_rank)
        return found


def raise_exponential(cost: Tensor) -> Tensor:
    """What errors of logits cost, from what they cost by the second order; both over the sensitivity."""
    return torch.expm1(cost.clamp(max=MOST_EXPONENT))


def solve_exponential(a: Tensor) -> Tensor:
    """u with u e^u = a, for positive a: Lambert's W, by Newton's method on u + ln u = ln a."""
    log_a = torch.log(a)
    u = torch.log1p(a)
    for _ in range(6):
        u = u * (1 + log_a - torch.log(u)) / (1 + u)
    return u
