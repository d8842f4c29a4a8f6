"""Compressing text with a model: `compress` and `decompress`."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from parbank import ahead
from parbank.cli.terminal import DeviceOption, ThreadsOption, print_next, print_pairs, printable
from parbank.errors import ConfigError

_ModelOption = Annotated[
    Path, typer.Option("--model", metavar="MODEL", help="A .pbk file, a checkpoint, or a run folder.")
]


def compress(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="Files of any content. Text is coded by the model, or by xz where that is smaller."
        ),
    ],
    model: _ModelOption,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT.pbz", help="The file to write; it must not exist.")],
    segments: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Parts of the text that go through the model side by side. More are faster and larger: each starts without "
            "context. If not given, up to 64 on a CPU and 512 on a GPU, fewer for a short text.",
        ),
    ] = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Compress files with a model's probabilities, without loss.

    The size of the file is the model's score on the text. To decompress it, use the same model and software on the same
    kind of machine. A difference is refused, or detected by a checksum.

    Examples:

      parbank compress book.txt notes.txt --model runs/demo -o texts.pbz

      parbank decompress texts.pbz --model runs/demo -o texts
    """
    ahead.begin(device)
    from parbank import runtime
    from parbank.display import Display
    from parbank.eval.compressor.archive import compress as write
    from parbank.eval.compressor.archive import name_files, refuse_existing, refuse_stream
    from parbank.eval.compressor.coder import check_lanes
    from parbank.threads import compute_with
    from parbank.training.compiled import use_compile_cache
    from parbank.training.load import load_model

    check_lanes(segments)
    name_files(files)  # before the model is read, which takes seconds
    refuse_stream(out)
    refuse_existing(out, "delete it, or give another name with -o")
    use_compile_cache()
    with runtime.start(device) as place, compute_with(threads):
        if not place.is_main:
            return
        display = Display(file=sys.stderr)
        loaded = load_model(model, place.device)
        ahead.wait()
        began = time.perf_counter()
        with display.progress("compressing") as progress:
            written = write(files, loaded, out, segments=segments, progress=progress, say=display.say)
        seconds = time.perf_counter() - began
    tally, content = written.tally, max(written.content, 1)
    shown = {
        "files": f"{len(files):,}, {written.content:,} bytes",
        "compressed": f"{written.size:,} bytes"
        + (f", {8 * written.size / content:.4f} bits per byte of the files" if written.content else ""),
    }
    if tally.tokens:
        shown["score"] = (
            f"{tally.bits / tally.by_model:.4f} bits per byte of text, by the model in the same segments; coded in "
            f"{8 * tally.coded / tally.by_model:.4f}"
        )
    shown["speed"] = f"{content / max(seconds, 1e-9) / 1000:,.1f} kB/s, {seconds:.1f} s"
    print_pairs(shown)
    print_next(["parbank", "decompress", out, "--model", model, "-o", "FOLDER"])


def decompress(
    file: Annotated[Path, typer.Argument(metavar="FILE.pbz", help="A file that `compress` wrote.")],
    model: _ModelOption,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FOLDER", help="Where the files go; nothing there is overwritten.")
    ] = Path("."),
    device: Annotated[
        str, typer.Option(help="auto (the kind of device that the file was made on), cpu, cuda or cuda:N.")
    ] = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="CPU threads; as many as made the file if not given.")
    ] = None,
) -> None:
    """Restore the files that `compress` wrote into one.

    Every part is checked before it is written. A damaged file, or a file that this machine computes differently, is refused.

    Example:

      parbank decompress texts.pbz --model runs/demo -o texts
    """
    ahead.begin(device)
    from parbank import runtime
    from parbank.display import Display
    from parbank.eval.compressor.archive import check_targets, refuse_stream
    from parbank.eval.compressor.archive import decompress as write
    from parbank.threads import compute_with
    from parbank.training.compiled import use_compile_cache
    from parbank.training.load import load_model

    use_compile_cache()
    for path in (file, out):
        refuse_stream(path)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"-o {out} is a file; give a folder to write into")
    there = check_targets(file, out).made_with.get("threads")
    device = "cpu" if device == "auto" and there is not None else device
    if threads is None and device == "cpu":
        threads = there
    with runtime.start(device) as place, compute_with(threads):
        if not place.is_main:
            return
        display = Display(file=sys.stderr)
        loaded = load_model(model, place.device)
        ahead.wait()
        with display.progress("decompressing") as progress:
            written = write(file, loaded, out, progress=progress, say=display.say)
    for path in written:
        print(printable(str(path)))


COMMANDS = {"compress": compress, "decompress": decompress}
