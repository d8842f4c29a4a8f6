"""The command line. Every command is thin: it reads arguments, calls one function, and prints what came back."""

import io
import json
import os
import shlex
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from parbank import __version__
from parbank.cli import artifact as cli_artifact
from parbank.cli import eval as cli_eval
from parbank.cli.terminal import DATA_HELP, DeviceOption
from parbank.cli.terminal import print_pairs as _print_pairs
from parbank.cli.terminal import printable as _printable
from parbank.errors import ConfigError, ParbankError

app = typer.Typer(
    name="parbank",
    help="Train small language models against two hard budgets, minutes and megabytes.\n\n"
    "Start with: [bold]parbank train --recipe demo[/bold]. It trains on text this machine already has and leaves one file, "
    "scored in bits per byte.\n\n[bold]--debug[/bold], anywhere, shows tracebacks.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
data_app = typer.Typer(help="Text into token shards: prepare, look at, fetch.", no_args_is_help=True)
app.add_typer(data_app, name="data")


def main() -> None:
    """Runs the command line. An error a user can mend ends in one message and exit code 2; a bug keeps its traceback."""
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    for stream in (
        sys.stdout,
        sys.stderr,
    ):  # a model may write any sign; a terminal that lacks it shows a question mark
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(args=arguments, prog_name="parbank")
    except KeyboardInterrupt:
        if debug:
            raise
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        if debug or (message := _explain(error)) is None:
            raise
        if message:
            print(message, file=sys.stderr)
        raise SystemExit(2) from None


def _explain(error: Exception) -> str | None:
    """What to say instead of a traceback; nothing where another rank says it; None for a bug, which keeps its traceback."""
    rank = os.environ.get("RANK", "0")
    where = "error: " if rank == "0" else f"error on rank {rank}: "
    if isinstance(error, ConfigError):
        return f"{where}{error}" if rank == "0" else ""  # the settings are the same on every rank
    if isinstance(error, ParbankError):
        return f"{where}{error}"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch
        remedy = "lower batch.micro_batch_tokens (the result stays the same), or use a smaller model"
        return f"{where}out of memory on the device; {remedy}. --debug shows where"
    if isinstance(error, OSError):
        return f"{where}{error}; check the path, its permissions and the free space. --debug shows where"
    return None


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"parbank {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
def train(
    recipe: Annotated[
        str | None, typer.Option(help="demo (if not given), sprint, golf or nano; `parbank recipes` says more.")
    ] = None,
    data: Annotated[str | None, typer.Option(help=DATA_HELP)] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Budget: training clock; setup and scoring are outside it.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Budget: optimizer steps.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Budget: training tokens.")] = None,
    max_bytes: Annotated[int | None, typer.Option(help="Cap on the artifact, a promise.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/RECIPE-TIME if not given.")] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes starting weights and data order.")] = None,
    device: DeviceOption = "auto",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="a.b=v", help="Change one setting; repeatable. `parbank recipes NAME` prints all of them."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
) -> None:
    """Train a model, score it, and pack it into one file.

    Examples:

      parbank train --recipe demo

      parbank train --recipe sprint --data text:my_folder --minutes 5 --max-bytes 8000000

      parbank train --resume --out runs/demo-1

      torchrun --nproc_per_node=8 -m parbank train --recipe golf

    Ctrl-C saves a checkpoint; --resume goes on from it.
    """
    from parbank import runtime
    from parbank.config import override
    from parbank.data.corpora import absolute_spec
    from parbank.recipes import get_recipe
    from parbank.training.metrics import Display
    from parbank.training.run import load_run_config, run
    from parbank.training.warmup import use_compile_cache

    use_compile_cache()
    changes = _budget_changes(minutes, steps, tokens)
    changes += [
        f"{k}={json.dumps(v)}"
        for k, v in (("data", data), ("seed", seed), ("budget.max_bytes", max_bytes))
        if v is not None
    ]
    changes += settings or []
    if resume:
        if out is None or recipe is not None:
            raise ConfigError("--resume goes on with an earlier run: give its folder by --out, and no --recipe")
        config = load_run_config(out, *changes)
    else:
        config = override(get_recipe(recipe or "demo"), *changes)
    config = override(config, f"data={json.dumps(absolute_spec(config.data))}")
    with runtime.start(device) as place:
        folder = out or _new_folder(config.recipe, place)
        display = Display(enabled=place.is_main)
        result = run(config, place, folder, resume=resume, display=display)
        if result.summary is not None and place.is_main:
            _print_summary(result.summary, folder)
    if result.stop_signal:
        raise typer.Exit(128 + result.stop_signal)


@app.command()
def warmup(
    recipe: Annotated[str, typer.Option(help="demo, sprint, golf or nano.")] = "demo",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="a.b=v", help="Change one setting, as for the run to come; repeatable."),
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Compile what a recipe needs on this GPU, once; `parbank train` then starts warm. Needs no data.

    Examples:

      parbank warmup --recipe golf

      torchrun --nproc_per_node=8 -m parbank warmup --recipe golf

    What is compiled stays in parbank's cache ($PARBANK_CACHE, else ~/.cache/parbank), or where TORCHINDUCTOR_CACHE_DIR
    and TRITON_CACHE_DIR say.
    """
    from parbank import runtime
    from parbank.config import override
    from parbank.recipes import get_recipe
    from parbank.training.metrics import Display
    from parbank.training.warmup import use_compile_cache, warm_up

    use_compile_cache()
    config = override(get_recipe(recipe), *(settings or []))
    with runtime.start(device) as place:
        display = Display(enabled=place.is_main)
        done = warm_up(config, place, display.say)
    if done is not None:
        kept = f"{done.lookups.built} graphs built, {done.lookups.found} found; kept in {os.environ.get('TORCHINDUCTOR_CACHE_DIR')}"
        display.say(f"ready: {done.train_seconds:.1f} s for training, {done.score_seconds:.1f} s for scoring; {kept}")


app.command("eval")(cli_eval.evaluate)
app.command("sample")(cli_eval.sample)


@app.command()
def pack(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run folder.")],
    max_bytes: Annotated[int, typer.Option(help="Cap on the file.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write; model-BYTES.pbk in the run folder if not given.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Training text to calibrate on, where it is not that of the run: " + DATA_HELP)
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="quant.a=v", help="Another setting than the run's; repeatable."),
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Pack a checkpoint into an artifact of at most so many bytes.

    The bytes go where the loss needs them: a few training windows are run through the model to see where that is.
    """
    from parbank import runtime
    from parbank.training.load import pack_checkpoint
    from parbank.training.metrics import Display

    with runtime.start(device) as place:
        display = Display(enabled=place.is_main, file=sys.stderr)
        target, packed = pack_checkpoint(
            checkpoint, max_bytes, out, settings=tuple(settings or ()), data=data, runtime=place, display=display
        )
    print(
        f"{target}: {packed.size:,} bytes of {max_bytes:,}; matrices as integers -{packed.matrix_q}..{packed.matrix_q}"
    )


cli_artifact.register(app)


@data_app.command("prepare")
def data_prepare(
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT...", help="Files, folders or globs; or train=... and val=...")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the shards, the tokenizer and the manifest.")],
    vocab: Annotated[int, typer.Option(help="Tokens in the vocabulary.")] = 1024,
) -> None:
    """Train a tokenizer on text and write token shards. Train on them with --data shards:DIR.

    About 2% of the documents, chosen by a hash of their content, become validation, unless val=PATH says which.
    """
    from parbank.data.dataset import describe
    from parbank.data.prepare import prepare_text

    prepare_text(inputs, out, vocab_size=vocab)
    _print_tree(describe(out))


