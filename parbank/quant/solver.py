"""Meets a byte cap at the least expected loss.

A tensor's loss increase D (nats a token) trades against its rate R (bits). At the best allocation under a cap every
row of every tensor trades at the same price lambda = -dD/dR. In a row of n weights with step s, rounding errors of
variance s^2 / 12 cost D = 1/2 g n c s^2 / 12, with g the row's sensitivity and c the mean curvature that GPTQ leaves
its columns (parbank.quant.gptq). An entropy coder takes R = n (h - log2 s) bits (Gish and Pierce 1968), with h
depending on the weights alone. dD/ds = -lambda dR/ds then gives

    s^2 = 12 lambda / (ln 2 * g * c).

So the free variable is the step, not a number of bits, and one lambda sets all steps. Rows that matter little get
steps wider than their weights and vanish. Steps lie on a grid of eight an octave, where a scale costs about five
bits. An error of at most 2^(1/16) costs nothing measurable, since D + lambda R is flat at its minimum. The grid moves
with lambda, so that sizes change without jumps. No step is so fine that integers leave -127..127.

lambda is found by bisection: first on predicted sizes (plain rounding, entropies), then on real files.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parbank.errors import ArtifactError
from parbank.quant.bank import Contents, QuantBank
from parbank.quant.calibration import Calibration
from parbank.quant.config import QuantConfig
from parbank.quant.integers import to_half

_GUIDED = 6  # builds by interpolation of sizes; after that plain halving, which is robust
_NARROW = 0.004  # octaves of lambda: closer together, rounding of the scales to float16 decides the size


@dataclass(frozen=True)
class Solved:
    """The file found, and its expected cost."""

    data: bytes
    contents: Contents
    multiplier: float
    expected_loss: float
    """Nats a token; in arbitrary units where nothing was calibrated."""
    builds: tuple[int, ...]
    """Sizes of the files built on the way."""
    uncalibrated: tuple[str, ...] = ()
    """Tensors of integers that calibration found no Hessian for: their errors were taken to matter alike."""


def solve(
    tensors: Mapping[str, Tensor],
    roles: Mapping[str, str],
    calibration: Calibration,
    config: QuantConfig,
    build: Callable[[Contents], bytes],
    max_bytes: int,
    *,
    say: Callable[[str], None] = lambda line: None,
) -> Solved:
    """The best file of at most `max_bytes`, for one cap. `Solver` serves several."""
    return Solver(tensors, roles, calibration, config, say=say).solve(build, max_bytes)


class CannotFit(ArtifactError):
    """The cap is below the smallest file of this model."""

    def __init__(self, smallest: int, cap: int) -> None:
        super().__init__(
            f"the model does not fit: the smallest artifact is {smallest:,} bytes, with next to every weight at zero, and the "
            f"cap leaves {cap:,}; raise --max-bytes, or train fewer or narrower layers"
        )
        self.smallest = smallest


class Solver:
    """Solves one model for any number of caps: Hessians are factorised once."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        roles: Mapping[str, str],
        calibration: Calibration,
        config: QuantConfig,
        *,
        device: torch.device | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.config, self.say = config, say
        self.floats: Contents = {
            name: to_half(tensor.detach().float().cpu().contiguous().numpy(), name=name)
            for name, tensor in tensors.items()
            if roles[name] == "other"
        }
        chosen = {name: tensor for name, tensor in sorted(tensors.items()) if roles[name] != "other"}
        device = device or next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        self.uncalibrated = tuple(name for name in chosen if name not in calibration.hessians)
        if not calibration.tokens:
            say("no training text: packing by the weights alone, as if all weights mattered equally")
        elif self.uncalibrated:
            say(describe_uncalibrated(self.uncalibrated))
        self.plain = _stack_banks(chosen, calibration, config, device)
        self.ways: list[list[QuantBank]] = []
        self._use(self.plain)

    def solve(self, build: Callable[[Contents], bytes], max_bytes: int) -> Solved:
        """The best file of at most `max_bytes`: within `config.tolerance` under it, unless all weights are at their finest."""
        failures = []
        for banks, choose in self._attempts():
            self._use(banks)
            try:
                return _MultiplierSearch(self, build, max_bytes).run(choose=choose)
            except CannotFit as failure:
                failures.append(failure)
        raise min(failures, key=lambda error: error.smallest) from None

    def _attempts(self) -> Iterator[tuple[list[QuantBank], bool]]:
        """Banks, and whether rotation and low rank are chosen for them. Factors and rotations take bytes that a very small file
        does not have, and so do rows of logits, none of which is ever dropped for its own sake."""
        yield self.plain, True
        if self.banks is not self.plain:
            yield self.plain, False
        if any(bank.logits is not None for bank in self.plain):
            yield [replace(bank, logits=None) for bank in self.plain], False

    def _use(self, banks: list[QuantBank]) -> None:
        self.banks = banks
        self.grid: dict[int, float] = {}

    def bounds(self) -> tuple[float, float]:
        found = [bank.bounds() for bank in self.banks]
        return min((low for low, _ in found), default=0.0), max((high for _, high in found), default=0.0)

    def predicted_bits(self, log_multiplier: float) -> float:
        """Interpolates on a grid of half octaves: sizes are nearly straight lines over log2 lambda."""
        below = math.floor(2 * log_multiplier)
        share = 2 * log_multiplier - below
        return (1 - share) * self._grid_bits(below) + (share * self._grid_bits(below + 1) if share else 0.0)

    def _grid_bits(self, index: int) -> float:
        if index not in self.grid:
            self.grid[index] = sum(bank.predicted_bits(2.0 ** (index / 2)) for bank in self.banks)
        return self.grid[index]

    def contents(self, multiplier: float) -> tuple[Contents, float]:
        """All tensors at one multiplier, with the expected loss increase."""
        found, loss = dict(self.floats), 0.0
        for bank in self.banks:
            rounded = bank.round(multiplier)
            found |= bank.contents(rounded)
            loss += float(rounded.distortion.sum())
        return found, loss

    def choose(self, multiplier: float) -> bool:
        """Rotation and low rank, tensor by tensor, where D + lambda R is smaller with them."""
        if not (self.config.rotation or self.config.low_rank):
            return False
        if not self.ways:
            self.ways = [self._ways(bank) for bank in self.plain]
        banks: list[QuantBank] = []
        for ways in self.ways:
            rounded = [way.round(multiplier) for way in ways]
            best = torch.stack([r.distortion + multiplier * r.bits for r in rounded]).argmin(0).tolist()
            picked = (way.pick([b == i for b in best]) for i, way in enumerate(ways))
            banks += [way for way in picked if way is not None]
        turned = sum(len(bank.names) for bank in banks if bank.rotation)
        corrected = sum(len(bank.names) for bank in banks if bank.low_rank)
        total = sum(len(bank.names) for bank in banks)
        self.say(f"of {total} tensors {turned} are rotated and {corrected} get low-rank factors")
        self._use(banks)
        return True

    def _ways(self, bank: QuantBank) -> list[QuantBank]:
        ways = [bank] + ([bank.lowered(self.config.low_rank)] if self.config.low_rank else [])
        config = self.config
        return ways + [way.rotated(config.damping, config.activation_order) for way in ways if config.rotation]


