"""Scoring a model: `eval`."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from parbank import ahead
from parbank.cli.scoring import EvalOptions, check_request, score_models
from parbank.cli.tables import draw_breakdown, show_breakdown, show_result, show_results
from parbank.cli.terminal import (
    DeviceOption,
    FieldOption,
    GlobOption,
    SkipBadOption,
    ThreadsOption,
    data_option,
    describe_registered,
    process_age,
)
from parbank.data.sources import read_data
from parbank.errors import ConfigError
from parbank.training.laps import Laps

PICTURES = (".png", ".pdf", ".svg", ".jpg")  # common formats that matplotlib writes


def _list_methods(wanted: bool) -> None:
    if not wanted:
        return
    from parbank.eval.methods import METHODS

    for method in METHODS.values():
        print(f"{method.name}: {method.help}")
        for name, doc in method.settings().items():
            print(f"  {name:13} {doc}")
    raise typer.Exit


_TTT = "Adapting (--method ttt)"
_ADAPTING = "Adapting (--method ttt or adaptive)"


def evaluate(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="ARTIFACT_OR_CHECKPOINT",
            help="A .pbk file, a checkpoint, or a run folder; with --compare also a result that --json wrote. Several models "
            "are scored on one text and compared with the first, document by document.",
        ),
    ],
    data: Annotated[
        str | None,
        data_option(
            "What to score: the validation part of a spec, or all of the text of text:val=PATH. If not given, what the model "
            "was trained on, if its file says so."
        ),
    ] = None,
    glob: GlobOption = None,
    field: FieldOption = None,
    skip_bad: SkipBadOption = False,
    method: Annotated[
        str,
        typer.Option(help=f"{describe_registered('eval/methods')}\n\n--methods prints their settings."),
    ] = "chunked",
    methods: Annotated[
        bool,
        typer.Option("--methods", callback=_list_methods, is_eager=True, help="Print every method with its settings."),
    ] = False,
    context: Annotated[int | None, typer.Option(help="Window in tokens; what it was trained on if not given.")] = None,
    stride: Annotated[
        int | None, typer.Option(help="How far sliding windows move; 64 (or the context) if not given.")
    ] = None,
    segment: Annotated[
        int | None, typer.Option(help="Tokens streamed together; changes memory and rounding only.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other setting of the method; repeatable."),
    ] = None,
    scores: Annotated[
        str | None,
        typer.Option("--ttt-scores", help="How chunks are scored; streaming if not given.", rich_help_panel=_TTT),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            help=f"{describe_registered('eval/adaptation')}\n\nsgd if not given.",
            rich_help_panel=_TTT,
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate; if not given 0.002 for ttt by sgd, 0.001 by low-rank. --methods says that of adaptive.",
            rich_help_panel=_ADAPTING,
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over a scored chunk; 3 if not given.", rich_help_panel=_TTT)
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            help="Tokens scored, then learnt from; if not given 32768 for ttt by sgd, the context by low-rank, 48 for adaptive.",
            rich_help_panel=_ADAPTING,
        ),
    ] = None,
    freeze: Annotated[
        int | None,
        typer.Option(help="The first N blocks do not learn; embeddings do.", rich_help_panel=_TTT),
    ] = None,
    blocks: Annotated[
        str | None, typer.Option(help="Only these blocks learn, e.g. 8,9,10, and no embedding.", rich_help_panel=_TTT)
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            help="Width of low-rank factors; if not given 8 for ttt, 64 for adaptive.", rich_help_panel=_ADAPTING
        ),
    ] = None,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Also by document and by context: tables, and a picture.")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(help="Where --breakdown draws bpb against position; breakdown.png if not given."),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(metavar="RESULT.json", help="An earlier result; a different text or method is refused."),
    ] = None,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit",
            help="Check at more positions than usual that probabilities sum to 1, and print the result. Implies --eager.",
        ),
    ] = False,
    unpacked: Annotated[
        bool, typer.Option("--unpacked", help="Also score the checkpoint that lies beside a run's artifact.")
    ] = False,
    prove: Annotated[
        bool,
        typer.Option(
            "--prove",
            help="Also compress the text with the model, decompress it and compare: the size of the file is the score. Needs "
            "--method streaming.",
        ),
    ] = False,
    segments: Annotated[
        int | None,
        typer.Option(metavar="N", help="Parts of the text that --prove codes side by side; see `parbank compress`."),
    ] = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="Launch every kernel by itself: replay no CUDA graphs.")
    ] = False,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Score a model in bits per byte on validation text.

    Examples:

      parbank eval runs/demo

      parbank eval model.pbk --data text:val=book.txt --method sliding --stride 64 --json > sliding.json

      parbank eval model.pbk --data text:val=book.txt --method streaming --breakdown

      parbank eval model.pbk --data text:val=book.txt --method ttt --ttt-scores sliding --lr 0.002 --epochs 3

      parbank eval other.pbk --data text:val=book.txt --method sliding --compare sliding.json

      parbank eval a.pbk b.pbk c.pbk --data text:val=book.txt

      parbank eval runs/demo --method streaming --prove

      torchrun --nproc_per_node=2 -m parbank eval runs/sprint --method streaming

    Any number of ranks gives the same score to the last bit.
    """
    laps = Laps(ago=process_age())
    laps.end("start")
    ahead.begin(device)
    from parbank.eval.result import compare as compare_results
    from parbank.eval.result import is_result, read_result

    data = read_data(data, glob, field, skip_bad)
    models = _name_models(paths, unpacked)
    path = paths[0]
    theirs = read_result(compare) if compare is not None else None
    if len(models) > 1 and (compare is not None or breakdown):
        given = "--breakdown" if breakdown else "--compare"
        raise ConfigError(f"{given} takes one model, and {len(models)} were given; score each model alone")
    if path.suffix == ".json" and path.is_file():
        if theirs is not None:
            show_result(compare_results(read_result(path), theirs, str(compare)), as_json)
            return
        if is_result(path):
            raise ConfigError(f"{path} is a result, not a model; give another one by --compare to see the difference")
    if picture is not None and not breakdown:
        raise ConfigError("--picture names the picture of --breakdown; give both")
    picture = picture or Path("breakdown.png")
    if breakdown:
        _check_picture(picture)
    flags = {
        "stride": stride,
        "segment": segment,
        "scores": scores,
        "adapter": adapter,
        "lr": lr,
        "epochs": epochs,
        "chunk": chunk,
        "freeze": freeze,
        "blocks": _parse_blocks(blocks),
        "rank": rank,
    }
    more = _parse_settings(settings or [])
    _check_said_once(flags | {"context": context}, more)
    chosen = {"graphed": not (eager or audit), **flags, **more}
    request = EvalOptions(
        data=data,
        method=method,
        context=context,
        settings=chosen,
        theirs=theirs,
        breakdown=breakdown or len(models) > 1,
        audit=audit,
        prove=prove,
        segments=segments,
        device=device,
        threads=threads,
    )
    check_request(request)
    results = score_models(models, request, laps)
    if results is None:  # another rank prints
        return
    if len(results) > 1:
        show_results(dict(zip(models, results)), laps, as_json)
        return
    result = results[0] | {"times": laps.seconds}
    if theirs is not None:
        result |= compare_results(result, theirs, str(compare))
    found = result.pop("breakdown", None)
    if as_json and found is not None:
        result["breakdown"] = found.as_dict()
    show_result(result, as_json, checkpoint=_has_checkpoint(path))
    if found is not None:
        if not as_json:
            show_breakdown(found)
        sys.stdout.flush()  # a picture that fails must not take the score with it
        draw_breakdown(found, f"{path.name}: {result['method']}, {result['val_bpb']:.4f} bits per byte", picture)


