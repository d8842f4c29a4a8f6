"""Signals that end a run after the step in hand."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def watch_signals(stop: Callable[[int], None]) -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and a closed terminal call `stop` with their number. A second signal acts at once, as by
    default."""

    def note(number: int, frame: object) -> None:
        stop(number)
        for one, handler in previous.items():
            signal.signal(one, handler)

    watched = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under nohup
        watched.append(signal.SIGHUP)
    previous = {number: signal.getsignal(number) for number in watched}
    try:
        for number in previous:
            signal.signal(number, note)
    except ValueError:  # not the main thread: signals go to another thread
        previous = {}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
