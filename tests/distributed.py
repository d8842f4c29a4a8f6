"""Runs a function on several processes that form a process group, for tests of everything that communicates.

    def check() -> int: ...                       # a module-level function: children import it by name
    results = run_distributed_test(check, world_size=3)

Nothing is left to chance that could make such a test flaky or endless: the rendezvous is a file in a fresh folder and gloo
takes ports from the OS, so runs never collide; every collective and the whole test have a time limit; when a rank fails or
dies, the others get a moment to notice and are then ended; and the child's own traceback is what the test reports.
"""

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GRACE_SECONDS = 30.0  # what the surviving ranks get, to find out by themselves that one of them is gone


@dataclass
class DistributedTestError(AssertionError):
    """Some ranks failed. Holds what each one said, so that a test may also ask for a failure and look at it."""

    message: str
    tracebacks: dict[int, str] = field(default_factory=dict)
    exit_codes: dict[int, int | None] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


def run_distributed_test(
    fn: Callable[..., Any],
    world_size: int,
    backend: str = "gloo",
    timeout: float = 300.0,
    args: Sequence[Any] = (),
    collective_timeout: float = 120.0,
) -> list[Any]:
    """Calls `fn(*args)` on every rank of a fresh process group and returns what each rank returned, in order of rank.

    `fn`, `args` and the results must pickle. Raises DistributedTestError with the child's traceback if any rank failed,
    was killed, or was not done after `timeout` seconds.
    """
    context = get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="parbank-dist-") as folder:
        store = str(Path(folder) / "store")
        pipes: list[Connection] = []
        children = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(
                target=_child, args=(rank, world_size, backend, store, collective_timeout, sender, fn, tuple(args))
            )
            child.start()
            sender.close()  # so that the pipe reads as closed once the child is gone
            pipes.append(receiver)
            children.append(child)
        try:
            reports = _collect(pipes, timeout)
        finally:
            for child, pipe in zip(children, pipes):
                # A rank that has reported is on its way out; one that has not is past its time.
                child.join(timeout=30.0 if pipe.closed else 0.0)
                if child.is_alive():
                    child.kill()
                    child.join()
    return _judge(reports, [child.exitcode for child in children], timeout)


def _collect(pipes: list[Connection], timeout: float) -> list[tuple[str, Any] | None]:
    """One report per rank: ("result", value), ("error", traceback), or None from a rank that never said anything."""
    reports: list[tuple[str, Any] | None] = [None] * len(pipes)
    pending = dict(enumerate(pipes))
    deadline = time.monotonic() + timeout
    while pending and (left := deadline - time.monotonic()) > 0:
        ready = set(map(id, wait(list(pending.values()), timeout=left)))
        for rank in [r for r, pipe in pending.items() if id(pipe) in ready]:
            pipe = pending.pop(rank)
            try:
                reports[rank] = pipe.recv()
            except EOFError:  # died without a word
                reports[rank] = None
            pipe.close()
            report = reports[rank]
            if report is None or report[0] == "error":
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return reports


def _judge(reports: list[tuple[str, Any] | None], exit_codes: list[int | None], timeout: float) -> list[Any]:
    tracebacks = {rank: report[1] for rank, report in enumerate(reports) if report and report[0] == "error"}
    silent = [rank for rank, report in enumerate(reports) if report is None]
    results = {rank: pickle.loads(report[1]) for rank, report in enumerate(reports) if report and report[0] == "result"}
    if not tracebacks and not silent:
        return [results[rank] for rank in range(len(reports))]
    lines = [f"{len(tracebacks) + len(silent)} of {len(reports)} ranks failed (limit {timeout:.0f} s)"]
    lines += [f"rank {rank} gave no result; exit code {exit_codes[rank]}" for rank in silent]
    lines += [f"rank {rank}:\n{text}" for rank, text in tracebacks.items()]
    raise DistributedTestError("\n".join(lines), tracebacks, dict(enumerate(exit_codes)), results)


def _child(
    rank: int,
    world_size: int,
    backend: str,
    store: str,
    collective_timeout: float,
    sender: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)  # many ranks share few cores
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    try:
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=collective_timeout),
        )
        # Plain pickle carries tensors by value. The pipe's own would share memory with a process that is about to end.
        sender.send(("result", pickle.dumps(fn(*args))))
    except BaseException:
        sender.send(("error", traceback.format_exc()))
    finally:
        sender.close()
        # A group with a dead member may block in an orderly shutdown, and there is nothing left to save.
        os._exit(0)
