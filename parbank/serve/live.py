"""Watches a run from a process of its own, which the training process starts and then forgets.

    python -m parbank.serve.live FOLDER SOCKET TRAINER OPEN

The training process opens the socket and passes it on. So it knows the address at once, and does not wait until the other
process has started.
"""

import os
import subprocess
import sys
from pathlib import Path

from parbank.serve.server import Address, has_desktop, listen


def watch_in_background(folder: Path) -> str:
    """The address of the page of the run that this process is about to begin in `folder`."""
    listening, address = listen(Address())
    opens = "open" if has_desktop() else "no"
    words = [sys.executable, "-m", __name__, str(folder.resolve()), str(listening.fileno()), str(os.getpid()), opens]
    with listening:
        subprocess.Popen(
            words,
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the training; the page then still gets its end
        )
    return address.url


def main() -> None:
    import socket

    from parbank.serve.watch import watch_run

    folder, number, trainer, opens = sys.argv[1:]
    os.nice(10)  # training goes first
    listening = socket.socket(fileno=int(number))
    host, port = listening.getsockname()[:2]
    address = Address(host=host, port=port)
    watch_run(
        Path(folder),
        address,
        say=lambda text: None,
        open_browser=opens == "open",
        trainer=int(trainer),
        listening=listening,
    )


if __name__ == "__main__":
    main()
