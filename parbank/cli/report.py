"""Pages to look at: `report`."""

from pathlib import Path
from typing import Annotated

import typer

from parbank.cli.terminal import printable


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, several to compare; or one study.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="The page; report.html in the folder, of several runs here."),
    ] = None,
) -> None:
    """Write a page about a run, several runs or a study: a single HTML file that opens offline.

    `train` leaves the page of its run in the folder. Runs of older versions, and runs that have not ended, have pages,
    too: a page says what was not recorded.

    Examples:

      parbank report runs/demo

      parbank report runs/demo runs/longer -o comparison.html

      parbank report runs/study-published-training
    """
    from parbank.errors import ConfigError
    from parbank.report.record import is_study
    from parbank.report.write import PAGE, write_pages, write_study_page

    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("a run is given twice; give each run once, since a run does not differ from itself")
    target = out or (folders[0] / PAGE if len(folders) == 1 else Path(PAGE))
    studies = [folder for folder in folders if is_study(folder)]
    if studies and len(folders) > 1:
        raise ConfigError(f"{studies[0]} is a study, which has a page of its own; give it alone")
    if studies:
        from parbank.study.report import make_report  # takes longer to import than the page of a run to make

        write_study_page(make_report(studies[0]).to_dict(), studies[0], target)
    else:
        write_pages(folders, target)
    print(f"{printable(str(target))}: {target.stat().st_size:,} bytes; open it in a browser")


COMMANDS = {"report": report}
