"""Choosing a learning rate inside one run's clock, against training the default for the whole clock.

Two strategies, of parameter-golf's list of ideas that nobody had built:

- `halving`: candidates train complete short schedules, one after the other on one GPU; the better half goes on to twice
  the length, until one is left. It trains from scratch for the rest of the clock.
- `bandit`: one run, in which a bandit chooses a factor of the learning rates anew every few steps, by how much the loss
  fell with it (UCB1, Auer et al. 2002, on means that forget).

A candidate is a factor of all learning rates. Warm-up before each part is outside the clock, as in any run.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from parbank.config import choose, from_dict, override, require
from parbank.display import Display
from parbank.errors import TrainingError
from parbank.runtime import check_seed
from parbank.study.kinds.training import METRICS, Training
from parbank.study.study import Arm, Job, Study, parse_assignment
from parbank.training.checks import check_size
from parbank.training.config import BudgetConfig, RunConfig
from parbank.training.laps import Laps
from parbank.training.metrics import finite
from parbank.training.telemetry import Reading
from parbank.training.trainer import Trainer

RATES = ("matrix_lr", "embedding_lr", "head_lr", "scalar_lr")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """The settings of an arm."""

    strategy: Literal["plain", "halving", "bandit"] = "plain"
    rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Factors of all learning rates."""
    explore: float = 0.5
    """halving: the share of the clock that candidates get."""
    window: int = 20
    """bandit: steps between two choices."""

    def __post_init__(self) -> None:
        require(bool(self.rates) and min(self.rates) > 0, f"rates must be positive factors, got {list(self.rates)}")
        require(0 < self.explore < 1, f"explore is a share of the clock between 0 and 1, got {self.explore}")
        require(self.window >= 1, f"window must be at least 1 step, got {self.window}")


