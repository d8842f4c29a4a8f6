"""Scoring a model: `eval`."""

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parbank.cli.terminal import (
    DeviceOption,
    FieldOption,
    GlobOption,
    SkipBadOption,
    ThreadsOption,
    data_option,
    print_pairs,
    printable,
    read_data,
)
from parbank.errors import ConfigError

SHOWN_DOCUMENTS = 10
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


def evaluate(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="ARTIFACT_OR_CHECKPOINT",
            help="A .pbk file, a checkpoint, or a run folder; with --compare also a result that --json wrote.",
        ),
    ],
    data: Annotated[
        str | None,
        data_option(
            "What to score: the validation part of a spec, or all of the text of text:val=PATH. If not given, what the model "
            "was trained on, where it knows."
        ),
    ] = None,
    glob: GlobOption = None,
    field: FieldOption = None,
    skip_bad: SkipBadOption = False,
    method: Annotated[
        str,
        typer.Option(
            help="chunked: windows side by side, quick, little context at each one's start. sliding: the public protocol, every "
            "token with nearly a full window, most work done many times over. streaming: every token computed once with a "
            "full window. ttt: learns from each chunk after scoring it. adaptive: streaming, mixed with what each document and the "
            "text so far teach; never much worse. --methods lists all."
        ),
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
            help="sgd (if not given): all weights, over the whole text. low-rank: beside them, anew for each document.",
            rich_help_panel=_TTT,
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate; if not given 0.002 for sgd, 0.001 for low-rank.", rich_help_panel=_TTT),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over a scored chunk; 3 if not given.", rich_help_panel=_TTT)
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            help="Tokens scored, then learnt from; if not given 32768, for low-rank the context.", rich_help_panel=_TTT
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
        int | None, typer.Option(help="Width of low-rank adapters; 8 if not given.", rich_help_panel=_TTT)
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
            help="Also check, at a sample of the scored positions, that probabilities sum to 1. Implies --eager.",
        ),
    ] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Do not replay CUDA graphs: launch by launch.")] = False,
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

      torchrun --nproc_per_node=2 -m parbank eval runs/sprint --method streaming

    Any number of ranks gives the same score to the last bit.
    """
    from parbank.eval.result import compare as compare_results
    from parbank.eval.result import is_result, read_result

    data = read_data(data, glob, field, skip_bad)
    theirs = read_result(compare) if compare is not None else None
    if path.suffix == ".json" and path.is_file():
        if theirs is not None:
            _show(compare_results(read_result(path), theirs, str(compare)), as_json)
            return
        if is_result(path):
            raise ConfigError(f"{path} is a result, not a model; give another one by --compare to see the difference")
    if picture is not None and not breakdown:
        raise ConfigError("--picture is where --breakdown draws, which was not asked for; give both")
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
    chosen = {"graphed": not (eager or audit), **flags, **_parse_settings(settings or [])}
    result = _score(path, data, method, context, chosen, theirs, breakdown, audit, device, threads)
    if result is None:  # another rank prints
        return
    if theirs is not None:
        result |= compare_results(result, theirs, str(compare))
    found = result.pop("breakdown", None)
    if as_json and found is not None:
        result["breakdown"] = found.as_dict()
    _show(result, as_json)
    if found is not None:
        if not as_json:
            _print_breakdown(found)
        sys.stdout.flush()  # a picture that fails must not take the score with it
        _draw(found, f"{path.name}: {result['method']}, {result['val_bpb']:.4f} bits per byte", picture)


def _score(
    path: Path,
    data: str | None,
    name: str,
    context: int | None,
    settings: dict[str, Any],
    theirs: dict[str, Any] | None,
    breakdown: bool,
    audit: bool,
    device: str,
    threads: int | None,
) -> dict[str, Any] | None:
    """The result, on the first rank. Settings that cannot be run or compared are refused before the work."""
    from parbank import runtime
    from parbank.data.validation import open_validation
    from parbank.eval.audit import audited
    from parbank.eval.breakdown import break_down
    from parbank.eval.methods import make_method
    from parbank.eval.result import refuse_unlike
    from parbank.threads import compute_with
    from parbank.training.compiled import use_compile_cache
    from parbank.training.display import Display
    from parbank.training.load import load_model

    use_compile_cache()
    with runtime.start(device) as place, compute_with(threads):
        display = Display(enabled=place.is_main, file=sys.stderr)
        loaded = load_model(path, place.device)
        method = make_method(name, **{"context": loaded.context if context is None else context, **settings})
        spec = data or loaded.data
        if spec is None:
            raise ConfigError(f"{path} was trained on text without a public name; say by --data what to score")
        if theirs is not None:
            refuse_unlike(method.describe(), theirs, "the result to compare with")
        validation = place.in_turn(lambda: open_validation(spec, loaded.tokenizer, say=display.say))
        about = method.describe() | validation.describe()
        if theirs is not None:
            refuse_unlike(about, theirs, "the result to compare with")
        began = time.perf_counter()
        with display.progress("scoring") as progress, audited(loaded.model) if audit else nullcontext() as watched:
            scored = method.score(loaded.model, validation.tokens, place, progress)
            score = scored.total(loaded.tokenizer)
        seconds = time.perf_counter() - began
        audit_result = {"audit": watched.finish(place)} if watched is not None else {}
    if not place.is_main:
        return None
    if (idle := method.find_idle(scored.tokens, loaded.model.config)) is not None:
        display.say(f"note: {idle}")
    result = {
        "val_bpb": score.bpb,
        "val_loss": score.loss,
        "tokens": score.tokens,
        "bytes": score.bytes,
        "seconds": seconds,
        "tokens_per_second": score.tokens / max(seconds, 1e-9),
        "data": spec,
        "tokenizer_sha256": loaded.tokenizer.fingerprint,
        **about,
        **audit_result,
    }
    if breakdown:
        result["breakdown"] = break_down(scored, loaded.tokenizer, method, loaded.model.config)
    return result


def _check_picture(path: Path) -> None:
    """Checks the picture's path before the text is scored."""
    if path.suffix.lower() not in PICTURES:
        raise ConfigError(f"--picture is a file that ends in {', '.join(PICTURES)}, got {path}")
    if path.is_dir():
        raise ConfigError(f"--picture {path} is a folder; give a file in it, such as {path / 'breakdown.png'}")
    if not path.parent.is_dir():
        raise ConfigError(f"--picture {path}: there is no folder {path.parent}; make it, or give another place")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--picture {path} cannot be written here; give another place")


