"""The worker: a step of each job in turn, limits, errors and ends."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from parbank.errors import DataError
from parbank.serve import worker as module
from parbank.serve.worker import MOST_UNREAD, BusyError, Item, Worker, WorkerJob


async def collect(job: WorkerJob) -> list[Item]:
    return [item async for item in job.items()]


def count(name: str, order: list[str], until: int, start: threading.Event) -> Iterator[Item]:
    start.wait()
    for number in range(until):
        order.append(name)
        yield {"n": number}


def test_jobs_take_turns() -> None:
    """A long job does not keep a short one waiting."""
    order: list[str] = []
    start = threading.Event()

    async def both() -> list[list[Item]]:
        worker = Worker(most=2, threads=1)
        try:
            jobs = [worker.submit(count("long", order, 50, start)), worker.submit(count("short", order, 3, start))]
            start.set()
            return await asyncio.gather(*map(collect, jobs))
        finally:
            worker.close()

    long, short = asyncio.run(both())
    assert [item["n"] for item in long] == list(range(50))
    assert len(short) == 3
    assert order[:6] == ["long", "short"] * 3


def test_one_job_too_many_is_refused_and_later_taken() -> None:
    start = threading.Event()

    async def crowd() -> None:
        worker = Worker(most=1, threads=1)
        try:
            first = worker.submit(count("first", [], 2, start))
            with pytest.raises(BusyError, match="busy with 1 request"):
                worker.submit(iter(()))
            start.set()
            assert len(await collect(first)) == 2
            while worker.active:  # the end of its items comes just before the end of the job
                await asyncio.sleep(0.01)
            assert await collect(worker.submit(iter([{"a": 1}]))) == [{"a": 1}]
        finally:
            worker.close()

    asyncio.run(crowd())


def test_cancel_ends_the_steps() -> None:
    closed = threading.Event()

    def endless() -> Iterator[Item]:
        try:
            while True:
                yield {}
        finally:
            closed.set()

    async def cancel() -> None:
        worker = Worker(most=1, threads=1)
        try:
            job = worker.submit(endless())
            async for _ in job.items():
                job.cancel()
            assert closed.is_set()
        finally:
            worker.close()

    asyncio.run(cancel())


def test_errors_reach_the_reader_and_the_worker_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: Exception) -> Iterator[Item]:
        yield {"a": 1}
        raise error

    async def run() -> tuple[list[Item], list[Item], list[Item]]:
        worker = Worker(most=3, threads=1)
        try:
            mendable = await collect(worker.submit(fail(DataError("no text"))))
            bug = await collect(worker.submit(fail(ZeroDivisionError("secret"))))
            return mendable, bug, await collect(worker.submit(iter([{"b": 2}])))
        finally:
            worker.close()

    mendable, bug, after = asyncio.run(run())
    assert mendable == [{"a": 1}, {"error": "no text"}]
    assert "secret" not in bug[1]["error"]
    assert "ZeroDivisionError: secret" in capsys.readouterr().err
    assert after == [{"b": 2}]


def test_close_ends_jobs_under_way() -> None:
    def endless() -> Iterator[Item]:
        while True:
            yield {}

    async def run() -> None:
        worker = Worker(most=1, threads=1)
        job = worker.submit(endless())
        reading = asyncio.ensure_future(collect(job))
        await asyncio.to_thread(worker.close)
        await reading
        with pytest.raises(BusyError, match="ending"):
            worker.submit(iter(()))

    asyncio.run(run())


class ClosingLoop:
    """An event loop that closes just after it has said that it is open."""

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, *work: Any) -> None:
        raise RuntimeError("Event loop is closed")


def test_a_loop_that_closes_during_a_step_does_not_end_the_worker() -> None:
    loop: Any = ClosingLoop()
    assert WorkerJob(iter([{}]), loop).step()


def test_a_reader_that_stops_fills_no_memory_and_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps wait for it, other jobs go on, and in the end it is cancelled."""
    made = 0

    def endless() -> Iterator[Item]:
        nonlocal made
        while True:
            made += 1
            yield {}

    async def run() -> None:
        worker = Worker(most=3, threads=1)  # a job leaves its place a moment after its end
        try:
            stuck = worker.submit(endless())
            while not stuck.must_wait():
                await asyncio.sleep(0.01)
            await collect(worker.submit(iter([{}])))  # by its end, the step under way has ended, too
            before = made
            assert len(await collect(worker.submit(iter([{"n": n} for n in range(500)])))) == 500
            assert made == before, "the steps wait, and others go on"
            monkeypatch.setattr(module, "STUCK_SECONDS", 0.0)
            while worker.active:
                await asyncio.sleep(0.01)
            assert len(await collect(stuck)) == made, "what was made can still be read, and then it ends"
        finally:
            worker.close()

    asyncio.run(run())


def test_a_slow_reader_gets_everything() -> None:
    async def run() -> list[int]:
        worker = Worker(most=1, threads=1)
        found = []
        try:
            async for item in worker.submit(iter([{"n": n} for n in range(5 * MOST_UNREAD)])).items():
                found.append(item["n"])
                await asyncio.sleep(0.001)
        finally:
            worker.close()
        return found

    assert asyncio.run(run()) == list(range(5 * MOST_UNREAD))
