"""Shared by commands: common options, parsing of sizes and data, printing, and the age of the process."""

import ast
import os
import re
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from parbank import sizes
from parbank.data.sources import describe_sources
from parbank.errors import ConfigError


def read_size(text: str) -> int:
    """Bytes from `16MB`. A text that is not understood is reported as a wrong value of the option."""
    return _as_option(sizes.read_size, text)


def read_count(text: str) -> int:
    """A whole number from `30_000_000` or `2e6`, in the same way."""
    return _as_option(sizes.read_count, text)


def _as_option(read: Callable[[str], int], text: str) -> int:
    try:
        return read(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def describe_registered(folder: str) -> str:
    """For `--help`: name and help of every class in the files of a folder of parbank, such as eval/methods, a paragraph
    each. They are read from the source, because importing the classes would import PyTorch."""
    found = {}
    for path in sorted(Path(__file__).parents[1].joinpath(folder).glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            values = {
                statement.targets[0].id: str(statement.value.value)
                for statement in getattr(node, "body", ())
                if isinstance(statement, ast.Assign)
                and isinstance(statement.targets[0], ast.Name)
                and isinstance(statement.value, ast.Constant)
            }
            if {"name", "help"} <= values.keys():
                found[values["name"]] = values["help"]
    return "\n\n".join(f"{name}: {help}." for name, help in sorted(found.items()))


_DATA = "Data"
DATA_HELP = "\n\n".join(
    [*describe_sources(), "Commas separate paths. Write ? for a comma inside a path: it matches any one character."]
)
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", help="CPU threads; if not given, as many as are free to this process."),
]
GlobOption = Annotated[
    list[str] | None,
    typer.Option(
        "--glob",
        metavar="PATTERN",
        help="Of a folder, only files whose name matches, such as '*.md'; repeatable.",
        rich_help_panel=_DATA,
        show_default=False,
    ),
]
FieldOption = Annotated[
    str | None,
    typer.Option(
        "--field",
        metavar="NAME",
        help="The .jsonl field or parquet column that holds the text; `text` if not given.",
        rich_help_panel=_DATA,
    ),
]
SkipBadOption = Annotated[
    bool,
    typer.Option(
        "--skip-bad", help="Leave out files and lines that cannot be used, and count them.", rich_help_panel=_DATA
    ),
]


def data_option(help: str = "") -> Any:
    """`--data`, with a sentence of the command's own before the kinds of text."""
    return typer.Option(help="\n\n".join(filter(None, (help, DATA_HELP))), metavar="SPEC", rich_help_panel=_DATA)


def size_option(help: str, **more: Any) -> Any:
    return typer.Option(parser=read_size, metavar="SIZE", help=f"{help} 16MB, 16MiB, 30_000_000 or 2e6.", **more)


def print_next(*commands: Sequence[object]) -> None:
    """The next steps, as commands that can be pasted into a shell."""
    for index, command in enumerate(commands):
        words = [f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word) for word in command]
        print(f"{'' if index else 'next':6}{shlex.join(words)}")


def print_pairs(pairs: dict[str, Any]) -> None:
    width = max(map(len, pairs))
    for key, value in pairs.items():
        print(f"{key:{width}}  {value}")


def print_tree(values: dict[str, Any]) -> None:
    """Nested values one a line: train.tokens  1234."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update({f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value})
    shown = {int: "{:,}", float: "{:.3f}"}
    print_pairs({k: shown.get(type(v), "{}").format(v) for k, v in flat.items()})


def printable(text: str) -> str:
    """Control characters as Unicode symbols: a model's text must not move the cursor or ring the bell."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: _picture(ord(found[0])), text)


def _picture(code: int) -> str:
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def process_age() -> float:
    """Seconds since this process began; 0 where Linux's /proc is missing."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # after the program's name, which may hold anything
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
