"""A plan for this machine: reads the text, looks at the machine, and chooses."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from parbank.config import override, parse_value, require
from parbank.data.progress import Say, say_nothing
from parbank.data.sources import absolute_spec
from parbank.display import Display
from parbank.errors import ConfigError
from parbank.plan.apart import compile_probe
from parbank.plan.candidates import Request
from parbank.plan.choose import NAME, Plan, make_plan
from parbank.plan.history import recall
from parbank.plan.laws import load_laws
from parbank.plan.notes import find_notes
from parbank.plan.probe import look_at
from parbank.plan.texts import read_text
from parbank.recipes import demo
from parbank.runtime import Runtime
from parbank.threads import use_threads
from parbank.training.checks import check_size
from parbank.training.compiled import use_compile_cache
from parbank.training.inductor import LEAST_MINUTES, find_compiler, wants_inductor


def plan_run(settings: Sequence[str], place: Runtime, *, threads: int | None = None, say: Say = say_nothing) -> Plan:
    """The plan for settings such as data=text:books, budget.minutes=2 and model.layers=6. What they leave open is planned:
    the data, the minutes and the bytes are those of `demo` if they are not given."""
    given = replace(demo(), recipe=NAME, batch=replace(demo().batch, stages=()))  # settings need not fit its stages
    _check(settings)
    asked = override(given, *(setting for setting in settings if not setting.strip().startswith("model.")))
    minutes = asked.budget.minutes
    if minutes is None:
        raise ConfigError("a plan needs a clock: give --minutes, or --recipe with --steps or --tokens")
    require(
        asked.budget.most_steps is None,
        f"a plan chooses whether its clock ends early, got budget.most_steps={asked.budget.most_steps}: leave it out, or give "
        "--recipe",
    )
    spec = absolute_spec(asked.data)
    fixed = (*settings, f"data={json.dumps(spec)}")
    use_compile_cache()  # on a GPU a probe compiles kernels, as the run will
    with compile_probe(place, say) as wait_for_kernels:
        text = read_text(spec, say)
        wait_for_kernels()
    request = Request(
        minutes=minutes,
        max_bytes=asked.budget.max_bytes,
        text=text,
        settings=fixed,
        compile_minutes=_compile_minutes(asked.train.compile, place),
    )
    with use_threads(threads):
        machine = look_at(place, say)
    laws = load_laws(Path(os.environ["PARBANK_PLAN_FIT"])) if os.environ.get("PARBANK_PLAN_FIT") else load_laws()
    plan = make_plan(request, machine, laws)
    compiles = minutes >= request.compile_minutes
    if compiles and not wants_inductor(plan.best.config, place, plan.best.parameters):  # the text ends the clock early
        plan = make_plan(replace(request, compile_minutes=math.inf), machine, laws)
    check_size(plan.best.config, Display(enabled=False))
    return recall(plan, laws)


def _compile_minutes(wish: bool | None, place: Runtime) -> float:
    """From how many minutes on a run on this machine compiles its passes; see `parbank.training.inductor`."""
    if wish is False or place.is_cuda or place.world > 1 or find_compiler() is None:
        return math.inf
    return 0.0 if wish else LEAST_MINUTES


def _check(settings: Sequence[str]) -> None:
    """Refuses settings that no config has, before any work. Their values are checked with the candidate they belong to."""
    known = demo()
    names = {setting.partition("=")[0].strip() for setting in settings}
    require(
        "batch.mixed_lengths" not in names or {"batch.sequence_length", "batch.batch_tokens"} <= names,
        "a plan chooses the sequence length and the batch, which batch.mixed_lengths must divide: set batch.sequence_length and "
        "batch.batch_tokens, too, or give --recipe",
    )
    for setting in settings:
        name, sign, value = setting.partition("=")
        if not sign or not name.strip().startswith("model."):
            continue  # read with the others
        leaf = name.strip().removeprefix("model.")
        if not hasattr(known.model, leaf):
            override(known, setting)  # raises, and says what is near
        if isinstance(getattr(known.model, leaf), int) and not isinstance(parse_value(value), int | bool):
            override(known, setting)


def introduce(plan: Plan) -> str:
    """What a run says of its plan at its start: the shape, the score to expect, and the notes."""
    best, config, model = plan.best, plan.best.config, plan.best.config.model
    shape = (
        f"{model.layers} layers of {model.width}, {model.vocab_size:,} tokens, batches of {config.batch.batch_tokens:,}"
    )
    line = f"planned: {shape}; about {best.score:.3f} bits per byte expected (+- {2 * best.deviation:.3f})"
    return "\n".join([line, *(f"note: {note}" for note in find_notes(plan))])
