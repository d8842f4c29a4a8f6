"""Compare settings over several seeds: does a change help, and how sure is that?"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parbank.cli.terminal import DeviceOption, data_option, print_next, read_count, size_option
from parbank.errors import ConfigError, ParbankError

if TYPE_CHECKING:
    from parbank.study.report import Report
    from parbank.study.study import Study

_STUDY, _MACHINE = "Study", "Machine"
ArmOption = Annotated[
    list[str] | None,
    typer.Option("--arm", metavar="NAME:a.b=v,c.d=w", help="One more arm; repeatable.", rich_help_panel=_STUDY),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        help="Processes; one for each GPU if not given. More may share a GPU if the budget is in steps. 0: this process.",
        min=0,
        rich_help_panel=_MACHINE,
    ),
]
FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a study.")]


def run(
    study: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE|DIR",
            help="A shipped study (`parbank study list`), a .toml file, or the folder of a study.",
        ),
    ],
    recipe: Annotated[str | None, typer.Option(help="The recipe of the base; the study's own if not given.")] = None,
    arms: Annotated[
        str | None,
        typer.Option(
            help="Shipped arms, with commas, in place of the study's own; '' for none.", rich_help_panel=_STUDY
        ),
    ] = None,
    arm: ArmOption = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each arm.", rich_help_panel=_STUDY)] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME|STEPS", help="Length of one run: 60s, 2min or 2000steps.", rich_help_panel=_STUDY),
    ] = None,
    data: Annotated[str | None, data_option("What to train on; the recipe's own data if not given.")] = None,
    holdout: Annotated[
        str | None,
        typer.Option(help="dev, the default: score on 1 in 64 training documents; val: on the validation text."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=v", help="Change the base, for every arm; repeatable.")
    ] = None,
    max_bytes: Annotated[
        int | None, size_option("The cap of packed models; that of the recipe or the stored run if not given.")
    ] = None,
    packed: Annotated[
        bool | None, typer.Option("--packed/--unpacked", help="Score every model packed, or before packing.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="chunked, the default: windows side by side; streaming: every token with a full window."),
    ] = None,
    score_tokens: Annotated[
        int | None,
        typer.Option(parser=read_count, metavar="COUNT", help="Score on so many tokens at most; all if not given."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep a checkpoint of every run.")] = False,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option("--checkpoint", metavar="RUN", help="A stored run, for studies that train nothing; repeatable."),
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option(help="Standard deviation of paired differences to assume; that of earlier runs if not given."),
    ] = None,
    difference: Annotated[
        float | None,
        typer.Option(help="Smallest difference of interest; the smallest that the seeds can show if not given."),
    ] = None,
    retry: Annotated[
        bool, typer.Option("--retry", help="Try runs again that have failed twice.", rich_help_panel=_MACHINE)
    ] = False,
    workers: WorkersOption = None,
    submit: Annotated[
        str | None,
        typer.Option(metavar="CLUSTER", help="Submit the workers to slurm, and return.", rich_help_panel=_MACHINE),
    ] = None,
    submit_set: Annotated[
        list[str] | None,
        typer.Option(
            "--submit-set",
            metavar="NAME=VALUE",
            help="For submitit: slurm_partition=gpu, gpus_per_node=1, timeout_min=60; repeatable.",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    device: DeviceOption = "auto",
    out: Annotated[Path | None, typer.Option(help="The study's folder; runs/study-NAME if not given.")] = None,
) -> None:
    """Run a study, or continue one: the same command goes on where it stopped.

    Before it starts, it prints the smallest difference that it can show, and the time it takes. It ends with a table of
    verdicts.

    Examples:

      parbank study run published-training --data text:my_folder --budget 30s --seeds 4

      parbank study run seeds --recipe sprint --arm wide:model.width=576,model.heads=9,model.kv_heads=3

      parbank study run my_study.toml --workers 8

      parbank study run published-quantisation --checkpoint runs/sprint

      parbank study run runs/study-seeds
    """
    from parbank.study.engine import forget_failures, run_study
    from parbank.study.ship import make_study
    from parbank.study.study import STUDY

    if submit_set and submit is None:
        raise ConfigError("--submit-set says how --submit starts the workers; give both")
    if (Path(study) / STUDY).exists():
        given = {
            "--recipe": recipe,
            "--arms": arms,
            "--arm": arm,
            "--seeds": seeds,
            "--budget": budget,
            "--data": data,
            "--holdout": holdout,
            "--set": settings,
            "--max-bytes": max_bytes,
            "--packed": packed,
            "--metric": metric,
            "--score-tokens": score_tokens,
            "--keep": keep or None,
            "--checkpoint": checkpoint,
            "--noise": noise,
            "--difference": difference,
            "--out": out,
        }
        _refuse_changes(study, [name for name, value in given.items() if value not in (None, [])])
        made, folder = None, Path(study)
    else:
        made = make_study(
            study,
            recipe=recipe,
            data=data,
            holdout=holdout or "dev",
            budget=budget,
            seeds=seeds,
            arms=None if arms is None else [name.strip() for name in arms.split(",") if name.strip()],
            extra=arm or (),
            settings=[*(settings or ()), *([f"budget.max_bytes={max_bytes}"] if max_bytes is not None else [])],
            packed=packed,
            metric=metric,
            score_tokens=score_tokens or 0,
            keep=keep,
            checkpoints=map(str, checkpoint or ()),
            noise=noise,
            difference=difference,
        )
        folder = out or Path("runs") / f"study-{made.name}"
    if retry and (folder / STUDY).exists():
        forget_failures(folder)
    if submit is not None:
        _submit(made, folder, workers or 1, submit, submit_set or [], device)
        return
    _show_end(run_study(made, folder, workers=workers, device=device), folder)


def _show_end(report: "Report", folder: Path) -> None:
    """The table, and what to do next. Runs that failed end the command with code 1."""
    print(report.text())
    if report.failures:
        print_next(("parbank", "study", "run", folder, "--retry"))
        raise typer.Exit(1)
    more = ("parbank", "study", "add", folder, "--seeds", len(report.study.seeds))
    page = ("parbank", "report", folder)
    print_next(*((page,) if report.study.checkpoints else (page, more)))  # parts of a stored run's text cannot be more


def _refuse_changes(folder: str, given: list[str]) -> None:
    """A folder has its settings: options beside it would do nothing."""
    if given:
        raise ConfigError(
            f"{folder} holds a study with its own settings, so {', '.join(given)} would change nothing; leave that out to "
            f"continue it, or add seeds and arms by `parbank study add {folder}`"
        )


def _submit(made: "Study | None", folder: Path, workers: int, cluster: str, options: list[str], device: str) -> None:
    from parbank.study.engine import introduce, open_study
    from parbank.study.slurm import import_submitit, submit_workers
    from parbank.study.study import parse_assignment

    import_submitit()  # before anything is written
    study = open_study(folder, made)
    print("\n".join(introduce(study, folder, workers)))
    given = dict(map(parse_assignment, options))
    for job in submit_workers(folder, workers, cluster=cluster, options=given, device=device):
        print(f"submitted {job.job_id}")
    print_next(("parbank", "study", "show", folder))


def add(
    folder: FolderArgument,
    seeds: Annotated[int, typer.Option(min=0, help="More runs of each arm.")] = 0,
    arms: Annotated[str, typer.Option(help="Shipped arms, with commas.")] = "",
    arm: ArmOption = None,
    workers: WorkersOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Add seeds or arms to a study, and run them.

    If runs had ended before, the table says that these were added after looking.

    Examples:

      parbank study add runs/study-published-training --seeds 4

      parbank study add runs/study-seeds --arm decay:optim.matrix_weight_decay=0.08
    """
    from parbank.study.engine import add_to_study, run_study
    from parbank.study.report import make_report
    from parbank.study.ship import CONFIGURED, make_arm
    from parbank.study.study import read_arm, read_study

    study = read_study(folder)
    more = [make_arm(name.strip(), study.base, study.kind) for name in arms.split(",") if name.strip()]
    more += [read_arm(text, study.base if study.kind in CONFIGURED else None) for text in arm or ()]
    add_to_study(folder, study.with_more(seeds=seeds, arms=more, results=len(make_report(folder).results)))
    _show_end(run_study(None, folder, workers=workers, device=device), folder)


