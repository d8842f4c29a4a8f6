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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parbank.config import override, parse_json, parse_value, require, to_dict
from parbank.data.progress import Say
from parbank.errors import ConfigError
from parbank.files import write_json
from parbank.study.crew import count_gpus
from parbank.study.engine import add_to_study, check_workers, interrupt, keep_working, open_study, run_study
from parbank.study.kinds import KINDS
from parbank.study.queue import Queue
from parbank.study.report import Report, correlate
from parbank.study.study import STUDY, Arm, Study, describe_budget, read_budget, read_study
from parbank.training.signals import watch_signals

SEARCH = "search.json"


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
    workers: int | None = None,
    device: str = "auto",
    quiet: bool = False,
    say: Say = print,
) -> Report:
    """Runs a search, or continues it, and returns the report of the last rung.

    study: the base, without arms. rungs: budgets, each longer than the one before. workers: as in `run_study`; trials of the
    first rung run one after the other, because the sampler learns from each.
    """
    optuna = _import_optuna()
    require(trials >= 2, f"a search needs at least 2 trials, got {trials}")
    check_rungs(study, rungs)
    check_space(study, space)
    last = len(rungs) - 1
    workers = count_gpus(device) if workers is None else workers
    check_workers(_on_rung(study, rungs[0], 1), workers, device)
    _check_same(folder, study, space, trials, rungs, seeds)
    say = (lambda line: None) if quiet else say
    with watch_signals(interrupt):
        first = _on_rung(study, rungs[0], 1 if last else seeds)
        report = _explore(optuna, first, folder, space, trials, workers, device, say)
        say(describe_rung(report, 0))
        for number in range(1, len(rungs)):
            before = report
            chosen = _better_half(before)
            rung = replace(
                _on_rung(study, rungs[number], seeds if number == last else 1),
                arms=tuple(arm for arm in before.study.arms if arm.name in chosen),
            )
            place = _rung_folder(folder, number)
            _add_trials(rung, place)
            report = run_study(rung, place, workers=workers, device=device, quiet=quiet)
            say(describe_rung(report, number))
            say(f"rungs {number - 1} and {number}: {correlate(before, report)}")
    return report


def check_rungs(study: Study, rungs: Sequence[str]) -> None:
    """Each budget must be of the same kind and longer than the one before."""
    require(len(rungs) >= 1, "a search needs at least one rung, such as --rungs 30s,120s")
    budgets = [override(study.base, *read_budget(rung)).budget for rung in rungs]
    sizes = [(b.minutes is not None, b.steps is not None, b.minutes or b.steps or b.tokens or 0) for b in budgets]
    for rung, longer, a, b in zip(rungs, rungs[1:], sizes, sizes[1:]):
        require(
            a[:2] == b[:2] and a[2] < b[2],
            f"--rungs {','.join(rungs)}: {longer} is not longer than {rung}; give budgets of one unit that rise",
        )


def check_space(study: Study, space: Sequence[Range]) -> None:
    """Both ends of a range and every choice must be values that the setting may have."""
    for setting in space:
        for value in setting.choices or (_as_value(setting, setting.low), _as_value(setting, setting.high)):
            override(study.base, f"{setting.name}={json.dumps(value)}")


def _as_value(setting: Range, value: float) -> float | int:
    return int(value) if setting.whole else value


def describe_rung(report: Report, number: int) -> str:
    """The trials of a rung, the best first."""
    scored = ((name, found) for name, found in report.comparisons.items() if found.pairs)
    ranked = sorted(scored, key=lambda item: item[1].mean)
    shown = "; ".join(
        f"{name} {found.mean:+.4f} ({', '.join(report.study.arm(name).settings)})" for name, found in ranked[:3]
    )
    return (
        f"rung {number}, {describe_budget(report.study.base)}: {len(report.comparisons)} trials against the base; the best: "
        f"{shown or 'none has ended well'}"
    )


def _explore(
    optuna: Any,
    rung: Study,
    folder: Path,
    space: Sequence[Range],
    trials: int,
    workers: int,
    device: str,
    say: Say,
) -> Report:
    """The first rung: trial by trial, so that the sampler learns from each."""
    place = _rung_folder(folder, 0)
    if not (place / STUDY).exists():
        open_study(place, rung)
    # A continued search draws other numbers: with the same ones it would propose its first trials again.
    seed = rung.base.seed + len(_read_search(folder)["trials"])
    sampler = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    kinds = {setting.name: _distribution(optuna, setting) for setting in space}
    with keep_working(place, min(workers, len(rung.seeds)), device) as run:
        report = run()
        for number in range(trials):
            name, trial = f"trial-{number:03d}", None
            known = _read_search(folder)["trials"]
            if name not in known:
                trial = sampler.ask()
                values = {setting.name: setting.suggest(trial) for setting in space}
                settings = [f"{k}={json.dumps(v)}" for k, v in values.items()]
                known[name] = {
                    "params": trial.params,
                    "settings": settings,
                    "refused": _refusal(report, name, settings),
                }
                write_json(folder / SEARCH, _read_search(folder) | {"trials": known})
            settings, refused = known[name]["settings"], known[name].get("refused", "")
            if not refused:
                if name not in {arm.name for arm in report.study.arms}:
                    add_to_study(place, _with_trial(report.study, name, settings))
                report = run()
            found = report.comparisons.get(name)
            value = found.mean if found is not None and found.pairs else None
            said = refused or ("failed" if value is None else f"{value:+.4f} against the base")
            say(f"{name}: {said} ({', '.join(settings)})")
            if trial is not None:
                sampler.tell(trial, value, state=optuna.trial.TrialState.FAIL if value is None else None)
            elif value is not None:  # of an earlier call
                params = known[name]["params"]
                sampler.add_trial(optuna.trial.create_trial(params=params, distributions=kinds, value=value))
    return report


def _add_trials(rung: Study, place: Path) -> None:
    """Adds trials to a later rung that an earlier call, with fewer trials in all, has made without them."""
    if not (place / STUDY).exists():
        return
    there = read_study(place)
    if new := [arm for arm in rung.arms if arm not in there.arms]:
        add_to_study(place, there.with_more(arms=new, results=len(Queue(place).results(there.jobs()))))


def _with_trial(study: Study, name: str, settings: Sequence[str]) -> Study:
    """The study with one more arm. A trial is no second look at the others: it is not noted as added."""
    return replace(study, arms=(*study.arms, Arm(name=name, settings=tuple(settings))))


def _refusal(report: Report, name: str, settings: Sequence[str]) -> str:
    """Why a trial cannot be run; nothing where it can. Each value may be allowed, and the values together may not."""
    try:
        KINDS[report.study.kind].check(_with_trial(report.study, name, settings))
    except ConfigError as error:
        return f"not run: {error}"
    return ""


def _read_search(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = parse_json((folder / SEARCH).read_bytes())
    return found


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
    base = to_dict(study.base) | {"score_tokens": study.score_tokens}
    asked = {"space": [repr(setting) for setting in space], "rungs": list(rungs), "seeds": seeds, "base": base}
    asked = json.loads(json.dumps(asked))  # as it will be read: with lists
    path = folder / SEARCH
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, asked | {"trials": {}})
        return
    there = _read_search(folder)
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
