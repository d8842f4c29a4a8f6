"""`parbank.train`, and the `Run` that it returns."""

import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn, cast

from parbank import runtime
from parbank.api.model import Model, load, read_path
from parbank.api.words import in_python_words
from parbank.config import parse_json
from parbank.data.sources import read_data
from parbank.display import Display
from parbank.errors import CheckpointError, ConfigError, reason
from parbank.plan.choose import NAME, Plan
from parbank.plan.history import remember
from parbank.plan.plan import introduce, plan_run
from parbank.recipes import demo, find_recipe
from parbank.report.write import leave_run_page, write_run_page
from parbank.runtime import Runtime
from parbank.sizes import read_count, read_size
from parbank.training.config import RunConfig
from parbank.training.configure import configure_run
from parbank.training.run import Result, run

Settings = Mapping[str, object] | Iterable[str]


class Stopped(KeyboardInterrupt):
    """Ctrl-C ended the training of a run. Its checkpoint is saved; `train(out=..., resume=True)` continues from it."""


@in_python_words
def train(
    *,
    recipe: str | None = None,
    data: str | os.PathLike[str] | None = None,
    glob: str | Sequence[str] = (),
    field: str | None = None,
    skip_bad: bool = False,
    minutes: float | None = None,
    steps: int | str | None = None,
    tokens: int | str | None = None,
    max_bytes: int | str | None = None,
    out: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    device: str = "auto",
    threads: int | None = None,
    settings: Settings = (),
    resume: bool = False,
    quiet: bool = False,
    started: Callable[[Path], None] | None = None,
) -> "Run":
    """Trains a model, scores it, and packs it into one file: `parbank train`, with its options as keywords.

    recipe: demo, sprint, golf or nano; if not given, a config is planned for the minutes, the bytes, the text and this
    machine, as `parbank plan` prints it.
    data: a spec: stdlib, text:PATH, parquet:PATH, shards:DIR or fineweb. A `Path` means text:PATH.
    glob: a pattern, or several; of a folder, only files whose name matches are read.
    field: the .jsonl field or parquet column with the text.
    skip_bad: skip, and count, files and lines that cannot be used.
    minutes, steps, tokens: the budget, one of the three; without a recipe, steps and tokens take the demo's shape.
    max_bytes: the cap on the file, a number or a string such as "16MB".
    out: the run's folder; runs/RECIPE-TIME if not given. `resume` continues the run in `out`; given a recipe too, it starts
    the run if there is none.
    threads: CPU threads; the free cores if not given. With a budget in minutes the number then follows the load.
    settings: changes to the recipe, {"model.layers": 6} or ["model.layers=6"]; `parbank recipes NAME` prints all of them. A
    plan keeps them and chooses the rest.
    quiet: print nothing. Else a terminal gets a progress bar, a file or a pipe gets lines.
    started: called with the run's folder before the run begins, on the first rank.

    Ctrl-C saves a checkpoint after the step in hand and then raises KeyboardInterrupt; SIGTERM saves one and exits. Under
    torchrun every rank calls this function, and the first rank writes the files.

        >>> import parbank
        >>> run = parbank.train(recipe="nano", data="text:books", steps=4, out="runs/first", quiet=True)
        >>> run.summary["steps"], run.summary["artifact_bytes"] <= 200_000
        (4, True)
    """
    given = None if out is None else read_path(out)
    plans: list[Plan] = []  # of the first rank

    def read_options() -> RunConfig | None:
        text = _read_spec(data)
        if not isinstance(glob, str | Sequence):
            raise ConfigError(f"glob is a pattern such as '*.txt', or a list of patterns; got {glob!r}")
        if glob or field is not None or skip_bad:
            text = read_data(text, [glob] if isinstance(glob, str) else glob, field, skip_bad)
        changes = read_changes(
            data=text, minutes=minutes, steps=steps, tokens=tokens, max_bytes=max_bytes, seed=seed, settings=settings
        )
        resume_from = _resumed(given, recipe) if resume else None
        if resume_from is None and _is_planned(recipe, changes):
            plans.extend([_plan(changes, place, threads, quiet)] if place.is_main else [])
            return plans[0].best.config if plans else None
        return configure(recipe, changes, resume_from)

    with runtime.start(device) as place:
        configs = place.gather(place.together(read_options))
        config = configs[place.rank] or cast(RunConfig, configs[0])  # the first rank plans for all
        new = _new_folder(config.recipe, place)  # ranks that differ in --out must not differ in their collectives
        folder = given or new
        if started is not None and place.is_main:
            started(folder)
        try:
            result = run(config, place, folder, resume=resume, quiet=quiet, threads=threads, write_page=write_run_page)
        except BaseException:
            if place.is_main:
                leave_run_page(folder)
            raise
    if result.summary is None:
        if place.is_main:
            leave_run_page(folder)
        _exit_as_stopped(result)
    for plan in plans:
        remember(plan, result.summary)
    return Run(folder=folder, summary=result.summary, device=str(place.device))


