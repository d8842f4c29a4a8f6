"""Notices that a rank is lost, so that the others end with its name instead of waiting for it.

A collective waits for every rank. If one is gone, gloo fails at once or waits for a third rank, and nccl waits until
its timeout. So a thread of every rank holds a connection to rank 0. The system closes a connection when a process
ends, however it ends: rank 0 sees this within milliseconds and tells the others. Regular beats find a rank that is
stopped, or whose machine is out of reach. A rank that is only slow still beats, and collectives wait for it however
long it takes: preparing data or packing on the first rank may take an hour.
"""

import json
import math
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch.distributed as dist

from parbank.errors import ParbankError, RankError

BEAT_SECONDS = 2.0
SILENT_BEATS = 20
"""Beats that a rank may miss. Counted in this rank's own beats: if all ranks are stopped and continued, none is lost."""
GRACE_SECONDS = 10.0
"""The time that the main thread has to end by itself, once it cannot go on. It may be writing a checkpoint."""
_EXPLAIN_SECONDS = 15.0  # from an error of communication until the watch knows its reason; rank 0 may be stalled
_SHORT_WAIT = 0.05
_CONNECT_SECONDS = 60.0
_LONGEST = 1 << 16  # bytes of a message
_LONGEST_REASON = 1 << 12  # characters
_REMEDY = "the other ranks have ended too. Start all of them again; `parbank train --resume` continues from the last checkpoint"


class Watch:
    """The thread of one rank, its connections, and the reason to end, once there is one."""

    def __init__(self, rank: int, world: int, store: dist.Store, *, silent_beats: int = SILENT_BEATS) -> None:
        self._rank = rank
        self._links = _connect_to_all(world, store) if rank == 0 else {0: _connect_to_first(rank, store)}
        self._silent = dict.fromkeys(self._links, 0)
        self._silent_beats = silent_beats
        self._lock = threading.Lock()  # both threads send, and only one may end the process
        self._closed, self._known = threading.Event(), threading.Event()
        self._reason, self._deadline = "", 0.0
        threading.Thread(target=self._run, name="parbank-watch", daemon=True).start()

    def wait_for_reason(self, seconds: float) -> str:
        """The sentence about a lost rank; empty if none is known within some seconds. It waits in short pieces, so that time in
        which this process is stopped counts as one piece at most."""
        for _ in range(math.ceil(seconds / _SHORT_WAIT)):
            if self._known.wait(_SHORT_WAIT):
                break
        return self._reason

    def leave(self, reason: str = "") -> None:
        """Tells the other ranks that this rank ends: normally, or for a reason."""
        if reason:
            self._note(self._rank, reason)
        self._send({"left": self._rank, "reason": reason})

    def close(self) -> None:
        """Ends the thread, which then no longer ends the process."""
        with self._lock:
            self._closed.set()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Inside, an error of communication becomes a RankError that says which rank was lost, and the other ranks learn of
        any error here."""
        try:
            with _exits_on_sigterm():
                yield
        except BaseException as error:
            sentence = self._explain(error)
            self.leave(sentence or f"rank {self._rank} ended: {_describe(error)}")
            if sentence:
                raise RankError(sentence) from error
            raise
        self.leave()

    def _explain(self, error: BaseException) -> str:
        """The sentence for an error that a lost rank may have caused; empty for any other."""
        if isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM:
            return self.wait_for_reason(1.0)  # torchrun sends SIGTERM to the other ranks when one has failed
        if not is_communication_error(error):
            return ""
        first = str(error).strip().partition("\n")[0]
        return (
            self.wait_for_reason(_EXPLAIN_SECONDS) or f"the ranks cannot reach each other any more ({first}); {_REMEDY}"
        )

    def _run(self) -> None:
        beat = time.monotonic()
        while not self._closed.is_set():
            ranks = {link: rank for rank, link in self._links.items()}
            for link in wait(list(ranks), timeout=BEAT_SECONDS / 4):
                self._read(ranks[link], link)  # type: ignore[index, arg-type]
            if not ranks:
                self._closed.wait(BEAT_SECONDS / 4)
            if time.monotonic() >= beat:
                beat = time.monotonic() + BEAT_SECONDS
                self._beat()
            with self._lock:
                if self._reason and time.monotonic() > self._deadline and not self._closed.is_set():
                    self._end()
        for link in self._links.values():
            link.close()

    def _read(self, rank: int, link: Connection) -> None:
        try:
            message = json.loads(link.recv_bytes(_LONGEST))
        except (EOFError, OSError):
            lost = f"rank {rank} was lost: its process was killed or crashed; {_REMEDY}"
            message = {"left": rank, "reason": lost}
        self._silent[rank] = 0
        if message.get("left") == rank:
            del self._links[rank]
        if message.get("reason"):
            self._note(message["left"], message["reason"])

    def _beat(self) -> None:
        self._send({})
        for rank in list(self._links):
            self._silent[rank] += 1
            if self._silent[rank] > self._silent_beats:
                del self._links[rank]
                why = "its process is stopped, or its machine is out of reach"
                seconds = round(self._silent_beats * BEAT_SECONDS)
                self._note(rank, f"rank {rank} was lost: it has not answered for {seconds} s ({why}); {_REMEDY}")

    def _note(self, left: int, reason: str) -> None:
        """Keeps the first reason, from which the main thread has some seconds to end. Rank 0 tells the others."""
        if self._reason:
            return
        self._reason, self._deadline = reason[:_LONGEST_REASON], time.monotonic() + GRACE_SECONDS
        self._known.set()
        if self._rank == 0:
            self._send({"left": left, "reason": self._reason})

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            for link in list(self._links.values()):
                with suppress(OSError):  # a broken connection is found when it is read
                    link.send_bytes(json.dumps(message).encode())

    def _end(self) -> NoReturn:
        """Ends the process: its main thread waits in a collective that will never return."""
        with suppress(OSError, ValueError):
            print(f"error: {self._reason}", file=sys.stderr, flush=True)
        os._exit(2)


def is_communication_error(error: BaseException) -> bool:
    """Whether a collective or the store has failed. gloo raises plain RuntimeErrors that name its source files."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and re.search("gloo|nccl", str(error), re.IGNORECASE) is not None


