"""Shared by commands: common options, parsing of sizes and data, and printing."""

import ast
import re
import shlex
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer

from parbank.data.sources import describe_sources

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_LARGEST = 2**63 - 1  # the limit of file systems, and of other programs' integers


def read_size(text: str) -> int:
    """Bytes from `16MB`, `16MiB`, `30_000_000` or `2e6`."""
    return _read_whole(
        text, _UNITS, "a size is written as 16MB (16,000,000 bytes), 16MiB (16,777,216), 30_000_000 or 2e6"
    )


def read_count(text: str) -> int:
    """A whole number from `30_000_000` or `2e6`."""
    return _read_whole(text, {"": 1}, "a count is written as 2000000, 2_000_000 or 2e6")


def _read_whole(text: str, units: dict[str, int], remedy: str) -> int:
    found = re.fullmatch(r"(\d[\d_]*|\d{1,3}(?:,\d{3})+)(\.\d+)?(e\+?\d{1,2})?\s*([a-z]*)", text.strip(), re.I | re.A)
    if found is None or found[4].upper() not in units:
        raise typer.BadParameter(f"{text!r} is not understood; {remedy}")
    number = Decimal(re.sub("[_,]", "", found[1]) + (found[2] or "") + (found[3] or "")) * units[found[4].upper()]
    if number != int(number):
        raise typer.BadParameter(f"{text!r} is {number.normalize():f}, not a whole number; {remedy}")
    if number > _LARGEST:
        raise typer.BadParameter(f"{text!r} is larger than {_LARGEST:,}; {remedy}")
    return int(number)


def describe_registered(folder: str) -> str:
    """For `--help`: name and help of every class in the files of a folder of parbank, such as eval/methods. They are read
    from the source, because importing the classes would import PyTorch."""
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
    return " ".join(f"{name}: {help}." for name, help in sorted(found.items()))


_DATA = "Data"
DATA_HELP = "\n\n".join(
    [*describe_sources(), "Commas separate paths: reach a path that has one by a glob, with ? for the comma."]
)
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", help="CPU threads; what the process may use and is free if not given."),
]
GlobOption = Annotated[
    list[str] | None,
    typer.Option(
        "--glob",
        metavar="PATTERN",
        help="Of a folder in --data, only files whose name matches, such as '*.md'; repeatable.",
        rich_help_panel=_DATA,
        show_default=False,
    ),
]
FieldOption = Annotated[
    str | None,
    typer.Option(
        "--field",
        metavar="NAME",
        help="The .jsonl field or parquet column with the text; text if not given.",
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
