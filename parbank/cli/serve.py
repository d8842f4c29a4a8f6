"""Pages in a browser: `serve` and `watch`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from parbank.cli.terminal import DeviceOption, ThreadsOption

PORT, WATCH_PORT = 8417, 8418
"""No service has these ports by convention."""

HostOption = Annotated[
    str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in, and there is no password.")
]
PortOption = Annotated[int, typer.Option(help="Port to listen on; 0 takes any free one.")]
AllowHostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host",
        metavar="NAME",
        help="Also answer to this name, such as that of a proxy; repeatable.",
        show_default=False,
    ),
]
OpenOption = Annotated[
    bool | None,
    typer.Option(
        "--open/--no-open", help="Open the page in a browser; if not given, only on a desktop.", show_default=False
    ),
]


def serve(
    artifacts: Annotated[
        list[Path],
        typer.Argument(metavar="ARTIFACT", help="A .pbk file, a checkpoint, or a run folder; one or more."),
    ],
    host: HostOption = "127.0.0.1",
    port: PortOption = PORT,
    allow_host: AllowHostOption = None,
    open_browser: OpenOption = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Write with models on a page in your browser, and see how well they predict a text.

    Write: type a text and see the continuation stream in, with the probability of each token and its alternatives.
    Measure: paste a text and see the bits of each token, and the total beside xz. Several models stand side by side.

    Examples:

      parbank serve runs/demo

      parbank serve small.pbk large.pbk --port 0

      ssh -L 8417:127.0.0.1:8417 machine parbank serve model.pbk

    The server listens on this machine only, unless --host says otherwise. Ctrl-C ends it. It needs starlette and
    uvicorn, which the extra `serve` installs.
    """
    from parbank.serve import check_installed

    check_installed("parbank serve")
    from parbank.serve.player import load_players
    from parbank.serve.playground import serve_playground
    from parbank.serve.server import Address, join_names
    from parbank.threads import check_threads

    address = Address(host=host, port=port, names=join_names(allow_host or ()))
    check_threads(threads)
    players = load_players(artifacts, device)
    serve_playground(players, address, say=_say, open_browser=open_browser, threads=threads)


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that trains now.")],
    host: HostOption = "127.0.0.1",
    port: PortOption = WATCH_PORT,
    allow_host: AllowHostOption = None,
    open_browser: OpenOption = None,
) -> None:
    """Watch a run in your browser while it trains.

    Shows the page of `parbank report`, which grows with the run: curves, speed, and at the end the score. The numbers
    change in place; the page does not scroll by itself, and Pause holds it. Ends with the run, or by Ctrl-C.

    Examples:

      parbank watch runs/demo

      parbank train --recipe demo --live

    The page is made from the run's folder by a process of its own, and only while a browser asks for it. It needs
    starlette and uvicorn, which the extra `serve` installs.
    """
    from parbank.serve import check_installed

    check_installed("parbank watch")
    from parbank.serve.server import Address, join_names
    from parbank.serve.watch import watch_run

    address = Address(host=host, port=port, names=join_names(allow_host or ()))
    watch_run(run, address, say=_say, open_browser=open_browser)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


COMMANDS = {"serve": serve, "watch": watch}
