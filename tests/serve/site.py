"""A playground on a port that the system chooses, in a thread of the test."""

import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from parbank.serve.player import Player, load_players
from parbank.serve.playground import Playground
from parbank.serve.server import Address, RequestGuard, listen
from parbank.serve.worker import Worker

ARTIFACT = Path(__file__).parents[1] / "artifact" / "data" / "v2.pbk"


def load_player() -> Player:
    """A model of 18 kilobytes."""
    return load_players([ARTIFACT], "cpu")[0]


@dataclass(frozen=True)
class Site:
    """A server that runs, and a way to ask it."""

    address: Address
    worker: Worker

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.address.port, timeout=60)

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """Status, text or JSON, and headers of an answer."""
        connection = self.connect()
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            sent = {"content-type": "application/json"} if body is not None else {}
            connection.request(method, path, data, sent | (headers or {}))
            answer = connection.getresponse()
            text = answer.read().decode()
            kind = answer.headers.get_content_type()
            found = [json.loads(line) for line in text.splitlines()] if "json" in kind else text
            return answer.status, found[0] if kind == "application/json" else found, answer.headers
        finally:
            connection.close()


@contextmanager
def open_site(players: Sequence[Player], *, most: int) -> Iterator[Site]:
    worker = Worker(most=most, threads=1)
    try:
        with open_app(Playground(players, worker).make_app()) as address:
            yield Site(address, worker)
    finally:
        worker.close()


@contextmanager
def open_app(app: Starlette) -> Iterator[Address]:
    """Serves an app as `parbank.serve.server.serve` does, but in a thread."""
    listening, address = listen(Address())
    config = uvicorn.Config(RequestGuard(app, address=address), log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield address
    finally:
        server.should_exit = server.force_exit = True  # streams that never end by themselves do not hold it up
        thread.join()
        listening.close()
