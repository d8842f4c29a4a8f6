"""One thread that runs the models for all requests, a step of each in turn.

A model is not made for several threads: sampling switches it to evaluation and back, and a CUDA graph must not be
captured while another thread computes. In turn, a short request is not kept waiting by a long one.
"""

import asyncio
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

from parbank.errors import ParbankError
from parbank.threads import use_threads

Item = dict[str, Any]
MOST_UNREAD = 64
"""Unread items at which a job waits for its reader: a client that reads slowly must not fill the memory."""
STUCK_SECONDS = 60.0
"""A job is cancelled if it waits for its reader for so long: other requests need its place."""
_POLL = 0.02  # seconds between looks at readers, where all of them are behind


class BusyError(ParbankError):
    """More requests at once than the server answers."""


class WorkerJob:
    """A request on its way: steps that the worker takes, and the items they give, for one reader."""

    def __init__(self, steps: Iterator[Item], loop: asyncio.AbstractEventLoop) -> None:
        self._steps, self._loop = steps, loop
        self._items: asyncio.Queue[Item | None] = asyncio.Queue()
        self._cancelled = threading.Event()
        self._behind_since: float | None = None

    def must_wait(self) -> bool:
        """Whether the next step must wait for the reader. Cancels a job that has waited for too long."""
        if self._cancelled.is_set() or self._items.qsize() < MOST_UNREAD:
            self._behind_since = None
            return False
        now = time.monotonic()
        self._behind_since = self._behind_since or now
        if now - self._behind_since > STUCK_SECONDS:
            self.cancel()
        return True

    def cancel(self) -> None:
        """Ends the work before its next step. A job that has ended stays as it is."""
        self._cancelled.set()

    async def items(self) -> AsyncIterator[Item]:
        """Yields the steps' results as they come. An error ends them with {"error": message}."""
        while (item := await self._items.get()) is not None:
            yield item

    def step(self) -> bool:
        """Takes one step, in the worker's thread. False: there are no more."""
        if self._cancelled.is_set():
            return self._end()
        try:
            item = next(self._steps, None)
        except ParbankError as error:
            return self._end({"error": str(error)})
        except Exception:  # a bug: it must not end the worker
            traceback.print_exc()
            return self._end({"error": "an error in parbank ended this request; the terminal of the server shows it"})
        if item is None:
            return self._end()
        self._put(item)
        return True

    def _end(self, last: Item | None = None) -> bool:
        close = getattr(self._steps, "close", None)
        if close is not None:
            close()
        if last is not None:
            self._put(last)
        self._put(None)
        return False

    def _put(self, item: Item | None) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody reads any more
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)


class Worker:
    """Runs at most `most` jobs, one step of each in turn, in a thread of its own."""

    def __init__(self, *, most: int, threads: int | None = None) -> None:
        self._most, self._threads = most, threads
        self._jobs: deque[WorkerJob] = deque()
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="parbank-serve", daemon=True)
        self._thread.start()

    @property
    def active(self) -> int:
        """Jobs that have not ended."""
        with self._change:
            return len(self._jobs)

    def submit(self, steps: Iterator[Item]) -> WorkerJob:
        """A job for these steps. Call it in the event loop that reads the items."""
        job = WorkerJob(steps, asyncio.get_running_loop())
        with self._change:
            if self._closed:
                raise BusyError("the server is ending")
            if len(self._jobs) >= self._most:
                raise BusyError(
                    f"the server is busy with {self._most} requests, the most at once; try again in a moment"
                )
            self._jobs.append(job)
            self._change.notify()
        return job

    def stop(self) -> None:
        """Cancels every job and takes no more."""
        with self._change:  # its lock may be taken twice by one thread, as a signal handler does
            self._closed = True
            for job in self._jobs:
                job.cancel()
            self._change.notify()

    def close(self) -> None:
        """Stops, and waits until the thread has ended: at most one step."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        with use_threads(self._threads):  # OpenMP has a number of threads for each thread that calls it
            while True:
                with self._change:
                    self._change.wait_for(lambda: self._jobs or self._closed)
                    if not self._jobs:
                        return
                    behind = 0
                    while behind < len(self._jobs) and self._jobs[0].must_wait():
                        self._jobs.rotate(-1)
                        behind += 1
                    if behind == len(self._jobs):
                        self._change.wait(_POLL)
                        continue
                    job = self._jobs[0]
                going = job.step()
                with self._change:
                    self._jobs.popleft()  # only this thread takes jobs away
                    if going:
                        self._jobs.append(job)
