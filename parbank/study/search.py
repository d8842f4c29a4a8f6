"""Search over settings: Optuna proposes trials (extra `search`), and rungs of longer schedules select among them.

A trial is an arm. A rung is a study of its own in the search's folder, with a budget, and every run of it is a complete
schedule: a run that is cut off early has not lowered its learning rate, and its loss ranks nothing. The first rung runs
all trials with one seed. Each later rung runs the better half with a longer budget. The last rung has several seeds and
ends in a table with verdicts against the base.

Shorter schedules may rank trials differently. So every rung after the first gives its rank correlation with the rung
before, over the trials that both have.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parbank.config import override, parse_value, require
from parbank.errors import ConfigError
from parbank.files import write_json
from parbank.study.engine import add_to_study, run_study
from parbank.study.report import Report, correlate
from parbank.study.study import STUDY, Arm, Study, describe_budget, read_budget

SEARCH = "search.json"
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Range:
    """The values that a setting may take."""

    name: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    choices: tuple[Any, ...] = ()

    def suggest(self, trial: Any) -> Any:
        if self.choices:
            index = trial.suggest_categorical(self.name, list(range(len(self.choices))))
            return self.choices[index]
        if self.whole:
            return trial.suggest_int(self.name, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, log=self.log)


def read_range(text: str) -> Range:
    """`optim.matrix_lr=0.01..0.05:log`, `model.layers=8..12` (whole numbers) or `batch.order=[shuffled,contiguous]`."""
    name, sign, rest = text.partition("=")
    number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
    if found := re.fullmatch(rf"({number})\.\.({number})(:log)?", rest.strip()):
        low, high = float(found[1]), float(found[2])
        require(low < high, f"--space {text}: {found[1]} must be less than {found[2]}")
        require(not found[3] or low > 0, f"--space {text}: a logarithmic range starts above zero")
        whole = all(part.lstrip("-").isdigit() for part in found.groups()[:2])
        return Range(name=name, low=low, high=high, log=bool(found[3]), whole=whole)
    if sign and (found := re.fullmatch(r"\[(.+)\]", rest.strip())):
        return Range(name=name, choices=tuple(parse_value(part.strip()) for part in found[1].split(",")))
    raise ConfigError(f"--space {text!r} is not understood; write a.b=LOW..HIGH, a.b=LOW..HIGH:log or a.b=[X,Y]")


def search(
    study: Study,
    folder: Path,
    *,
    space: Sequence[Range],
    trials: int,
    rungs: Sequence[str],
    seeds: int = 4,
    device: str = "auto",
    quiet: bool = False,
    say: Say = print,
) -> Report:
    """Runs a search, or continues it, and returns the report of the last rung.

    study: the base, without arms. rungs: budgets, each longer than the one before.
    """
    require(trials >= 2, f"a search needs at least 2 trials, got {trials}")
    require(len(rungs) >= 1, "a search needs at least one rung, such as --rungs 30s,120s")
    for setting in space:
        override(study.base, f"{setting.name}={json.dumps(setting.choices[0] if setting.choices else setting.low)}")
    _check_same(folder, study, space, trials, rungs, seeds)
    last = len(rungs) - 1
    kept: dict[Any, Any] = {}
    say = (lambda line: None) if quiet else say
    report = _explore(study, folder, space, trials, rungs[0], seeds if not last else 1, device, say, kept)
    say(describe_rung(report, 0))
    for number in range(1, len(rungs)):
        before = report
        chosen = _better_half(before)
        rung = replace(
            _on_rung(study, rungs[number], seeds if number == last else 1),
            arms=tuple(arm for arm in before.study.arms if arm.name in chosen),
        )
        report = run_study(rung, _rung_folder(folder, number), device=device, quiet=quiet, kept=kept)
        say(describe_rung(report, number))
        say(f"rungs {number - 1} and {number}: {correlate(before, report)}")
    return report


def describe_rung(report: Report, number: int) -> str:
    """The trials of a rung, the best first."""
    ranked = sorted(report.comparisons.items(), key=lambda item: item[1].mean)
    shown = "; ".join(
        f"{name} {found.mean:+.4f} ({', '.join(report.study.arm(name).settings)})" for name, found in ranked[:3]
    )
    return (
        f"rung {number}, {describe_budget(report.study.base)}: {len(ranked)} trials against the base; the best: {shown}"
    )


def _explore(
    study: Study,
    folder: Path,
    space: Sequence[Range],
    trials: int,
    budget: str,
    seeds: int,
    device: str,
    say: Say,
    kept: dict[Any, Any],
) -> Report:
    """The first rung: trial by trial, so that the sampler learns from each."""
    optuna = _import_optuna()
    place = _rung_folder(folder, 0)
    rung = _on_rung(study, budget, seeds)
    report = run_study(None if (place / STUDY).exists() else rung, place, device=device, quiet=True, kept=kept)
    sampler = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=study.base.seed))
    known = json.loads((folder / SEARCH).read_bytes())["trials"]
    for number in range(trials):
        name, trial = f"trial-{number:03d}", None
        if name not in known:
            trial = sampler.ask()
            values = {setting.name: setting.suggest(trial) for setting in space}
            known[name] = {"params": trial.params, "settings": [f"{k}={json.dumps(v)}" for k, v in values.items()]}
            write_json(folder / SEARCH, json.loads((folder / SEARCH).read_bytes()) | {"trials": known})
        if name not in {arm.name for arm in report.study.arms}:
            arm = Arm(name=name, settings=tuple(known[name]["settings"]))
            # a trial is no second look at the others
            add_to_study(place, replace(report.study, arms=(*report.study.arms, arm)))
        report = run_study(None, place, device=device, quiet=True, kept=kept)
        found = report.comparisons[name]
        say(f"{name}: {found.mean:+.4f} against the base ({', '.join(known[name]['settings'])})")
        value = found.mean if found.pairs else None
        if trial is not None:
            sampler.tell(trial, value, state=None if found.pairs else optuna.trial.TrialState.FAIL)
        elif value is not None:  # of an earlier call
            kinds = {setting.name: _distribution(optuna, setting) for setting in space}
            params = known[name]["params"]
            sampler.add_trial(optuna.trial.create_trial(params=params, distributions=kinds, value=value))
    return report


def _distribution(optuna: Any, setting: Range) -> Any:
    kinds = optuna.distributions
    if setting.choices:
        return kinds.CategoricalDistribution(list(range(len(setting.choices))))
    if setting.whole:
        return kinds.IntDistribution(int(setting.low), int(setting.high), log=setting.log)
    return kinds.FloatDistribution(setting.low, setting.high, log=setting.log)


def _better_half(report: Report) -> set[str]:
    """The better half of the trials that have a score, at least one."""
    scored = {name: found.mean for name, found in report.comparisons.items() if found.pairs}
    require(bool(scored), f"no trial of {report.study.name} has ended well; `parbank study show` says why")
    return set(sorted(scored, key=lambda name: scored[name])[: max(1, math.ceil(len(scored) / 2))])


def _on_rung(study: Study, budget: str, seeds: int) -> Study:
    base = override(study.base, *read_budget(budget))
    return replace(study, base=base, seeds=tuple(range(base.seed, base.seed + seeds)))


def _rung_folder(folder: Path, number: int) -> Path:
    return folder / f"rung-{number}"


def _check_same(
    folder: Path, study: Study, space: Sequence[Range], trials: int, rungs: Sequence[str], seeds: int
) -> None:
    """A folder belongs to one search. More trials may be asked for later."""
    asked = {"space": [repr(setting) for setting in space], "rungs": list(rungs), "seeds": seeds}
    path = folder / SEARCH
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, asked | {"trials": {}})
        return
    there = json.loads(path.read_bytes())
    different = [name for name, value in asked.items() if there.get(name) != value]
    if different:
        raise ConfigError(f"{folder} holds a search with another {' and '.join(different)}; choose another --out")
    if trials < len(there["trials"]):
        raise ConfigError(f"{folder} has {len(there['trials'])} trials already; ask for as many, or more")


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError("a search needs Optuna; install it by pip install 'parbank[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
