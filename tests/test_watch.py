"""The thread that notices a lost rank. The ranks of these tests are watches in one process, over real connections."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from parbank import watch
from parbank.errors import DataError, RankError
from parbank.watch import Watch, is_communication_error


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BEAT_SECONDS", 0.05)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes of processes that a watch would have ended."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


@pytest.fixture
def three(tmp_path: Path, ended: list[int]) -> Iterator[list[Watch]]:
    """Three ranks that watch each other, as threads of this process."""
    found = connect(tmp_path, 3)
    yield found
    for one in found:
        one.close()


def connect(folder: Path, world: int) -> list[Watch]:
    made: dict[int, Watch] = {}

    def make(rank: int) -> None:
        made[rank] = Watch(rank, world, dist.FileStore(str(folder / "store"), world))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return [made[rank] for rank in range(world)]


def vanish(one: Watch) -> None:
    """Closes the connections without a word, as the system does when a process is killed."""
    one.close()


def test_a_closed_connection_is_a_lost_rank(three: list[Watch]) -> None:
    assert [one.wait_for_reason(0.3) for one in three] == ["", "", ""]
    vanish(three[2])
    reasons = {one.wait_for_reason(20) for one in three[:2]}
    assert len(reasons) == 1, "rank 0 sees it and tells rank 1"
    assert reasons.pop().startswith("rank 2 was lost: its process was killed or crashed; ")


def test_the_loss_of_the_first_rank_is_seen_by_all(three: list[Watch]) -> None:
    vanish(three[0])
    assert all(one.wait_for_reason(20).startswith("rank 0 was lost") for one in three[1:])


def test_a_rank_that_leaves_is_not_lost(three: list[Watch]) -> None:
    for one in (three[1], three[0]):
        one.leave()
        vanish(one)
    assert three[2].wait_for_reason(0.3) == ""


def test_the_error_of_a_rank_reaches_the_others(three: list[Watch]) -> None:
    with pytest.raises(DataError), three[1].guard():
        raise DataError("no text")
    assert {one.wait_for_reason(20) for one in three} == {"rank 1 ended: no text"}


def test_an_error_of_communication_becomes_the_name_of_the_lost_rank(three: list[Watch]) -> None:
    vanish(three[1])
    with pytest.raises(RankError, match=r"^rank 1 was lost"), three[0].guard():
        raise RuntimeError("[third_party/gloo/pair.cc:547] Connection closed by peer")
    three[2].wait_for_reason(20)  # a guard does not wait so long for the reason of a signal
    with pytest.raises(RankError, match=r"^rank 1 was lost"), three[2].guard():
        os.kill(os.getpid(), signal.SIGTERM)  # as torchrun does


def test_other_errors_stay_as_they_are(three: list[Watch]) -> None:
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), three[0].guard():
        raise RuntimeError("shapes differ")
    with pytest.raises(SystemExit, match="3"), three[1].guard():
        sys.exit(3)
    assert not is_communication_error(ValueError("gloo"))


def test_nobody_lost_is_said_too(tmp_path: Path, ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_EXPLAIN_SECONDS", 0.2)
    first, second = connect(tmp_path, 2)
    with pytest.raises(RankError, match=r"cannot reach each other any more \(ncclSystemError\)"), first.guard():
        raise RuntimeError("ncclSystemError\nmore lines")
    for one in (first, second):
        one.close()


def test_a_main_thread_that_does_not_end_is_ended(
    tmp_path: Path, ended: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "GRACE_SECONDS", 1000.0)
    first, second = connect(tmp_path, 2)
    vanish(second)
    first.wait_for_reason(20)
    time.sleep(0.3)
    assert not ended, "it has some time"
    first._deadline = time.monotonic()  # which is over
    end = time.monotonic() + 60
    while not ended and time.monotonic() < end:
        time.sleep(0.01)
    first.close()
    assert set(ended) == {2}
    assert capfd.readouterr().err.startswith("error: rank 1 was lost")


def test_a_silent_rank_is_lost_and_a_slow_one_is_not(
    tmp_path: Path, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = connect(tmp_path, 2)
    assert first.wait_for_reason(1.5) == "", "it beats, whatever its main thread does"
    monkeypatch.setattr(second, "_beat", lambda: None)
    assert first.wait_for_reason(20).startswith("rank 1 was lost: it has not answered for 1 s (its process is stopped")
    for one in (first, second):
        one.close()


def test_a_stranger_is_not_taken_for_a_rank(tmp_path: Path, ended: list[int]) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    made: list[Watch] = []
    thread = threading.Thread(target=lambda: made.append(Watch(0, 2, dist.FileStore(str(tmp_path / "store"), 2))))
    thread.start()
    port, _ = json.loads(store.get("watch"))
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b'\x00\x00\x00\x10{"token": "abc"}')
        second = Watch(1, 2, store)
        thread.join(timeout=60)
    assert made[0].wait_for_reason(0.3) == second.wait_for_reason(0.3) == ""
    for one in (*made, second):
        one.close()
