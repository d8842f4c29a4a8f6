"""The command line. Every command is thin: it reads arguments, calls one function, and prints the result.

A command is a function in the file of its group, named in that file's COMMANDS. A new group is a new file, named in GROUPS.
"""

import atexit
import gc
import inspect
import io
import os
import signal
import sys
from types import ModuleType
from typing import Annotated

import typer

from parbank import __version__
from parbank.cli import artifact, compress, data, eval, machine, plan, report, runs, sample, serve, study, train
from parbank.cli.terminal import printable
from parbank.errors import ConfigError, ParbankError, is_out_of_memory

# in the order of `parbank --help`
GROUPS = (train, plan, eval, sample, compress, serve, report, runs, artifact, data, study, machine)


def main() -> None:
    """Runs the command line. An error that a user can fix ends in one message and exit code 2; a bug keeps its
    traceback."""
    atexit.register(gc.freeze)  # the interpreter need not search torch's modules for cycles at its end
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    _replace_closed_streams()
    # A model may write any sign; a terminal that lacks it shows a question mark.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(args=arguments, prog_name="parbank")
    except SystemExit as ended:
        interrupt = getattr(ended.__context__, "__cause__", None)
        if isinstance(interrupt, KeyboardInterrupt):  # which typer turns into an exit, without a word
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more would show a traceback of the interpreter's end
            if debug:
                raise interrupt from None
            print("interrupted", file=sys.stderr)
        raise
    except Exception as error:
        if debug or (message := _explain(error)) is None:
            raise
        if message:
            print(printable(message), file=sys.stderr)  # it may quote a name of a foreign file
        raise SystemExit(2) from None


def _replace_closed_streams() -> None:
    """Opens the null device for standard streams that the caller closed. Otherwise the next file gets the descriptor of a
    stream, and with it everything that a library prints."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (open to the end, as the others)


def _explain(error: Exception) -> str | None:
    """The message to print instead of a traceback; empty if another rank prints it; None for a bug, which keeps its
    traceback."""
    rank = os.environ.get("RANK", "0")
    where = "error: " if rank == "0" else f"error on rank {rank}: "
    if isinstance(error, ConfigError):
        return f"{where}{error}" if rank == "0" else ""  # the settings are the same on every rank
    if isinstance(error, ParbankError):
        return f"{where}{error}"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch
        remedy = "lower batch.micro_batch_tokens (the result stays the same), or use a smaller model"
        return f"{where}out of memory on the device; {remedy}. --debug shows where"
    if is_out_of_memory(error):
        return f"{where}this machine has too little memory; end other programs, or use a smaller model. --debug shows where"
    if isinstance(error, OSError):
        return f"{where}{error}; check the path, its permissions and the free space. --debug shows where"
    return None


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"parbank {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


def _build(groups: tuple[ModuleType, ...]) -> typer.Typer:
    """The app of all commands. A name of two words, "data prepare", makes a subcommand; its file's docstring is the help."""
    app = typer.Typer(
        name="parbank",
        help="Train small language models that fit two budgets: minutes and megabytes.\n\n"
        "Start with: [bold]parbank train --recipe demo[/bold]. It trains on text that this machine already has, and leaves "
        "one file with a score in bits per byte.\n\nAdd [bold]--debug[/bold] to any command to see tracebacks.",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        add_completion=False,
        callback=_root,
    )
    parents = {"": app}
    for group in groups:
        for name, function in group.COMMANDS.items():
            parent, _, command = name.rpartition(" ")
            if parent not in parents:
                parents[parent] = typer.Typer(help=group.__doc__, no_args_is_help=True)
                app.add_typer(parents[parent], name=parent)
            parents[parent].command(command, help=_reflow(function.__doc__ or ""))(function)
    return app


def _reflow(doc: str) -> str:
    """A docstring with one line for each paragraph, to be wrapped by the terminal's width and not by the source's."""
    paragraphs = inspect.cleandoc(doc).split("\n\n")
    return "\n\n".join(text if text.startswith(" ") else text.replace("\n", " ") for text in paragraphs)


app = _build(GROUPS)