def _name_models(paths: list[Path], unpacked: bool) -> dict[str, Path]:
    """The models by their names in tables: the paths of artifacts and of the checkpoints beside them."""
    models = {str(path): path for path in paths}
    if len(models) < len(paths):
        raise ConfigError("a model is given twice; name each model once")
    if len(models) > 1:  # before the first is scored: an error at the last would lose all scores
        from parbank.training.load import check_model

        for path in paths:
            check_model(path)
    if not unpacked:
        return models
    named: dict[str, Path] = {}
    for name, path in models.items():
        if not _has_checkpoint(path):
            raise ConfigError(f"--unpacked: no checkpoint lies beside an artifact at {path}; give a run folder")
        folder = path if path.is_dir() else path.parent
        named |= {name: path, f"{name}, unpacked": folder / "checkpoint"}
    return named


def _has_checkpoint(path: Path) -> bool:
    """Whether the checkpoint of an artifact lies beside it."""
    folder = path if path.is_dir() else path.parent
    return (folder / "model.pbk").is_file() and (folder / "checkpoint").is_dir()


def _check_picture(path: Path) -> None:
    """Checks the picture's path before the text is scored."""
    from parbank.eval.breakdown import is_picture

    if path.suffix.lower() not in PICTURES:
        raise ConfigError(f"--picture is a file that ends in {', '.join(PICTURES)}, got {path}")
    if path.is_dir():
        raise ConfigError(f"--picture {path} is a folder; give a file in it, such as {path / 'breakdown.png'}")
    if not path.parent.is_dir():
        raise ConfigError(f"--picture {path}: there is no folder {path.parent}; make it, or give another place")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--picture {path} cannot be written here; give another place")
    if os.path.lexists(path) and not is_picture(path):
        raise ConfigError(
            f"--picture {path} exists, and does not say that parbank drew it; give another name, or delete it"
        )


def _parse_settings(assignments: list[str]) -> dict[str, Any]:
    from parbank.config import parse_value

    found: dict[str, Any] = {}
    for assignment in assignments:
        name, sign, text = assignment.partition("=")
        if not sign:
            raise ConfigError(f"cannot read the setting {assignment!r}; write it as NAME=VALUE, e.g. momentum=0.5")
        found[name.strip()] = parse_value(text)
    return found


def _check_said_once(flags: dict[str, Any], settings: dict[str, Any]) -> None:
    """A setting beside the option for it would win without a word."""
    for name in settings:
        if flags.get(name) is not None:
            option = "ttt-scores" if name == "scores" else name
            raise ConfigError(f"--set {name} and --{option} set the same thing; give one of them")


def _parse_blocks(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--blocks is a list of block numbers such as 8,9,10, got {text!r}") from None


COMMANDS = {"eval": evaluate}