class _MultiplierSearch:
    """Searches the multiplier whose file just fits."""

    def __init__(self, solver: Solver, build: Callable[[Contents], bytes], cap: int) -> None:
        self.solver, self.build, self.cap = solver, build, cap
        self.fixed = len(build(dict(solver.floats)))
        self.ratio = 1.0  # real over predicted bytes of the integers
        self.sizes: list[int] = []
        self.over: tuple[float, int] | None = None  # (log2 lambda, size) of the last file over the cap,
        self.under: tuple[float, int] | None = None  # and of the last one under it
        self.best: Solved | None = None
        self.low, self.high = solver.bounds()

    def run(self, *, choose: bool = True) -> Solved:
        config = self.solver.config
        if choose and self.solver.choose(2.0 ** self._aim()):
            self.low, self.high = self.solver.bounds()
        for _ in range(config.max_builds):
            place = self._aim()
            size = self._try(place)
            if size <= self.cap and (size >= (1 - config.tolerance) * self.cap or place <= self.low):
                break
            if place >= self.high and size > self.cap:
                break
            if self.over and self.under and abs(self.under[0] - self.over[0]) < _NARROW:
                break
        # The last resort, promised by artifact.sizes.check_fits: at `high` every row is dropped.
        if self.best is None:
            self._try(self.high)
        if self.best is None:
            raise CannotFit(min(self.sizes), self.cap)
        return replace(self.best, builds=tuple(self.sizes))

    def _aim(self) -> float:
        """log2 lambda for a file in the tolerated band: by prediction until real files lie on both sides of the cap,
        then between them. After files that were too large the next aim is lower, so that a drifting prediction ends
        on the other side."""
        tolerance = self.solver.config.tolerance
        if self.over and self.under:
            target = (1 - 0.4 * tolerance) * self.cap
            share = (self.over[1] - target) / (self.over[1] - self.under[1])
            share = min(max(share, 0.1), 0.9) if len(self.sizes) < _GUIDED else 0.5
            return self.over[0] + share * (self.under[0] - self.over[0])
        misses = len(self.sizes) if self.over else 0
        target = (1 - (0.4 + 0.3 * misses) * tolerance) * self.cap
        place = self._predict(8 * (target - self.fixed) / self.ratio)
        if self.over and place <= self.over[0]:
            place = self.over[0] + 0.02 * 2.0**misses
        return min(place, self.high)

    def _predict(self, wanted: float) -> float:
        low, high = self.low, self.high
        if self.solver.predicted_bits(low) <= wanted:
            return low
        while high - low > 1e-4:
            middle = (low + high) / 2
            low, high = (middle, high) if self.solver.predicted_bits(middle) > wanted else (low, middle)
        return high

    def _try(self, place: float) -> int:
        contents, loss = self.solver.contents(2.0**place)
        data = self.build(contents)
        size = len(data)
        self.sizes.append(size)
        self.solver.say(f"{size:,} bytes of {self.cap:,}, expected to cost {loss:.5f} nats a token")
        predicted = self.solver.predicted_bits(place) / 8
        if size > self.fixed and predicted > 0:
            self.ratio = (size - self.fixed) / predicted
        if size > self.cap:
            self.over = (place, size)
        else:
            self.under = (place, size)
            if self.best is None or size > len(self.best.data):
                self.best = Solved(data, contents, 2.0**place, loss, (), self.solver.uncalibrated)
        return size