@data_app.command("info")
def data_info(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of token shards.")]) -> None:
    """Check every shard of a folder and say what is in it."""
    from parbank.data.dataset import describe

    _print_tree(describe(folder))


@data_app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="fineweb: the published shards with 1024 tokens.")],
    shards: Annotated[int, typer.Option(help="Training shards to fetch, 100 million tokens each.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Where to; the cache if not given, where --data fineweb finds it.")
    ] = None,
    source: Annotated[str | None, typer.Option(help="A hub repository or a local folder laid out like it.")] = None,
) -> None:
    """Fetch a published data set. What is there and whole is not fetched again."""
    from parbank.data.dataset import default_cache
    from parbank.data.fineweb import REPOSITORY, fetch_fineweb, fineweb_folder

    if name != "fineweb":
        raise ConfigError(f"there is no published data set {name!r} here; there is: fineweb")
    usual = fineweb_folder(default_cache())
    folder = out or usual
    files = fetch_fineweb(folder, shards=shards, source=source or REPOSITORY)
    for file in files:
        print(f"{file.stat().st_size:>13,} bytes  {file.name}")
    use = "fineweb" if folder == usual else f"shards:{folder}"
    print(f"{len(files)} files in {folder}; train on them with --data {shlex.quote(use)}")


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Print this recipe's whole config.")] = None,
) -> None:
    """List the recipes, or print one with every setting and what it does."""
    from parbank.config import walk
    from parbank.recipes import RECIPES, get_recipe

    if name is None:
        for key, function in RECIPES.items():
            print(f"{key:8} {(function.__doc__ or '').strip().splitlines()[0]}")
        return
    for path, value, doc in walk(get_recipe(name)):
        shown = json.dumps(value)
        print(f"{path} = {shown}" + (f"    # {doc}" if doc else ""))