def show(
    folder: FolderArgument,
    against: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Another study: how well does one rank the other's arms?")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, with every run.")] = False,
) -> None:
    """Show the table of a study, complete or not.

    The verdicts are those of the runs that have ended.

    Examples:

      parbank study show runs/study-published-training

      parbank study show runs/short --against runs/long
    """
    from parbank.study.report import correlate, make_report

    report = make_report(folder)
    print(json.dumps(report.to_dict(), indent=2) if as_json else report.text())
    if against is not None:
        print(correlate(report, make_report(against)))


def list_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to look for studies.")] = Path("runs"),
) -> None:
    """List the studies that ship, and the studies in a folder.

    Every arm has its claim beside it: what was published, where, and with which number.

    Example:

      parbank study list
    """
    from parbank.study import kernels
    from parbank.study.arms import ARMS, claim_of
    from parbank.study.report import make_report
    from parbank.study.ship import STUDIES
    from parbank.study.study import STUDY

    for name, study in STUDIES.items():
        print(f"{name:22} {study.help} ({study.recipe})")
        claims = {arm: kernels.claim_of(arm) if study.kind == "kernels" else claim_of(arm) for arm in study.arms}
        for arm, claim in (claims | {name: claim for name, _, claim in study.grid}).items():
            print(f"  {arm:24} {claim}")
        if study.note:
            print(f"  {study.note}")
    others = [name for name in ARMS if not any(name in study.arms for study in STUDIES.values())]
    print("more arms, for --arms")
    for arm in others:
        print(f"  {arm:24} {claim_of(arm)}")
    for path in sorted(folder.glob(f"*/{STUDY}")):
        try:
            states = list(make_report(path.parent).states.values())
        except ParbankError as error:
            print(error)
            continue
        print(f"{path.parent}: {states.count('done')} of {len(states)} runs done")


