"""The playground: continue a text with every model, and see how many bits each token of a text costs.

    GET  /                  the page; its script and style beside it
    GET  /api/models        the models and the limits
    POST /api/continue      {model, prompt, tokens, temperature, top_p, seed} -> one JSON line for each token
    POST /api/bits          {model, text} -> one JSON line for each piece of the text, then the score
    POST /api/compressors   {text} -> bits per byte of xz and others

A closed connection ends the work for it.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from parbank.errors import ConfigError, ParbankError
from parbank.eval.compression import compressor_bpb
from parbank.serve.pages import page_route
from parbank.serve.player import MOST_TOKENS, Player
from parbank.serve.server import Address, TooLargeError, read_body, serve
from parbank.serve.worker import BusyError, Worker, WorkerJob

MOST_TEXT = 2_000_000
"""Bytes of a text, in UTF-8."""
MOST_BODY = 3 * MOST_TEXT
"""Bytes of a request: JSON writes a quotation mark or a newline as two bytes, a control character as six."""
MOST_JOBS = 8
MOST_COMPRESSING = 2


class JobResponse(StreamingResponse):
    """The items of a job, a JSON line each. The job ends when the answer does, also by a closed tab."""

    def __init__(self, job: WorkerJob) -> None:
        self._job = job
        super().__init__(_lines(job), media_type="application/x-ndjson")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


async def _lines(job: WorkerJob) -> AsyncIterator[bytes]:
    async for item in job.items():
        yield json.dumps(item).encode() + b"\n"


@dataclass(frozen=True)
class Playground:
    """The addresses above, over some models and the worker that runs them."""

    players: Sequence[Player]
    worker: Worker

    def make_app(self) -> Starlette:
        compressing = asyncio.Semaphore(MOST_COMPRESSING)

        async def compress(request: Request) -> Response:
            text = _read_text(await _read_json(request), "text")
            async with compressing:  # others wait: each takes a second of every core at most
                return JSONResponse(await asyncio.to_thread(compressor_bpb, text.encode()))

        return Starlette(
            routes=[
                page_route("playground.html", "/"),
                page_route("playground.css"),
                page_route("playground.js"),
                Route("/api/models", _answer(self._models)),
                Route("/api/continue", _answer(self._continue), methods=["POST"]),
                Route("/api/bits", _answer(self._bits), methods=["POST"]),
                Route("/api/compressors", _answer(compress), methods=["POST"]),
            ]
        )

    async def _models(self, request: Request) -> Response:
        limits = {"text_bytes": MOST_TEXT, "tokens": MOST_TOKENS, "requests": MOST_JOBS}
        return JSONResponse({"models": [player.describe() for player in self.players], "limits": limits})

    async def _continue(self, request: Request) -> Response:
        given = await _read_json(request)
        steps = self._player(given).write(
            _read_text(given, "prompt"),
            tokens=_read_number(given, "tokens", int),
            temperature=_read_number(given, "temperature", float),
            top_p=_read_number(given, "top_p", float),
            seed=_read_number(given, "seed", int),
        )
        return JobResponse(self.worker.submit(steps))

    async def _bits(self, request: Request) -> Response:
        given = await _read_json(request)
        return JobResponse(self.worker.submit(self._player(given).measure(_read_text(given, "text"))))

    def _player(self, given: Mapping[str, Any]) -> Player:
        number = _read_number(given, "model", int)
        if not 0 <= number < len(self.players):
            raise ConfigError(f"there is no model {number}; there are {len(self.players)}, counted from 0")
        return self.players[number]


def _answer(endpoint: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """The endpoint, with parbank's errors turned into answers that hold their message."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except BusyError as error:
            return JSONResponse({"error": str(error)}, status_code=503, headers={"retry-after": "1"})
        except TooLargeError as error:
            return JSONResponse({"error": str(error)}, status_code=413, headers={"connection": "close"})
        except ParbankError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        except ClientDisconnect:  # nobody reads the answer
            return Response(status_code=400)

    return answer


async def _read_json(request: Request) -> Mapping[str, Any]:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ConfigError("requests are JSON, with content-type application/json")
    body = await read_body(request.stream(), most=MOST_BODY)
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the request is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"the request is a JSON object, got {type(found).__name__}")
    return found


def _read_text(given: Mapping[str, Any], name: str) -> str:
    text = given.get(name)
    if not isinstance(text, str):
        raise ConfigError(f"{name!r} must be a text, got {text!r}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"{name!r} holds half of a surrogate pair, which is no character; remove it") from None
    if size > MOST_TEXT:
        raise TooLargeError(f"the text has {size:,} bytes, and {MOST_TEXT:,} are the most; use `parbank eval` for more")
    return text


def _read_number(given: Mapping[str, Any], name: str, kind: type) -> Any:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise ConfigError(f"{name!r} must be {'a whole number' if kind is int else 'a number'}, got {value!r}")
    try:
        return kind(value)
    except OverflowError:
        raise ConfigError(
            f"{name!r} is a number of {len(str(abs(value)))} digits; give one that fits 64 bits"
        ) from None


def serve_playground(
    players: Sequence[Player],
    address: Address,
    *,
    say: Callable[[str], None],
    open_browser: bool | None = None,
    threads: int | None = None,
) -> None:
    """Serves the playground until Ctrl-C."""
    worker = Worker(most=MOST_JOBS, threads=threads)
    try:
        app = Playground(players, worker).make_app()
        serve(lambda end: app, address, say=say, open_browser=open_browser, on_end=worker.stop)
    finally:
        worker.close()
