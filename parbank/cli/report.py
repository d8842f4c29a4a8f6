"""Pages to look at: `report`."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are set beside each other.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="The page; report.html in the folder, of several runs here."),
    ] = None,
) -> None:
    """Write a page about a run, or one that compares several: a single HTML file that opens offline.

    `train` leaves the page of its run in the folder. Runs of older versions, and runs that have not ended, have pages,
    too: a page says what was not recorded.

    Examples:

      parbank report runs/demo-1

      parbank report runs/demo-1 runs/demo-2 -o comparison.html
    """
    from parbank.report.write import PAGE, write_pages

    target = out or (folders[0] / PAGE if len(folders) == 1 else Path(PAGE))
    print(f"{write_pages(folders, target)}: {target.stat().st_size:,} bytes; open it in a browser")


COMMANDS = {"report": report}