def search(
    space: Annotated[
        list[str],
        typer.Option(
            "--space", metavar="a.b=LOW..HIGH", help="A setting's range: 8..12, 0.01..0.1:log or \\[X,Y]; repeatable."
        ),
    ],
    rungs: Annotated[str, typer.Option(help="Budgets of complete schedules, each longer than the last.")] = "30s,120s",
    trials: Annotated[int, typer.Option(min=2, help="Trials of the first rung; half of them go on.")] = 16,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each trial on the last rung.")] = 4,
    recipe: Annotated[str, typer.Option(help="The recipe of the base.")] = "sprint",
    data: Annotated[str | None, data_option("What to train on; the recipe's own data if not given.")] = None,
    holdout: Annotated[
        str, typer.Option(help="dev: score on 1 in 64 training documents; val: on the validation text.")
    ] = "dev",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=v", help="Change the base; repeatable.")
    ] = None,
    score_tokens: Annotated[
        int | None,
        typer.Option(parser=read_count, metavar="COUNT", help="Score on so many tokens at most; all if not given."),
    ] = None,
    workers: WorkersOption = None,
    device: DeviceOption = "auto",
    out: Annotated[Path, typer.Option(help="The search's folder.")] = Path("runs/search"),
) -> None:
    """Search over settings, by trials on short schedules and halving on longer ones.

    Optuna proposes the trials; the extra `search` installs it. Every run is a complete schedule. The rank correlation of two
    rungs says whether the shorter one can be trusted.

    Example:

      parbank study search --space optim.matrix_lr=0.01..0.05:log --space optim.warmdown=0.4..0.8 --rungs 30s,120s
    """
    from parbank.study import search as searching
    from parbank.study.ship import make_study

    base = make_study(
        "seeds",
        recipe=recipe,
        data=data,
        holdout=holdout,
        settings=settings or (),
        score_tokens=score_tokens or 0,
    )
    report = searching.search(
        base,
        out,
        space=[searching.read_range(text) for text in space],
        trials=trials,
        rungs=[rung.strip() for rung in rungs.split(",") if rung.strip()],
        seeds=seeds,
        workers=workers,
        device=device,
    )
    print(report.text())


def work(
    folder: FolderArgument,
    device: DeviceOption = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing.")] = False,
) -> None:
    """Work on a study until no run is left.

    Start it on every machine that shares the folder. A worker that dies gives its job back.

    Example:

      parbank study work /shared/study --device cuda:1
    """
    from parbank.display import Display
    from parbank.study import worker

    count = worker.work(folder, device=device, display=Display(enabled=not quiet))
    if not quiet:
        print(f"no run is left; this worker ran {count}")


COMMANDS = {
    "study run": run,
    "study add": add,
    "study show": show,
    "study list": list_,
    "study search": search,
    "study work": work,
}