def describe_uncalibrated(names: tuple[str, ...]) -> str:
    """One line that names the uncalibrated tensors."""
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    tensors = "1 tensor, which is" if len(names) == 1 else f"{len(names)} tensors, which are"
    return f"calibration found no Hessian for {tensors} packed as if every error mattered alike: {shown}"


def _stack_banks(
    tensors: Mapping[str, Tensor], calibration: Calibration, config: QuantConfig, device: torch.device
) -> list[QuantBank]:
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ArtifactError(
                f"{name} holds values that are not finite; the run diverged, pack an earlier checkpoint"
            )
        measured = {"inputs": calibration.hessians.get(name), "gradients": calibration.sensitivity.get(name)}
        for kind, moments in measured.items():
            if moments is not None and not moments.isfinite().all():
                raise ArtifactError(
                    f"calibration found {kind} of {name} that are not finite; check that the loss is a finite number on every "
                    "batch, and calibrate in float32 or bfloat16, not in float16"
                )
        groups.setdefault(tuple(tensor.shape), []).append(name)
    usual = _usual_stiffness(calibration)
    banks = []
    for (rows, cols), names in groups.items():
        eye, ones = torch.eye(cols), torch.full((rows,), usual)
        weights = torch.stack([tensors[name].detach().float().to(device) for name in names])
        hessians = torch.stack([calibration.hessians.get(name, eye).to(device) for name in names])
        sensitivity = torch.stack([calibration.sensitivity.get(name, ones).to(device) for name in names])
        bank = QuantBank.stack(tuple(names), weights, hessians, sensitivity, config.damping, config.activation_order)
        logits = torch.tensor([name in calibration.logits for name in names], device=device)
        banks.append(replace(bank, pruning=config.pruning, logits=logits if logits.any() else None))
    return banks


def _usual_stiffness(calibration: Calibration) -> float:
    """The stiffness of an uncalibrated tensor, with H = 1: the mean over the others, or 1."""
    found = [
        float(calibration.sensitivity[name].mean() * hessian.diagonal().mean())
        for name, hessian in calibration.hessians.items()
    ]
    return sum(found) / len(found) if found and sum(found) > 0 else 1.0