@app.command()
def doctor() -> None:
    """Check this machine: what works, what does not, and what to do. Exit code 1 when something is broken."""
    from parbank.cli.doctor import examine

    findings = examine()
    signs = {"ok": "ok  ", "note": "note", "bad": "BAD "}
    for finding in findings:
        print(f"{signs[finding.status]}  {finding.subject:14} {finding.found}")
        if finding.remedy:
            print(f"{'':21}-> {finding.remedy}")
    if any(finding.status == "bad" for finding in findings):
        raise typer.Exit(1)


def _budget_changes(minutes: float | None, steps: int | None, tokens: int | None) -> list[str]:
    """One of the three replaces whatever budget the recipe had."""
    given = {
        name: value for name, value in (("minutes", minutes), ("steps", steps), ("tokens", tokens)) if value is not None
    }
    if len(given) > 1:
        raise ConfigError(
            f"give one of --minutes, --steps and --tokens, not {len(given)}: {', '.join('--' + n for n in given)}"
        )
    if not given:
        return []
    return [f"budget.{name}={given.get(name, 'none')}" for name in ("minutes", "steps", "tokens")]


def _new_folder(recipe: str, place: Any) -> Path:
    """runs/RECIPE-TIME, the same on every rank: the first rank's clock decides."""
    (stamp,) = place.agree([time.time() if place.is_main else 0.0])
    return Path("runs") / f"{recipe}-{datetime.fromtimestamp(stamp):%Y%m%d-%H%M%S}"


def _print_tree(values: dict[str, Any]) -> None:
    """Nested values one a line: train.tokens  1234."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update({f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value})
    shown = {int: "{:,}", float: "{:.3f}"}
    _print_pairs({k: shown.get(type(v), "{}").format(v) for k, v in flat.items()})


def _print_summary(summary: dict[str, Any], folder: Path) -> None:
    bytes_used = summary["artifact_bytes"] + summary["code_bytes"]
    code = f" with {summary['code_bytes']:,} of code" if summary["code_bytes"] else ""
    others = ", ".join(f"{name} {bpb:.4f}" for name, bpb in summary["compressors_bpb"].items())
    seconds = max(summary["train_seconds"], 1e-9)
    wait = 100 * summary["data_wait_seconds"] / seconds
    share = 100 * bytes_used / summary["max_bytes"]
    _print_pairs(
        {
            "steps": f"{summary['steps']:,} in {seconds:.1f} s ({summary['setup_seconds']:.1f} s of setup before)",
            "speed": f"{summary['tokens_per_second']:,.0f} tokens/s; {wait:.2f}% of the time waiting for data",
            "artifact": f"{bytes_used:,} bytes{code}, {share:.1f}% of the cap {summary['max_bytes']:,}",
            "val bpb": f"{summary['val_bpb']:.4f} ({summary['val_bpb_before_packing']:.4f} before packing)",
            "compressors": others + " bpb on the same text",
            "folder": str(folder),
        }
    )
    print("\n--- sample " + "-" * 60)
    print(_printable(summary["sample"]))
    print("-" * 71)
