"""The runs below a folder: `runs`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parbank.cli.terminal import printable


def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to look.")] = Path("runs"),
    sort: Annotated[str, typer.Option(help="date, score, bytes, minutes, recipe or folder.")] = "date",
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round.")] = False,
    recipe: Annotated[str | None, typer.Option(help="Only runs of this recipe.")] = None,
    ended: Annotated[bool, typer.Option("--ended", help="Only runs that have ended.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """List the runs below a folder: recipe, minutes, bytes, score and date.

    Runs that have not ended are listed, too: running, or stopped.
    --sort puts runs without the number last.

    Examples:

      parbank runs

      parbank runs experiments --recipe sprint --sort score

      parbank runs --ended --json
    """
    from parbank.report.listing import list_runs

    found = list_runs(folder, sort=sort, reverse=reverse, recipe=recipe, ended=ended)
    if as_json:
        print(json.dumps([asdict(line) for line in found]))
        return
    if not found:
        print(f"no run below {folder} matches; `parbank train` makes one")
        return
    table = Table("run", "recipe", box=None, pad_edge=False)
    for column in ("minutes", "bytes", "bits/byte"):
        table.add_column(column, justify="right")
    table.add_column("date (UTC)")
    for line in found:
        table.add_row(
            Text(printable(str(Path(line.folder).relative_to(folder)))),
            Text(printable(line.recipe)),
            "-" if line.minutes is None else f"{line.minutes:.1f}",
            "-" if line.bytes is None else f"{line.bytes:,}",
            line.state if line.score is None else f"{line.score:.4f}",
            line.date[:16].replace("T", " "),
        )
    Console(highlight=False, width=None if Console().is_terminal else 140).print(table)


COMMANDS = {"runs": runs}
