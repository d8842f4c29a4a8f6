"""Files of weights: `pack`, `inspect`, `export` and `import`."""

import contextlib
import json
import sys
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
    print_next,
    printable,
    size_option,
)
from parbank.data.sources import read_data
from parbank.errors import ParbankError


def pack(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run folder.")],
    max_bytes: Annotated[int, size_option("Cap on the file:")],
    out: Annotated[
        Path | None, typer.Option(help="File to write; model-BYTES.pbk in the run folder if not given.")
    ] = None,
    data: Annotated[str | None, data_option("Training text to calibrate on; that of the run if not given.")] = None,
    glob: GlobOption = None,
    field: FieldOption = None,
    skip_bad: SkipBadOption = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="quant.a=v", help="Another setting than the run's; repeatable."),
    ] = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Pack a checkpoint into an artifact of limited size.

    A few windows of training text show which weights the loss depends on. These weights get more bits.

    Examples:

      parbank pack runs/demo --max-bytes 500kB

      parbank pack runs/demo/checkpoint --max-bytes 8MiB --out small.pbk

      parbank pack step_00000200.pt --max-bytes 1MB --data text:my_folder --set quant.method=rows
    """
    from parbank import runtime
    from parbank.display import Display
    from parbank.threads import compute_with
    from parbank.training.pack import pack_checkpoint

    data = read_data(data, glob, field, skip_bad)
    with runtime.start(device) as place, compute_with(threads):
        display = Display(enabled=place.is_main, file=sys.stderr)
        target, packed = pack_checkpoint(
            checkpoint, max_bytes, out, settings=tuple(settings or ()), data=data, runtime=place, display=display
        )
    if not place.is_main:
        return
    print(
        f"{target}: {packed.size:,} bytes of {max_bytes:,}; matrices as integers -{packed.matrix_q}..{packed.matrix_q}"
    )
    known = packed.artifact.meta.get("data")
    spec = known or data or _find_data(checkpoint)
    print_next(("parbank", "eval", target, *(() if known else ("--data", spec or "text:val=PATH"))))


def _find_data(checkpoint: Path) -> str | None:
    """The data of the run that a checkpoint lies in: an artifact does not name a path of this machine."""
    from parbank.training.folder import load_run_config

    folders = (checkpoint, checkpoint.parent, checkpoint.parent.parent)
    for folder in folders:
        with contextlib.suppress(ParbankError):  # no run's folder, or another program's config.json
            return load_run_config(folder).data
    return None


def inspect(artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="A .pbk file.")]) -> None:
    """Show the contents of an artifact: config, sections, and every tensor with its bits and bytes.

    bits/weight counts everything that is stored of a tensor. coded counts its integers alone. entropy is the size of these
    integers by one histogram: coded is smaller if rows or columns differ in spread.

    Example:

      parbank inspect runs/demo/model.pbk
    """
    from parbank.artifact.container import read_artifact
    from parbank.artifact.pack import describe_tensors

    found = read_artifact(artifact)
    print(f"file    {artifact}\nbytes   {artifact.stat().st_size:,}\nformat  version {found.version}")
    print(json.dumps(found.meta, indent=2, sort_keys=True))
    sections = Table("section", "bytes")
    for name, size in found.sizes.items():
        sections.add_row(name, f"{size:,}")
    columns = (
        "tensor",
        "shape",
        "role",
        "levels",
        "raw bytes",
        "packed bytes",
        "bits/weight",
        "coded",
        "entropy",
        "with",
    )
    tensors = Table(*columns)
    rows = describe_tensors(found)
    for row in rows:
        shape = " x ".join(map(str, row.shape)) or "scalar"
        each = f"{row.integer_bits / row.count:.3f}", f"{row.entropy_bits / row.count:.3f}"
        tensors.add_row(
            Text(printable(row.name)),  # a foreign file may name a tensor in markup or in escape sequences
            shape,
            row.role,
            str(row.levels or "float16"),
            f"{row.raw_bytes:,}",
            f"{row.packed_bytes:,.0f}",
            f"{row.bits_per_weight:.3f}",
            *(each if row.levels else ("-", "-")),
            row.extras,
        )
    _add_totals(tensors, rows)
    wide = Console(highlight=False, width=None if Console().is_terminal else 180)
    wide.print(sections)
    wide.print(tensors)


def _add_totals(tensors: Table, rows: list[Any]) -> None:
    count, coded = sum(row.count for row in rows), [row for row in rows if row.levels]
    weights = max(sum(row.count for row in coded), 1)
    integer, entropy = (sum(getattr(row, name) for row in coded) for name in ("integer_bits", "entropy_bits"))
    packed = sum(row.packed_bytes for row in rows)
    tensors.add_section()
    tensors.add_row(
        "total",
        f"{count:,}",
        "",
        "",
        f"{sum(row.raw_bytes for row in rows):,}",
        f"{packed:,.0f}",
        f"{8 * packed / max(count, 1):.3f}",
        f"{integer / weights:.3f}",
        f"{entropy / weights:.3f}",
        f"coded: entropy {100 * (integer / entropy - 1):+.2f}%" if entropy else "",
    )


def export(
    path: Annotated[
        Path, typer.Argument(metavar="ARTIFACT_OR_CHECKPOINT", help="A .pbk file, a checkpoint, or a run folder.")
    ],
    format: Annotated[str, typer.Option(help="safetensors (the only format).")] = "safetensors",
    out: Annotated[
        Path | None, typer.Option(help="File to write; NAME.safetensors beside the input if not given.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 (exact), bfloat16 or float16.")] = "float32",
) -> None:
    """Write a model's weights for other programs.

    The file has one tensor for each weight, by its plain name (blocks.0.mlp.up.weight), with the values that the model
    computes with. Its metadata holds the config, the context and the hash of the tokenizer. The tokenizer is written beside
    it as NAME.model, which SentencePiece reads unless it has case operators.

    Examples:

      parbank export runs/demo/model.pbk

      parbank export runs/demo --dtype bfloat16 --out demo.safetensors

    `parbank import` makes an artifact of it again.
    """
    import torch

    from parbank.artifact.safetensors import export_model
    from parbank.errors import ConfigError
    from parbank.training.load import load_model

    if format != "safetensors":
        raise ConfigError(f"--format {format!r} is not known; there is safetensors")
    loaded = load_model(path, torch.device("cpu"))
    target = out or loaded.source.with_suffix(".safetensors")
    tokenizer, count = export_model(loaded, target, dtype)
    print(f"{target}: {count} tensors as {dtype}, {target.stat().st_size:,} bytes; tokenizer: {tokenizer}")


def import_(
    path: Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="A file that `parbank export` wrote.")],
    out: Annotated[Path, typer.Option(help="Artifact to write.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="SentencePiece model; NAME.model beside the file if not given.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="JSON of the model's config, for a file without one in its metadata.")
    ] = None,
    max_bytes: Annotated[int | None, size_option("Cap on the artifact:")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="quant.b=v", help="Change one setting of quant; repeatable.")
    ] = None,
) -> None:
    """Make an artifact of weights in a safetensors file.

    Rows that came from an artifact are recognised and stored exactly. Other rows are rounded to integers. --set takes
    quant.matrix_bits, min_matrix_bits, embedding_bits, coder, clip_steps and clip_floor.

    Examples:

      parbank import model.safetensors --out model.pbk

      parbank import tuned.safetensors --tokenizer model.model --max-bytes 8MB --out small.pbk

    --config takes the JSON that `parbank export` writes as "parbank" in the metadata: {"model": {...}, "context": 2048}.
    """
    from parbank.artifact.safetensors import import_model

    result = import_model(
        path, out, tokenizer=tokenizer, config=config, max_bytes=max_bytes, settings=tuple(settings or ())
    )
    rounded = "" if result.exact == result.count else ", the others rounded"
    print(f"{out}: {result.size:,} bytes; {result.exact} of {result.count} tensors exactly as they were{rounded}")
    print_next(("parbank", "eval", out, "--data", "text:val=PATH"), ("parbank", "sample", out, "--interactive"))


COMMANDS = {"pack": pack, "inspect": inspect, "export": export, "import": import_}
