"""A study as data: a base config, arms, seeds, and what is measured. It lies in its folder as study.json.

An arm is stored as the settings it changes. So a folder can be worked on by any parbank that knows these settings, and
shows years later what was compared.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from parbank.config import from_dict, override, parse_json, parse_value, require, to_dict, walk
from parbank.errors import CheckpointError, ConfigError, reason
from parbank.files import write_json
from parbank.training.config import RunConfig, read_config

STUDY = "study.json"
BASE = "base"
Kind = Literal["training", "inside", "packing", "scoring", "kernels"]
TRAINED = ("training", "inside")  # kinds whose runs have a budget
STORED = ("packing", "scoring")  # kinds that start from checkpoints
_NAME = re.compile(r"[a-z0-9][a-z0-9_.+-]*", re.IGNORECASE)
_UNITS = {"s": ("minutes", 1 / 60), "min": ("minutes", 1), "steps": ("steps", 1), "tokens": ("tokens", 1)}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A change of the base."""

    name: str
    settings: tuple[str, ...] = ()
    """a.b=value, each."""
    claim: str = ""
    """The published claim, with its source and its number."""

    def __post_init__(self) -> None:
        require(
            _NAME.fullmatch(self.name) is not None,
            f"an arm's name has letters, digits and any of -_.+, got {self.name!r}; write --arm wide:model.width=576",
        )


@dataclass(frozen=True, order=True)
class Job:
    """One run: an arm with a seed."""

    arm: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.arm}.{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Added:
    """Seeds or arms that came later."""

    seeds: tuple[int, ...] = ()
    arms: tuple[str, ...] = ()
    results: int
    """Runs that had ended by then: above zero, their results may have been seen."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question: which of the arms is better or worse than the base?"""

    name: str
    kind: Kind = "training"
    """The kind of run, a name in parbank.study.kinds.KINDS."""
    base: RunConfig
    arms: tuple[Arm, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    packed: bool = False
    """Pack every model under its cap, and score the packed one."""
    metric: str = "chunked"
    """The scoring method of runs that train, a name in parbank.study.kinds.training.METRICS."""
    score_tokens: int = 0
    """Score on this many tokens of the held-out text at most; 0 takes all of it."""
    keep: bool = False
    """Keep a checkpoint of every run."""
    checkpoints: tuple[str, ...] = ()
    """Kinds that retrain nothing: the runs that they start from."""
    noise: float | None = None
    """Standard deviation of paired differences to assume before there are any; None looks for earlier runs."""
    difference: float | None = None
    """The smallest difference of interest; None takes the stated difference."""
    stated: float | None = None
    """The smallest difference that the seeds can show, as stated before they ran."""
    own_baselines: bool = False
    """Every arm also measures the code that it would replace, and the base is not run."""
    note: str = ""
    """What a reader of the table should know, too."""
    added: tuple[Added, ...] = ()

    def __post_init__(self) -> None:
        names = [BASE, *(arm.name for arm in self.arms)]
        require(
            BASE not in names[1:], f"{BASE!r} is the name of what the arms are compared with; call the arm otherwise"
        )
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, f"two arms are called {twice[0] if twice else ''!r}; give each a name of its own")
        require(len(set(self.seeds)) == len(self.seeds) > 0, f"a study needs seeds, each once; got {self.seeds}")
        require(
            bool(self.arms) or not self.own_baselines,
            f"a study of {self.kind} has no base to run alone; name arms, such as --arms one-qkv-product",
        )
        require(self.score_tokens >= 0, f"--score-tokens must be 0 (all) or positive, got {self.score_tokens}")
        for value, option in ((self.noise, "--noise"), (self.difference, "--difference")):
            require(value is None or value > 0, f"{option} must be positive, got {value}")

    def arm(self, name: str) -> Arm:
        return next(arm for arm in (Arm(name=BASE), *self.arms) if arm.name == name)

    def config(self, job: Job) -> RunConfig:
        """The config of one run. The seed, and with it the order of the data, is the same in every arm."""
        return replace(override(self.base, *self.arm(job.arm).settings), seed=job.seed)

    def jobs(self) -> list[Job]:
        """Every run, seed by seed, so that a study that is stopped has whole pairs. The arms take turns to be first: a
        machine that warms up favours none of them."""
        names = [*([] if self.own_baselines else [BASE]), *(arm.name for arm in self.arms)]
        turns = [n % len(names) for n in range(len(self.seeds))]
        return [Job(name, seed) for seed, k in zip(self.seeds, turns) for name in names[k:] + names[:k]]

    @property
    def is_timed(self) -> bool:
        """Whether a busy machine would change the values: then nothing may run beside a run."""
        return self.kind == "kernels" or (self.kind in TRAINED and self.seconds is not None)

    @property
    def seconds(self) -> float | None:
        """The budget of one run, where it is a time."""
        return None if self.base.budget.minutes is None else 60 * self.base.budget.minutes

    def with_more(self, *, seeds: int = 0, arms: Iterable[Arm] = (), results: int) -> "Study":
        """The study with this many more seeds, and these arms, after so many runs have ended."""
        first = max(self.seeds) + 1
        new, more = tuple(range(first, first + seeds)), tuple(arms)
        require(bool(new or more), "nothing to add: give --seeds N for N more seeds, or --arm NAME:a.b=v")
        added = Added(seeds=new, arms=tuple(arm.name for arm in more), results=results)
        return replace(self, seeds=self.seeds + new, arms=self.arms + more, added=(*self.added, added))


def read_arm(text: str, base: RunConfig | None = None) -> Arm:
    """`name:a.b=v,c.d=w`. Commas inside brackets belong to a value."""
    name, colon, rest = text.partition(":")
    if not colon or not rest:
        raise ConfigError(f"cannot read the arm {text!r}; write name:a.b=v,c.d=w, such as wide:model.width=576")
    arm = Arm(name=name, settings=tuple(re.split(r",(?=[a-z_][\w.]*=)", rest)))
    if base is not None:
        override(base, *arm.settings)
    return arm


def apply_arm(name: str, function: Callable[[RunConfig], RunConfig], base: RunConfig, claim: str) -> Arm:
    """A function Config -> Config as an arm: the settings it changes."""
    return Arm(name=name, settings=settings_between(base, function(base)), claim=claim)


def settings_between(base: RunConfig, changed: RunConfig) -> tuple[str, ...]:
    before = {path: value for path, value, _ in walk(base)}
    return tuple(f"{path}={json.dumps(value)}" for path, value, _ in walk(changed) if value != before[path])


def read_budget(text: str) -> list[str]:
    """`60s`, `2min`, `2000steps` or `5e6tokens` as settings of budget."""
    found = re.fullmatch(r"((?:\d[\d_]*\.?\d*|\.\d+)(?:e\d{1,2})?)\s*(s|min|steps|tokens)", text.strip())
    name, factor = _UNITS[found[2]] if found else ("", 1.0)
    number = float(found[1].replace("_", "")) * factor if found else 0.0
    if found is None or (name != "minutes" and not number.is_integer()):
        raise ConfigError(f"--budget {text!r} is not understood; write 60s, 2min, 2000steps or 5e6tokens")
    value = number if name == "minutes" else int(number)
    given = {"minutes": None, "steps": None, "tokens": None} | {name: value}
    return [f"budget.{key}={json.dumps(value)}" for key, value in given.items()]


def describe_budget(config: RunConfig) -> str:
    budget = config.budget
    if budget.minutes is not None:
        return f"{60 * budget.minutes:g} s"
    return f"{budget.steps:,} steps" if budget.steps is not None else f"{budget.tokens:,} tokens"


def write_study(folder: Path, study: Study) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / STUDY, {"format": 1, **to_dict(study)})