class Inside(Training):
    """Runs the base plainly and every arm by its strategy."""

    name = "inside"

    @classmethod
    def check(cls, study: Study) -> None:
        choose(METRICS, study.metric, "--metric")
        for seed in study.seeds:
            check_seed(seed)
        for arm in study.arms:
            read_strategy(arm)
        require(study.base.budget.tokens is None, "this study divides a budget in time or steps, not in tokens")
        check_size(study.base, Display(enabled=False))

    def measure(self, study: Study, job: Job) -> dict[str, Any]:
        chosen, config = read_strategy(study.arm(job.arm)), replace(study.base, seed=job.seed)
        if chosen.strategy == "halving":
            return self._halve(study, job, config, chosen)
        if chosen.strategy == "bandit":
            bandit = Bandit(chosen.rates, chosen.window)
            return self.run(study, job, config, bandit.train) | {"choices": bandit.choices}
        return self.run(study, job, config)

    def _halve(self, study: Study, job: Job, config: RunConfig, chosen: Strategy) -> dict[str, Any]:
        """Rounds of equal length: each gives its candidates the same share of the clock."""
        left, rounds, losses = list(chosen.rates), max(1, math.ceil(math.log2(len(chosen.rates)))), []
        began, tried = time.perf_counter(), {"seconds": 0.0, "steps": 0, "recompilations": 0}
        while len(left) > 1:
            share = chosen.explore / rounds / len(left)
            found = {rate: self._try(config, rate, share, job) for rate in left}
            losses.append(finite({str(rate): loss for rate, (loss, _) in found.items()}))
            tried = {name: value + sum(cost[name] for _, cost in found.values()) for name, value in tried.items()}
            left = sorted(left, key=lambda rate: found[rate][0])[: math.ceil(len(left) / 2)]
        spent = chosen.explore if len(chosen.rates) > 1 else 0.0
        result = self.run(study, job, with_budget(with_rate(config, left[0]), 1 - spent))
        whole = {name: result[name] + tried[name] for name in ("seconds", "recompilations")}
        whole |= {"tried": tried, "wall_seconds": time.perf_counter() - began}
        return result | whole | {"rate": left[0], "losses": losses}

    def _try(self, config: RunConfig, rate: float, share: float, job: Job) -> tuple[float, dict[str, float]]:
        """The loss at the end of a complete short schedule, infinite if it diverged; and its cost."""
        readings: list[float] = []
        trainer = self.make_trainer(with_budget(with_rate(config, rate), share), job, Laps())
        try:
            trainer.warm_up()
            try:
                trainer.train(lambda reading: readings.append(reading.loss))
                loss = fmean(readings[-max(3, len(readings) // 10) :])
            except TrainingError:  # too many steps were skipped
                loss = math.inf
            cost = {"seconds": trainer.clock.seconds(), "steps": trainer.step, "recompilations": trainer.recompilations}
            return loss if math.isfinite(loss) else math.inf, cost
        finally:
            trainer.close()
            del trainer
            self.free()


class Bandit:
    """Chooses a factor every `window` steps: the one with the best forgetting mean of the loss's fall, plus a bonus for
    factors that were tried seldom."""

    FORGET = 0.9  # the weight of the past at each choice: a factor that paid early need not pay late
    BONUS = 1.0

    def __init__(self, rates: Sequence[float], window: int) -> None:
        self._rates, self._window = list(rates), window
        self._weights, self._sums = [0.0] * len(rates), [0.0] * len(rates)
        self._losses: list[float] = []
        self._before: float | None = None
        self._current = 0
        self.choices: list[float] = []

    def train(self, trainer: Trainer, report: Callable[[Reading], None]) -> None:
        peaks = [group["peak_lr"] for group in trainer.optimizer.param_groups]

        def apply() -> None:
            factor = self._rates[self._current]
            self.choices.append(factor)
            for group, peak in zip(trainer.optimizer.param_groups, peaks):
                group["peak_lr"] = peak * factor

        def observe(reading: Reading) -> None:
            report(reading)
            self._losses.append(reading.loss)
            if len(self._losses) == self._window:
                self.learn(fmean(self._losses))
                self._losses.clear()
                apply()

        self._current = min(range(len(self._rates)), key=lambda n: abs(math.log(self._rates[n])))
        apply()
        trainer.train(observe)

    def learn(self, loss: float) -> None:
        """Takes the mean loss of a window, and chooses for the next one."""
        if self._before is not None and math.isfinite(loss):
            for n in range(len(self._rates)):
                self._weights[n] *= self.FORGET
                self._sums[n] *= self.FORGET
            self._weights[self._current] += 1
            self._sums[self._current] += self._before - loss
        self._before = loss if math.isfinite(loss) else self._before
        if self._before is None:
            return  # no window had a finite loss yet: the factor stays
        untried = [n for n, weight in enumerate(self._weights) if weight == 0]
        self._current = untried[0] if untried else self._best()

    def _best(self) -> int:
        means = [total / weight for total, weight in zip(self._sums, self._weights)]
        scale = (max(means) - min(means)) or 1e-9
        trials = sum(self._weights)
        bonus = [scale * self.BONUS * math.sqrt(math.log(1 + trials) / weight) for weight in self._weights]
        return max(range(len(means)), key=lambda n: means[n] + bonus[n])


def read_strategy(arm: Arm) -> Strategy:
    return from_dict(Strategy, dict(map(parse_assignment, arm.settings)), path=arm.name)


def with_rate(config: RunConfig, factor: float) -> RunConfig:
    return override(config, *(f"optim.{name}={getattr(config.optim, name) * factor}" for name in RATES))


def with_budget(config: RunConfig, share: float) -> RunConfig:
    """The config with a share of its clock or its steps, at least one step."""
    budget = config.budget
    if budget.minutes is not None:
        most = None if budget.most_steps is None else max(1, round(budget.most_steps * share))
        return replace(config, budget=replace(budget, minutes=budget.minutes * share, most_steps=most))
    steps = max(1, round((budget.steps or 0) * share))
    return replace(config, budget=BudgetConfig(steps=steps, max_bytes=budget.max_bytes, count_code=budget.count_code))
