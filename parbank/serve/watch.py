"""The page of a run that grows while it trains.

    GET /           the page of `parbank report`, with a script that keeps it fresh
    GET /page       the same if it has changed since `If-None-Match`; `x-run` says whether the run still goes

The page is made anew from the run's folder when a browser asks and the files have changed. So training knows nothing of
it, and pays nothing if nobody looks.
"""

import asyncio
import base64
import hashlib
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from parbank.errors import ConfigError, ParbankError
from parbank.files import is_running
from parbank.report.page import asset, page
from parbank.report.record import is_going, is_run, read_record
from parbank.report.run import run_page
from parbank.report.text import shown
from parbank.serve.pages import page_route
from parbank.serve.server import POLICY, Address, serve

READ = ("config.json", "metrics.jsonl", "summary.json", "details.json")
PAUSE_SECONDS = 2.0
"""The least time between two versions of the page. A browser asks as often."""
PAUSE_FACTOR = 20
"""The least time between two versions, as a multiple of the time to make one: at most 5% of one core."""
NOBODY_SECONDS = 10.0
"""The time that the server waits for a first browser after the run has ended."""
LATE_SECONDS = 60.0
"""The time that the server waits, after the run has ended, for a known browser to fetch the last page."""

_BAR = (
    '<aside id="watch" aria-label="While it trains"><span id="watch-when">Live.</span> '
    '<label><input type="checkbox" id="watch-pause"> Pause</label><span id="watch-end" role="status"></span></aside>'
)


class Watched:
    """A run's folder, and its page as it was made last."""

    def __init__(self, folder: Path, *, trainer: int | None = None) -> None:
        """`trainer`: the process that will train there. Without it, the folder must belong to a run that goes."""
        self.folder, self._trainer = folder, trainer
        self._lock = threading.Lock()
        self._html, self._tag, self._next = b"", "", 0.0

    @property
    def goes(self) -> bool:
        """Whether the run still goes: a process holds its folder, or is about to."""
        return (self._trainer is not None and is_running(self._trainer)) or is_going(self.folder)

    def make(self) -> tuple[bytes, str]:
        """The page and its tag. Made anew if the files have changed and the last version is old enough."""
        with self._lock:
            goes = self.goes  # before the files are read: the last page of a run must hold its end
            tag = self._read_tag(goes)
            if tag != self._tag and (time.monotonic() >= self._next or not goes):
                began = time.monotonic()
                self._html, self._tag = add_script(self._draw()).encode("utf-8", "replace"), tag
                taken = time.monotonic() - began
                self._next = began + max(PAUSE_SECONDS, PAUSE_FACTOR * taken)
            return self._html, self._tag

    def _draw(self) -> str:
        if not is_run(self.folder):
            about = "<p>The run prepares its data. This page fills by itself when training begins.</p>"
            return page("parbank", f"<h1>{shown(self.folder.name)}</h1>{about}", [])
        try:
            return run_page(read_record(self.folder))
        except ParbankError as error:  # a file is being replaced
            return page("parbank", f"<h1>{shown(self.folder.name)}</h1><p>{shown(error)}</p>", [])

    def _read_tag(self, goes: bool) -> str:
        """Differs whenever one of the files does. The last tag of a run ends with "ended"."""
        marks = []
        for name in READ:
            try:
                found = (self.folder / name).stat()
                marks.append(f"{found.st_mtime_ns:x}-{found.st_size:x}")
            except OSError:
                marks.append("0")
        return f'"{".".join(marks)}.{"going" if goes else "ended"}"'


def add_script(html: str) -> str:
    """The page with the bar and the script. The policy in the page forbids all requests, so it is removed; the policy in the
    server's header allows requests to this server."""
    free, count = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html, count=1)
    assert count == 1, "a page of parbank.report has a policy"
    free = free.replace("</head>", '<link rel="stylesheet" href="watch.css"></head>', 1)
    free = free.replace("</header>", f"</header>{_BAR}", 1)
    return free.replace("</body>", '<script src="watch.js"></script></body>', 1)


def make_policy() -> str:
    """The content policy of other pages, plus the styles and the script inside a report."""
    script = base64.b64encode(hashlib.sha256(asset("page.js").encode()).digest()).decode()
    free = POLICY.replace("script-src 'self'", f"script-src 'self' 'sha256-{script}'")
    return free.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")


class WatchSite:
    """The addresses above, and the end: when the run has ended and its last page was fetched."""

    def __init__(self, watched: Watched) -> None:
        self._watched, self._policy = watched, make_policy()
        self._asked, self._last_fetched = False, threading.Event()

    def make_app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/page", self._page),
                page_route("watch.css"),
                page_route("watch.js"),
            ]
        )

    async def _page(self, request: Request) -> Response:
        self._asked = True
        html, tag = await asyncio.to_thread(self._watched.make)
        ended = tag.endswith('ended"')
        headers = {"etag": tag, "x-run": "ended" if ended else "going", "content-security-policy": self._policy}
        if ended and request.url.path == "/page":
            self._last_fetched.set()
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(html, media_type="text/html", headers=headers)

    def wait_for_the_end(self) -> None:
        """Returns when the run has ended and browsers had the time to fetch its last page."""
        while self._watched.goes:
            time.sleep(0.5)
        self._last_fetched.wait(LATE_SECONDS if self._asked else NOBODY_SECONDS)
        if self._last_fetched.is_set():
            time.sleep(2 * PAUSE_SECONDS)  # for other tabs


def watch_run(
    folder: Path,
    address: Address,
    *,
    say: Callable[[str], None],
    open_browser: bool | None = None,
    trainer: int | None = None,
    listening: socket.socket | None = None,
) -> None:
    """Serves the page of a run until the run has ended, or until Ctrl-C. See `Watched` for `trainer`, `serve` for
    `listening`."""
    watched = Watched(folder, trainer=trainer)
    if not watched.goes:
        if not is_run(folder):
            raise ConfigError(f"{folder} holds no run; give the folder of a run that trains now")
        raise ConfigError(f"the run in {folder} does not train now; `parbank report {folder}` makes its page")
    site = WatchSite(watched)

    def make_app(end: Callable[[], None]) -> Starlette:
        def follow() -> None:
            site.wait_for_the_end()
            end()

        threading.Thread(target=follow, name="parbank-watch-run", daemon=True).start()
        return site.make_app()

    serve(make_app, address, say=say, open_browser=open_browser, listening=listening)
    if not watched.goes:
        say(f"the run in {folder} has ended; `parbank report {folder}` makes its page")
