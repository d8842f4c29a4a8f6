"""The page of a run that trains: what it is made of, when it is made anew, and when the run has ended."""

import base64
import hashlib
import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from parbank.errors import ConfigError
from parbank.files import HOLDER
from parbank.report.record import read_record
from parbank.report.run import run_page
from parbank.serve.server import Address
from parbank.serve.watch import Watched, WatchSite, add_script, make_policy, watch_run
from tests.report.folders import make_run
from tests.serve.site import open_app


def hold(folder: Path, pid: int, host: str = "") -> None:
    about = {"pid": pid, "host": host or socket.gethostname(), "since": "now"}
    (folder / HOLDER).write_text(json.dumps(about))


def find_dead_process() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        return process.pid


def test_the_page_is_that_of_report_and_keeps_itself_fresh(tmp_path: Path) -> None:
    html = run_page(read_record(make_run(tmp_path / "run")))
    live = add_script(html)
    assert "Content-Security-Policy" in html
    assert "Content-Security-Policy" not in live
    assert live.count('src="watch.js"') == 1
    inside = re.findall(r"<script>(.*?)</script>", live, re.DOTALL)
    assert len(inside) == 1
    digest = base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in make_policy(), "the policy allows the one script of the page"
    assert "script-src 'self' 'unsafe-inline'" not in make_policy()


def test_a_run_goes_while_its_process_does(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert not watched.goes
    hold(tmp_path, os.getpid())
    assert watched.goes
    dead = find_dead_process()
    hold(tmp_path, dead)
    assert not watched.goes, "killed: its file is still there"
    hold(tmp_path, dead, host="another-machine")
    assert watched.goes, "a process of another machine is not ours to judge"
    (tmp_path / HOLDER).write_text("{")
    assert not watched.goes
    assert Watched(tmp_path, trainer=os.getpid()).goes


def test_the_page_is_made_when_files_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parbank.serve.watch.PAUSE_SECONDS", 0.0)
    monkeypatch.setattr("parbank.serve.watch.PAUSE_FACTOR", 0.0)
    folder = tmp_path / "run"
    watched = Watched(folder, trainer=os.getpid())
    html, tag = watched.make()
    assert b"prepares its data" in html
    make_run(folder)
    first, changed = watched.make()
    assert changed != tag
    assert watched.make() == (first, changed)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10000, "loss": 1.0}\n')
    assert watched.make()[1] != changed


def test_the_page_is_not_made_too_often(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", trainer=os.getpid())
    before = watched.make()
    make_run(tmp_path / "run")
    watched._next = time.monotonic() + 1000
    assert watched.make() == before
    watched._trainer = None  # the run has ended: its last page is made at once
    assert watched.make()[1].endswith('ended"')


def test_only_a_run_that_trains_is_watched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        watch_run(tmp_path, Address(), say=print)
    with pytest.raises(ConfigError, match="does not train now; `parbank report"):
        watch_run(make_run(tmp_path / "run"), Address(), say=print)


def test_the_server_ends_after_the_last_page_was_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parbank.serve.watch.PAUSE_SECONDS", 0.0)
    folder = make_run(tmp_path / "run")
    hold(folder, os.getpid())
    site = WatchSite(Watched(folder))
    with open_app(site.make_app()) as address:
        with urllib.request.urlopen(f"{address.url}page") as answer:
            assert answer.headers["x-run"] == "going"
            tag = answer.headers["etag"]
        (folder / HOLDER).unlink()
        with urllib.request.urlopen(
            urllib.request.Request(f"{address.url}page", headers={"if-none-match": tag})
        ) as answer:
            assert answer.headers["x-run"] == "ended"
        site.wait_for_the_end()