def _read_spec(data: str | os.PathLike[str] | None) -> str | None:
    if isinstance(data, str | None):
        return data
    if not isinstance(data, os.PathLike):
        raise ConfigError(f"data is a spec such as text:books, or a Path; got a {type(data).__name__}")
    if "," in (path := os.fspath(data)):
        raise ConfigError(f"{path} has a comma, which separates paths in a spec; rename it, or give its folder")
    return f"text:{path}"


def read_changes(
    *,
    data: str | None = None,
    minutes: float | None = None,
    steps: int | str | None = None,
    tokens: int | str | None = None,
    max_bytes: int | str | None = None,
    seed: int | None = None,
    settings: Settings = (),
) -> list[str]:
    """Options as settings, a.b=value each."""
    steps, tokens = (read_count(count) if isinstance(count, str) else count for count in (steps, tokens))
    cap = read_size(max_bytes) if isinstance(max_bytes, str) else max_bytes
    given = {"data": data, "seed": seed, "budget.max_bytes": cap}
    changes = _budget_changes(minutes, steps, tokens)
    changes += read_settings({key: value for key, value in given.items() if value is not None})
    more = read_settings(settings)
    _check_said_once(changes, more)
    return changes + more


def _check_said_once(options: Sequence[str], settings: Sequence[str]) -> None:
    """A setting beside the option for it would win without a word."""
    budget = ("budget.minutes", "budget.steps", "budget.tokens")
    said = {name.strip() for name, _, value in (option.partition("=") for option in options) if value != "null"}
    for setting in settings:
        name = setting.partition("=")[0].strip()
        if name == "recipe":
            raise ConfigError(f"--set {setting} would only rename the recipe; choose one by --recipe")
        if same := said & set(budget if name in budget else (name,)):
            option = same.pop().rpartition(".")[2].replace("_", "-")
            raise ConfigError(f"--set {setting} and --{option} set the same thing; give one of them")


def configure(recipe: str | None, changes: Sequence[str] = (), resume_from: Path | None = None) -> RunConfig:
    """The config of a run: that of a recipe or of an earlier run, with the given changes. Paths in it are absolute."""
    if resume_from is None:
        return configure_run(find_recipe("demo" if recipe is None else recipe), *changes)
    config = configure_run(resume_from, *changes)
    if recipe not in (None, config.recipe):
        raise ConfigError(
            f"the run in {resume_from} has the recipe {config.recipe}, not {recipe}; choose another --out"
        )
    return config


def _is_planned(recipe: str | None, changes: Sequence[str]) -> bool:
    """Without a recipe a run is planned. Only a clock can be planned for: a budget in steps or tokens takes the demo's
    shape."""
    if recipe is not None:
        return recipe == NAME
    budget = configure_run(demo, *(change for change in changes if change.startswith("budget."))).budget
    return budget.minutes is not None


def _plan(changes: Sequence[str], place: Runtime, threads: int | None, quiet: bool) -> Plan:
    display = Display(enabled=place.is_main and not quiet)
    plan = plan_run(changes, place, threads=threads, say=display.say)
    display.say(introduce(plan))
    return plan


