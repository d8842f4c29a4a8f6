"""Planning: `plan`."""

import json
from typing import Annotated

import typer

from parbank import ahead
from parbank.cli.terminal import (
    DeviceOption,
    FieldOption,
    GlobOption,
    SkipBadOption,
    ThreadsOption,
    data_option,
    print_next,
    size_option,
)
from parbank.data.sources import read_data

_BUDGET = "Budget"


def plan(
    data: Annotated[str | None, data_option("What to train on; the running Python's library if not given.")] = None,
    glob: GlobOption = None,
    field: FieldOption = None,
    skip_bad: SkipBadOption = False,
    minutes: Annotated[
        float | None, typer.Option(help="Minutes of training; 3 if not given.", rich_help_panel=_BUDGET)
    ] = None,
    max_bytes: Annotated[
        int | None, size_option("Size of the artifact, never exceeded; 2MB if not given:", rich_help_panel=_BUDGET)
    ] = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="a.b=v", help="Fix one setting, and plan the rest around it; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole plan as JSON.")] = False,
) -> None:
    """Print what `parbank train` would train for these minutes, bytes and text, and the score to expect.

    Examples:

      parbank plan --data text:my_folder --minutes 5 --max-bytes 8MB

      parbank plan --minutes 60 --max-bytes 16MB --set model.vocab_size=4096

      parbank plan --data text:my_folder --json

    Nothing is trained. `parbank train` without --recipe trains the plan. The expected score comes from laws fitted to measured
    runs, and from a probe of this machine that takes some seconds, once. For a text that a plan was trained on before, it comes
    from that run, too. Notes name sizes outside those runs.
    """
    ahead.begin(device)
    from parbank import runtime
    from parbank.api.run import read_changes
    from parbank.data.progress import say_on_stderr
    from parbank.plan.describe import describe_plan, plan_table
    from parbank.plan.plan import plan_run

    spec = read_data(data, glob, field, skip_bad)
    changes = read_changes(data=spec, minutes=minutes, max_bytes=max_bytes, settings=settings or ())
    with runtime.start(device) as place:
        found = plan_run(changes, place, threads=threads, say=say_on_stderr)
    if as_json:
        print(json.dumps(plan_table(found), indent=1))
        return
    print(describe_plan(found))
    options = {"--data": spec, "--minutes": minutes, "--max-bytes": max_bytes, "--threads": threads}
    options |= {"--device": None if device == "auto" else device}
    words = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
    print_next(("parbank", "train", *words, *(word for setting in settings or () for word in ("--set", setting))))


COMMANDS = {"plan": plan}
