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

from parbank.data.dataset import open_shards
from parbank.data.sources.fineweb import REPOSITORY, SHARDS_AT, fetch_fineweb
from parbank.data.sources.pins import Pins
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


def test_files_of_the_user_are_not_overwritten(hub: Path, tmp_path: Path) -> None:
    """Of other programs, under the names of the data set: a valid shard with another token, and a text."""
    for name in (TRAIN, "fineweb_val_000000.bin", "fineweb_1024_bpe.model"):
        out = tmp_path / name
        out.mkdir()
        if name == TRAIN:
            shutil.copy(hub / SHARDS_AT / TRAIN, out)
            change_a_token(out / TRAIN)
        else:
            (out / name).write_bytes(b"years of work")
        before = (out / name).read_bytes()
        with pytest.raises(
            DataError, match=rf"{name} exists and is not the file of .*hub\d+ \(its sha256 .*it stays as it is"
        ):
            fetch(out, hub)
        assert [path.name for path in out.iterdir()] == [name], "nothing was fetched beside it"
        assert (out / name).read_bytes() == before


def test_files_that_are_those_of_the_source_are_taken_over(hub: Path, tmp_path: Path) -> None:
    """As after a kill between the file and its record, or by a parbank that kept none."""
    shutil.copy(hub / SHARDS_AT / TRAIN, tmp_path)
    inode = (tmp_path / TRAIN).stat().st_ino
    fetch(tmp_path, hub)
    assert (tmp_path / TRAIN).stat().st_ino == inode
    assert TRAIN in json.loads((tmp_path / "fetched.json").read_text())["files"]


def test_a_folder_of_the_user_stays_where_nothing_could_be_fetched(hub: Path, tmp_path: Path) -> None:
    own, work = tmp_path / "own", tmp_path / "work" / ".fetching"
    own.mkdir()
    with pytest.raises(DataError, match="has 3 training shards, 9 were asked for"):
        fetch(own, hub, shards=9)
    assert own.is_dir()
    work.mkdir(parents=True)
    (work / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match=r"\.fetching exists, and would be deleted; move it away"):
        fetch(work.parent, hub)
    assert (work / "thesis.txt").exists()


def test_what_was_fetched_is_what_is_opened(hub: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fetch(out, hub, shards=2)
    whole = open_shards(out).fingerprint
    (out / "fineweb_train_000001.bin").unlink()  # the user needs room
    assert open_shards(out).fingerprint != whole
    shutil.copy(hub / SHARDS_AT / TRAIN, out / "other_train_000000.bin")
    with pytest.raises(DataError, match=r"other_train_000000\.bin was not fetched: .*fetched\.json does not name it"):
        open_shards(out)
    (out / "other_train_000000.bin").unlink()
    change_a_token(out / "fineweb_val_000000.bin")
    with pytest.raises(DataError, match=r"fineweb_val_000000\.bin is not the file that was fetched .*data fetch"):
        open_shards(out)
    (out / "fineweb_val_000000.bin").unlink()
    shutil.copy(hub / SHARDS_AT / "fineweb_val_000000.bin", out / "fineweb_val_000001.bin")
    with pytest.raises(DataError, match="fineweb_val_000001"):
        open_shards(out)
    (out / "fineweb_val_000001.bin").unlink()
    fetch(out, hub)
    assert len(open_shards(out).val) > 0


def test_what_was_fetched_is_on_the_disk_before_its_record(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    fsync, add = os.fsync, Pins.add

    def watch(handle: int) -> None:
        fsync(handle)
        synced.add(os.fstat(handle).st_ino)

    def check(self: Pins, file: Path) -> None:
        assert {file.stat().st_ino, file.parent.stat().st_ino} <= synced, "the file, and the folder with its name"
        add(self, file)

    monkeypatch.setattr(os, "fsync", watch)
    monkeypatch.setattr(Pins, "add", check)
    fetch(tmp_path / "out", hub)


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