@dataclass(frozen=True, kw_only=True, repr=False)
class Run:
    """A run that has ended: its folder, its summary and its model.

    >>> run = parbank.Run.open("runs/first")
    >>> run
    Run('runs/first', steps=4, val_bpb=...)
    >>> run.model.score("The sea was calm.").bytes
    17
    """

    folder: Path
    """The run's folder: model.pbk, report.html, summary.json, config.json, metrics.jsonl and checkpoint/."""
    summary: dict[str, Any]
    """The contents of summary.json: val_bpb, artifact_bytes, steps, tokens_per_second and more."""
    device: str = "auto"
    """The device of `model`."""

    @classmethod
    def open(cls, folder: str | os.PathLike[str], device: str = "auto") -> "Run":
        """An earlier run, from its folder."""
        path = read_path(folder)
        try:
            summary = parse_json((path / "summary.json").read_text(encoding="utf-8"))
            if not isinstance(summary, dict):
                raise ValueError("summary.json is not a table of results")
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} holds no run that has ended ({reason(error)}); resume the run by train(out=..., resume=True), or open its "
                "newest checkpoint by load(folder)"
            ) from error
        return cls(folder=path, summary=summary, device=device)

    @cached_property
    def model(self) -> Model:
        """The packed model, whose score is summary["val_bpb"]. Read from the folder on first use."""
        return load(self.folder, self.device)

    def __repr__(self) -> str:
        bpb = self.summary.get("val_bpb")
        score = f"{bpb:.4f}" if isinstance(bpb, float) else bpb
        return f"Run({str(self.folder)!r}, steps={self.summary.get('steps')}, val_bpb={score})"


def read_settings(settings: Settings) -> list[str]:
    if isinstance(settings, str):
        raise ConfigError(
            f"settings are a table or a list, such as {{'model.layers': 6}} or ['model.layers=6'], got {settings!r}"
        )
    if isinstance(settings, Mapping):
        return [f"{key}={_to_json(key, value)}" for key, value in settings.items()]
    listed = list(settings) if isinstance(settings, Iterable) else [settings]
    if not all(isinstance(setting, str) for setting in listed):
        raise ConfigError(f"settings are a table, or a list of strings such as 'model.layers=6'; got {settings!r}")
    return listed


def _to_json(key: str, value: object) -> str:
    try:
        return json.dumps(value, default=partial(_plain, key), allow_nan=False)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{key} must be a number that is finite, got {value!r}") from error


def _plain(key: str, value: object) -> object:
    """The JSON form of a number or an array of NumPy or PyTorch, or of a path."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ConfigError(f"{key} must be a number, a string, a bool, None or a list of them; got a {type(value).__name__}")


def _budget_changes(minutes: float | None, steps: int | str | None, tokens: int | str | None) -> list[str]:
    """The one budget that was given replaces that of the recipe."""
    budget = {"minutes": minutes, "steps": steps, "tokens": tokens}
    given = [f"--{name}" for name, value in budget.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"give one of --minutes, --steps and --tokens, not {len(given)}: {', '.join(given)}")
    return read_settings({f"budget.{name}": value for name, value in budget.items()}) if given else []


def _resumed(folder: Path | None, recipe: str | None) -> Path | None:
    """The folder of the run to continue; None if there is no run yet and a recipe says how to start it, so that one command
    can start a run and restart it."""
    if folder is None:
        raise ConfigError("--resume continues an earlier run: give its folder by --out")
    return folder if recipe is None or (folder / "config.json").exists() else None


def _new_folder(recipe: str, place: Runtime) -> Path:
    """runs/RECIPE-TIME-XXXXXXXX, the same on every rank. The random end tells runs of the same second apart."""
    stamp, mark = place.agree([time.time(), float(secrets.randbits(32))] if place.is_main else [0.0, 0.0])
    return Path("runs") / f"{recipe}-{datetime.fromtimestamp(stamp):%Y%m%d-%H%M%S}-{int(mark):08x}"


def _exit_as_stopped(result: Result) -> NoReturn:
    """Exits as the signal that stopped the run requires."""
    if result.stop_signal == signal.SIGINT:
        raise Stopped("training was stopped; its checkpoint is saved, and resume=True continues from it")
    raise SystemExit(128 + result.stop_signal)
