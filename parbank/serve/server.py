"""A small local web server: it listens on loopback unless told otherwise, and answers its own pages only.

A web page from anywhere can send requests to programs on your machine. So every request must name this server in `Host`
(another name may be DNS rebinding), and a request with an `Origin` must come from this server's own pages.
"""

import contextlib
import errno
import ipaddress
import os
import re
import socket
import sys
import webbrowser
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parbank.errors import ConfigError, ParbankError

LOOPBACK = "127.0.0.1"
MOST_CONNECTIONS = 64
GRACE_SECONDS = 3
"""The time that answers under way have to end after Ctrl-C."""
_DROPPED = 10  # a request that is too long is read up to 10 times the limit, and then the connection is closed

# The browser loads nothing from elsewhere, runs no script but ours, and shows the page in no frame of another site.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True, kw_only=True)
class Address:
    """The host and port of a server."""

    host: str = LOOPBACK
    port: int = 0
    """0 takes any free port."""
    names: tuple[str, ...] = field(default=())
    """More names by which browsers may call this server, such as that of a proxy."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be 0 (any free port) to 65535, got {self.port}")
        object.__setattr__(self, "host", self.host.lower())  # as a browser writes names

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def url(self) -> str:
        """The address to type into a browser on this machine."""
        host = LOOPBACK if self.host in ("0.0.0.0", "") else "::1" if self.host == "::" else self.host
        return f"http://[{host}]:{self.port}/" if ":" in host else f"http://{host}:{self.port}/"

    def allows(self, host: str) -> bool:
        """Whether a request with this `Host` is meant for this server.

        The name decides. The port may be that of a tunnel, such as `ssh -L`, or of a proxy. Beyond loopback, any IP
        address is allowed: DNS rebinding needs a name.
        """
        name = read_name(host)
        if name in {"localhost", "127.0.0.1", "::1", self.host, *self.names}:
            return True
        return not self.is_loopback and (_is_ip(name) or name == socket.gethostname().lower())


def read_name(host: str) -> str:
    """The name in a `Host` header, without the port and the brackets of IPv6."""
    found = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:\[\]]*)(:\d{1,5})?", host.strip().lower())
    return found[1].strip("[]") if found else ""


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class RequestGuard:
    """ASGI middleware: refuses requests from elsewhere, and gives every answer the headers that keep the page closed."""

    def __init__(self, app: ASGIApp, *, address: Address) -> None:
        self._app, self._address = app, address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_closed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("content-security-policy", POLICY)
            await send(message)

        refusal = self._refuse(Headers(scope=scope))
        if refusal is None:
            await self._app(scope, receive, send_closed)
        else:
            await JSONResponse({"error": refusal}, status_code=403)(scope, receive, send_closed)

    def _refuse(self, headers: Headers) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._address.allows(host):
            return f"this server does not answer to the name {host!r}; open {self._address.url}, or start it with --allow-host"
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return f"requests from pages of {origin!r} are refused; open {self._address.url}"
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return f"requests from pages of other sites are refused; open {self._address.url}"
        return None


def listen(address: Address) -> tuple[socket.socket, Address]:
    """A socket at the address, and the address with the port that it got."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port whose server has just ended is free
        found.bind((address.host, address.port))
        found.listen(MOST_CONNECTIONS)
    except OSError as error:
        found.close()
        named = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        remedy = (
            "choose an address of this machine by --host"
            if named
            else "choose another by --port, or any free one by --port 0"
        )
        raise ConfigError(
            f"cannot listen on {address.host}, port {address.port}: {error.strerror or error}; {remedy}"
        ) from error
    return found, replace(address, port=found.getsockname()[1])


def serve(
    make_app: Callable[[Callable[[], None]], Starlette],
    address: Address,
    *,
    say: Callable[[str], None],
    open_browser: bool | None,
    on_end: Callable[[], None] = lambda: None,
    listening: socket.socket | None = None,
) -> None:
    """Serves until Ctrl-C, SIGTERM, or the app calls the function that it gets. `on_end` is called then: it ends long
    answers. `listening` is a socket that listens at the address already."""
    found = address
    if listening is None:
        listening, found = listen(address)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            super().handle_exit(sig, frame)
            on_end()

    server: Server

    def end() -> None:
        server.should_exit = True
        on_end()

    app = RequestGuard(make_app(end), address=found)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server = Server(config)
    say(f"{found.url} (Ctrl-C ends)")
    if not found.is_loopback:
        say(f"warning: every machine that reaches {found.host} can use this page; there is no password")
    if open_browser if open_browser is not None else has_desktop():
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(found.url)
    with listening, contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again once it has ended
        server.run(sockets=[listening])


def has_desktop() -> bool:
    """Whether this machine has a desktop to open a page on. Without one, a browser might start in the terminal."""
    if not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform == "darwin" or any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY"))


class TooLargeError(ParbankError):
    """A request that is longer than the limit."""


async def read_body(chunks: AsyncIterator[bytes], *, most: int) -> bytes:
    """The body of a request, refused if it is longer than `most` bytes. The rest is read and dropped: a browser that still
    sends does not see the refusal."""
    parts: list[bytes] = []
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size <= most:
            parts.append(chunk)
        elif size > _DROPPED * most:
            break
    if size > most:
        raise TooLargeError(f"the request is longer than {most:,} bytes, the most that is read; send less text")
    return b"".join(parts)


def join_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names of hosts as `Address` compares them."""
    return tuple(name.strip().lower().strip("[]") for name in names if name.strip())
