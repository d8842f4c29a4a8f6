"""Training: `train` and `warmup`."""

import inspect
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

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
    print_pairs,
    printable,
    read_count,
    size_option,
)

_BUDGET = "Budget"


def train(
    recipe: Annotated[
        str | None,
        typer.Option(
            help="demo, sprint, golf or nano; `parbank recipes` describes them. If not given, parbank plans a model for the "
            "minutes, the bytes, the text and this machine; `parbank plan` prints the plan."
        ),
    ] = None,
    data: Annotated[
        str | None, data_option("What to train on; the recipe's own data, or stdlib, if not given.")
    ] = None,
    glob: GlobOption = None,
    field: FieldOption = None,
    skip_bad: SkipBadOption = False,
    minutes: Annotated[
        float | None,
        typer.Option(help="Minutes of training. Setup, scoring and packing are not counted.", rich_help_panel=_BUDGET),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(parser=read_count, metavar="COUNT", help="Optimizer steps.", rich_help_panel=_BUDGET)
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            parser=read_count,
            metavar="COUNT",
            help="Training tokens, such as 30_000_000 or 2e6.",
            rich_help_panel=_BUDGET,
        ),
    ] = None,
    max_bytes: Annotated[
        int | None, size_option("Size of the artifact, never exceeded:", rich_help_panel=_BUDGET)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/RECIPE-TIME-XXXXXXXX if not given.")] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes starting weights and data order.")] = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="a.b=v", help="Change one setting; repeatable. `parbank recipes NAME` prints all of them."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out; with --recipe, start it if there is none.")
    ] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Show the page of the run in a browser while it trains; see `parbank watch`.")
    ] = False,
) -> None:
    """Train a model, score it, and pack it into one file.

    Examples:

      parbank train --data text:my_folder --minutes 5 --max-bytes 8MB

      parbank train --recipe demo

      parbank train --recipe sprint --data text:my_folder --minutes 5 --max-bytes 8MB

      parbank train --data text:my_folder --glob '*.md' --glob '*.rst' --skip-bad

      parbank train --data parquet:rows.parquet --field content --steps 200

      parbank train --resume --out runs/demo --minutes 10

      torchrun --nproc_per_node=8 -m parbank train --recipe golf

    Ctrl-C saves a checkpoint; --resume continues from it.
    """
    ahead.begin(device)
    from parbank.api import run as api

    try:
        done = inspect.unwrap(api.train)(  # whose errors name options; those of api.train name keywords
            recipe=recipe,
            data=data,
            glob=glob or (),
            field=field,
            skip_bad=skip_bad,
            minutes=minutes,
            steps=steps,
            tokens=tokens,
            max_bytes=max_bytes,
            out=out,
            seed=seed,
            device=device,
            threads=threads,
            settings=settings or (),
            resume=resume,
            started=_start_watching() if live else None,
        )
    except api.Stopped:  # the run has said where its checkpoint is
        raise typer.Exit(128 + signal.SIGINT) from None
    if os.environ.get("RANK", "0") == "0":
        _print_summary(done.summary, done.folder)
        print_next(
            ("parbank", "eval", done.folder, "--method", "streaming"),
            ("parbank", "sample", done.folder, "--interactive"),
        )


def _start_watching() -> Callable[[Path], None]:
    """Shows a run in a browser once its folder is known. A missing extra is said before anything else begins."""
    from parbank.serve import check_installed

    check_installed("parbank train --live")
    from parbank.serve.live import watch_in_background

    return lambda folder: print(f"watch  {watch_in_background(folder)}", flush=True)


def _print_summary(summary: dict[str, Any], folder: Path) -> None:
    from parbank.report.write import PAGE

    bytes_used = summary["artifact_bytes"] + summary["code_bytes"]
    code = f" with {summary['code_bytes']:,} of code" if summary["code_bytes"] else ""
    others = ", ".join(f"{name} {bpb:.4f}" for name, bpb in summary["compressors_bpb"].items())
    seconds = max(summary["train_seconds"], 1e-9)
    wait = 100 * summary["data_wait_seconds"] / seconds
    share = 100 * bytes_used / summary["max_bytes"]
    print_pairs(
        {
            "steps": f"{summary['steps']:,} in {seconds:.1f} s ({summary['setup_seconds']:.1f} s of setup before)",
            "speed": f"{summary['tokens_per_second']:,.0f} tokens/s; {wait:.2f}% of the time waiting for data",
            "artifact": f"{bytes_used:,} bytes{code}, {share:.1f}% of the cap {summary['max_bytes']:,}",
            "val bpb": f"{summary['val_bpb']:.4f} ({summary['val_bpb_before_packing']:.4f} before packing)",
            **({"compressors": f"{others} bpb on the same text"} if others else {}),
            "folder": str(folder),
            **({"page": f"{folder / PAGE}, to open in a browser"} if (folder / PAGE).exists() else {}),
        }
    )
    print("\n--- sample " + "-" * 60)
    print(printable(summary["sample"]))
    print("-" * 71)


def warmup(
    recipe: Annotated[str, typer.Option(help="demo, sprint, golf or nano.")] = "demo",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="a.b=v", help="Change one setting, as for the later run; repeatable."),
    ] = None,
    device: DeviceOption = "auto",
    export: Annotated[
        Path | None, typer.Option("--export", help="Also write the compiled code to this file.", metavar="FILE")
    ] = None,
    given: Annotated[
        Path | None,
        typer.Option("--import", help="Compile nothing: take the code from a file of --export.", metavar="FILE"),
    ] = None,
) -> None:
    """Compile the kernels of a recipe on this GPU, once; `parbank train` then starts warm. Needs no data.

    Examples:

      parbank warmup --recipe golf

      torchrun --nproc_per_node=8 -m parbank warmup --recipe golf

      parbank warmup --recipe golf --export golf.kernels

      parbank warmup --import golf.kernels

    Compiled code stays in parbank's cache ($PARBANK_CACHE, else ~/.cache/parbank), or where TORCHINDUCTOR_CACHE_DIR
    and TRITON_CACHE_DIR say. --export carries it to machines with the same GPU and the same versions. The code will
    run there: import files from people you trust.
    """
    ahead.begin(device)
    from parbank import runtime
    from parbank.config import override
    from parbank.display import Display
    from parbank.errors import ConfigError
    from parbank.recipes import get_recipe
    from parbank.training.compiled import use_compile_cache
    from parbank.training.portable import check_export, export_warmed, import_kept
    from parbank.training.warmup import warm_up

    if export is not None and given is not None:
        raise ConfigError("--export and --import exclude each other: export where code is compiled, import elsewhere")
    if export is not None:
        check_export(export)
    use_compile_cache()
    config = override(get_recipe(recipe), *(settings or []))
    with runtime.start(device) as place:
        display = Display(enabled=place.is_main)
        if given is not None:
            display.say(place.in_turn(lambda: import_kept(given, place.device)))
            return
        done = warm_up(config, place, display.say)
        if export is not None and place.is_main:
            display.say(export_warmed(export, place.device, graphs=bool(config.train.compile)))
    if done is not None:
        where = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        kept = f"{done.lookups.built} kernels and graphs built, {done.lookups.found} found; kept in {where}"
        parts = f"{done.train_seconds:.1f} s for training, {done.score_seconds:.1f} s for scoring and sampling"
        display.say(f"ready: {parts}; {kept}")
        if place.is_main:
            changes = [word for setting in settings or () for word in ("--set", setting)]
            print_next(("parbank", "train", "--recipe", recipe, *changes))


COMMANDS = {"train": train, "warmup": warmup}