def read_study(folder: Path) -> Study:
    try:
        values = parse_json((folder / STUDY).read_text(encoding="utf-8"))
        if values.pop("format", None) != 1:
            raise ConfigError("it has another format; use the parbank that wrote it")
        return from_dict(Study, {**values, "base": read_config(values["base"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(
            f"{folder} holds no study that can be read ({reason(error)}); `parbank study run` makes one"
        ) from error


@dataclass(frozen=True, kw_only=True)
class StudyFile:
    """The contents of a TOML file. What it leaves out comes from the command line."""

    name: str
    recipe: str | None = None
    kind: Kind = "training"
    data: str | None = None
    budget: str | None = None
    seeds: int | None = None
    settings: tuple[str, ...] = ()
    """Changes of the recipe that every arm has."""
    packed: bool = False
    metric: str = "chunked"
    """chunked or streaming."""
    note: str = ""
    """Shown under the table."""
    arms: tuple[str, ...] = ()
    """Names of shipped arms."""
    arm: dict[str, Any] = field(default_factory=dict)
    """[arm.NAME]: settings = ["a.b=v"], claim = "..."."""


def read_file(path: Path) -> StudyFile:
    import tomllib

    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the study {path}: {error}; give a TOML file") from error
    own, made = values.pop("arm", {}), from_dict(StudyFile, {"name": path.stem, **values})
    arms = {name: from_dict(Arm, {"name": name, **_table(name, given)}) for name, given in own.items()}
    return replace(made, arm=arms)


def _table(name: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ConfigError(f'arm.{name} must be a table; write [arm.{name}] and settings = ["a.b=v"] under it')
    return given


def parse_assignment(text: str) -> tuple[str, Any]:
    """`a=v` as a name and a value, for settings that belong to no config."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise ConfigError(f"cannot read the setting {text!r}; write it as name=value")
    return name.strip(), parse_value(value)