def _draw(found: Any, title: str, picture: Path) -> None:
    from parbank.eval.breakdown import draw

    try:
        draw(found, title, picture)
        print(f"wrote {picture}", file=sys.stderr)
    except ConfigError as error:  # no matplotlib: the tables are worth having without the picture
        print(f"note: {error}", file=sys.stderr)


def _parse_settings(assignments: list[str]) -> dict[str, Any]:
    from parbank.config import parse_value

    found: dict[str, Any] = {}
    for assignment in assignments:
        name, sign, text = assignment.partition("=")
        if not sign:
            raise ConfigError(f"cannot read the setting {assignment!r}; write it as NAME=VALUE, e.g. momentum=0.5")
        found[name.strip()] = parse_value(text)
    return found


def _parse_blocks(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--blocks is a list of block numbers such as 8,9,10, got {text!r}") from None


_FORMATS = {
    **dict.fromkeys(("val_bpb", "val_loss"), "{:.6f}"),
    **dict.fromkeys(("tokens", "bytes", "documents"), "{:,}"),
    "seconds": "{:.1f}",
    "tokens_per_second": "{:,.0f}",
}


def _show(result: dict[str, Any], as_json: bool) -> None:
    """All digits as JSON; otherwise the significant ones."""
    if as_json:
        print(json.dumps(result))
        return
    shown = {key: _FORMATS.get(key, "{}").format(value) for key, value in result.items() if value is not None}
    if adapt := result.get("adapt"):
        shown["adapt"] = ", ".join(f"{key} {value}" for key, value in adapt.items() if value != ())
    if audit := result.get("audit"):
        shown["audit"] = "probabilities at {positions:,} positions sum to 1 within {worst_deviation:.1e}".format(
            **audit
        )
    print_pairs(shown)


def _print_breakdown(found: Any) -> None:
    """Three tables; of many documents the dearest ones."""
    out = Console(highlight=False)
    for title, parts in (("tokens of context", found.by_context), ("place in document", found.by_place)):
        table = Table(title, "tokens", "bytes", "bpb")
        for part in parts:
            name = str(part.first) if part.first == part.last else f"{part.first:,}-{part.last:,}"
            table.add_row(name, f"{part.tokens:,}", f"{part.bytes:,}", _bpb(part))
        out.print(table)
    documents = sorted(found.by_document, key=lambda part: -part.bits)
    table = Table("document", "tokens", "bytes", "bpb", "begins")
    for part in documents[:SHOWN_DOCUMENTS]:
        opening = Text(printable(part.opening)[:40])  # not a plain string: rich would read [...] in it as its own
        table.add_row(f"at {part.first:,}", f"{part.tokens:,}", f"{part.bytes:,}", _bpb(part), opening)
    out.print(table)
    if len(documents) > SHOWN_DOCUMENTS:
        print(f"the {SHOWN_DOCUMENTS} dearest of {len(documents):,} documents; --json has all")


def _bpb(part: Any) -> str:
    return "-" if part.bpb is None else f"{part.bpb:.4f}"


COMMANDS = {"eval": evaluate}