def _connect_to_all(world: int, store: dist.Store) -> dict[int, Connection]:
    """Rank 0's connections to all others. A token from the store keeps strangers out."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, backlog=world, dualstack_ipv6=both) as server:
        server.settimeout(_CONNECT_SECONDS)
        token = secrets.token_hex(16)
        store.set("watch", json.dumps([server.getsockname()[1], token]))
        links: dict[int, Connection] = {}
        while len(links) < world - 1:
            try:
                accepted, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, world)) - set(links))
                raise RankError(
                    f"rank {missing[0]} has not connected within {_CONNECT_SECONDS:.0f} s; start all ranks again"
                ) from None
            accepted.settimeout(None)
            link = Connection(accepted.detach())
            with suppress(OSError, EOFError, ValueError, KeyError, TypeError):
                if link.poll(_CONNECT_SECONDS) and (hello := json.loads(link.recv_bytes(_LONGEST)))["token"] == token:
                    links[int(hello["rank"])] = link
        return links


def _connect_to_first(rank: int, store: dist.Store) -> Connection:
    port, token = json.loads(store.get("watch"))
    host = os.environ["MASTER_ADDR"]
    try:
        connected = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
    except OSError as error:
        raise RankError(
            f"rank {rank} cannot reach rank 0 at {host}, port {port}: {error}; open the network between them"
        ) from error
    connected.settimeout(None)
    link = Connection(connected.detach())
    link.send_bytes(json.dumps({"token": token, "rank": rank}).encode())
    return link


@contextmanager
def _exits_on_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that the reason can be given. By default it ends the process without a word."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _describe(error: BaseException) -> str:
    if isinstance(error, ParbankError):
        return str(error)
    if isinstance(error, SystemExit):
        return f"exit code {error.code}"
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]
