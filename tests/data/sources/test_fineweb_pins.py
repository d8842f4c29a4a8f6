"""What was fetched once is fetched again unchanged: revision and hashes are kept, and one process fetches at a time."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from parbank.data.sources.fineweb import REPOSITORY, SHARDS_AT, fetch_fineweb
from parbank.errors import DataError
from parbank.files import locked

TRAIN = "fineweb_train_000000.bin"


def fetch(out: Path, source: Path, shards: int = 1) -> None:
    fetch_fineweb(out, shards=shards, source=source, say=lambda line: None)


def change_a_token(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1030] ^= 1
    path.write_bytes(data)


def test_a_changed_file_is_replaced_and_a_changed_source_is_refused(hub: Path, tmp_path: Path) -> None:
    source, out = Path(shutil.copytree(hub, tmp_path / "hub")), tmp_path / "out"
    fetch(out, source)
    before = (out / TRAIN).read_bytes()
    pins = json.loads((out / "fetched.json").read_text())
    assert pins["files"][TRAIN] == hashlib.sha256(before).hexdigest()
    change_a_token(out / TRAIN)  # a valid shard, with another token
    fetch(out, source)
    assert (out / TRAIN).read_bytes() == before
    change_a_token(source / SHARDS_AT / TRAIN)
    fetch(out, source)  # what is here is whole, and nothing is fetched
    (out / TRAIN).unlink()
    with pytest.raises(
        DataError, match=rf"hub has changed: {TRAIN} is not the file that was fetched before: its sha256"
    ):
        fetch(out, source)
    assert not (out / TRAIN).exists()
    fetch(out, hub)  # a mirror with the right files will do
    assert (out / TRAIN).read_bytes() == before


def test_a_record_that_cannot_be_read_is_named(hub: Path, tmp_path: Path) -> None:
    for content in (b"\xff", b"[]", b'{"source": "x", "revision": "", "files": {"a": 1}}'):
        (tmp_path / "fetched.json").write_bytes(content)
        with pytest.raises(DataError, match=r"fetched\.json cannot be read"):
            fetch(tmp_path, hub)


def test_a_folder_without_commits_has_no_revision(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder and has no revision abc"):
        fetch_fineweb(tmp_path / "out", source=hub, revision="abc")
    assert not (tmp_path / "out").exists()


def test_a_second_fetch_waits_for_the_first(hub: Path, tmp_path: Path) -> None:
    said: list[str] = []
    second = threading.Thread(target=lambda: fetch_fineweb(tmp_path, source=hub, say=said.append))
    with locked(tmp_path / ".fetch.lock", tmp_path):
        second.start()
        until = time.monotonic() + 60
        while not said and time.monotonic() < until:
            time.sleep(0.01)
        assert said == [f"waiting for {said[0].split('waiting for ')[1]}"] if said else False
        assert f"process {os.getpid()}" in said[0]
        assert not (tmp_path / TRAIN).exists()
    second.join(timeout=60)
    assert (tmp_path / TRAIN).exists()


class Hub(ThreadingHTTPServer):
    """The part of the hub that the client asks: one data set, whose commits are folders."""

    def __init__(self, commits: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.commits, self.newest, self.asked = commits, next(iter(commits)), list[str]()


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *values: object) -> None: ...

    def _send(self, body: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _folder(self, revision: str) -> tuple[str, Path]:
        commit = self.server.newest if revision == "main" else revision
        return commit, self.server.commits[commit]

    def _describe(self, folder: Path, path: Path) -> dict[str, object]:
        data = path.read_bytes()
        about = {"type": "file", "path": path.relative_to(folder).as_posix(), "size": len(data), "oid": "0" * 40}
        if path.suffix == ".model":  # as on the hub: small files are git's own
            return {**about, "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
        return {**about, "lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}}

    def do_GET(self) -> None:
        words = [unquote(word) for word in urlsplit(self.path).path.strip("/").split("/")]
        if words[0] == "api":
            commit, folder = self._folder(words[5])
            if words[4] == "revision":
                found: object = {"id": REPOSITORY, "sha": commit}
            else:
                found = [self._describe(folder, path) for path in sorted(folder.rglob("*")) if path.is_file()]
            self._send(json.dumps(found).encode(), Content_Type="application/json")
            return
        commit, folder = self._folder(words[4])
        path = folder / "/".join(words[5:])
        if self.command == "GET":
            self.server.asked.append(f"{commit} {path.name}")
        etag = hashlib.sha256(path.read_bytes()).hexdigest()
        self._send(path.read_bytes(), ETag=f'"{etag}"', X_Repo_Commit=commit)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        paths = parse_qs(body)["paths"] if "=" in body else json.loads(body)["paths"]
        _, folder = self._folder(urlsplit(self.path).path.rsplit("/", 1)[1])
        found = [self._describe(folder, folder / path) for path in paths]
        self._send(json.dumps(found).encode(), Content_Type="application/json")


@pytest.fixture
def server(hub: Path, tmp_path: Path) -> Iterator[Hub]:
    later = Path(shutil.copytree(hub, tmp_path / "later"))
    for path in (later / SHARDS_AT).iterdir():
        change_a_token(path)
    with Hub({"a" * 40: hub, "b" * 40: later}) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def command(server: Hub, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The command with the real client: it reads its settings when it is imported, so it needs a process of its own."""
    address = f"http://127.0.0.1:{server.server_port}"
    environment = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(out.parent / "home"), "NO_PROXY": "127.0.0.1"}
    words = [sys.executable, "-m", "parbank", "data", "fetch", "fineweb", "--out", str(out), *more]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_real_client_keeps_to_the_commit_of_the_first_fetch(server: Hub, hub: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = command(server, out)
    assert done.returncode == 0, done.stderr
    assert (out / TRAIN).read_bytes() == (hub / SHARDS_AT / TRAIN).read_bytes()
    assert json.loads((out / "fetched.json").read_text())["revision"] == "a" * 40
    server.newest = "b" * 40  # the branch moves on
    done = command(server, out, "--shards", "2")
    assert done.returncode == 0, done.stderr
    assert server.asked[-1] == f"{'a' * 40} fineweb_train_000001.bin"
    assert (out / "fineweb_train_000001.bin").read_bytes() == (
        hub / SHARDS_AT / "fineweb_train_000001.bin"
    ).read_bytes()
    done = command(server, out, "--revision", "b" * 40)
    assert done.returncode == 2
    assert f"at revision {'a' * 40}, and {'b' * 40} was asked for" in done.stderr
