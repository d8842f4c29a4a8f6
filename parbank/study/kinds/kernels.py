"""Micro-benchmarks of kernels with the statistics of a study: each arm is timed beside the code that it would replace.

Times are medians of single runs on random data. The two calls take turns, so that a card that warms up slows both.
On a GPU each call is a CUDA graph, without its host code, and the L2 cache is overwritten before every run.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from parbank.config import choose
from parbank.study.kernels import KERNELS, PORTABLE, Bench, Call
from parbank.study.kinds.base import Kind
from parbank.study.study import Job, Study
from parbank.training.compiled import use_compile_cache

WARMUP, TURNS, REPEATS = 5, 5, 10  # repeats in each turn
FLUSH_BYTES = 256 * 2**20  # five times the L2 cache of an H200


class Kernels(Kind):
    """Times pairs of calls. A seed is a repetition with other random numbers."""

    name = "kernels"
    unit = "ms"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        use_compile_cache()

    @classmethod
    def check(cls, study: Study) -> None:
        for arm in study.arms:
            choose(KERNELS, arm.name, "an arm of a study of kernels")

    def measure(self, study: Study, job: Job) -> dict[str, Any]:
        began, device = time.perf_counter(), self.runtime.device
        if job.arm not in PORTABLE:
            Bench(device, job.seed).need_cuda(f"{job.arm} compares kernels, which a CPU does not have: it")
        if device.type == "cuda":
            torch._dynamo.reset()  # every job compiles anew: after eight versions of a function PyTorch would give up
        calls = dict(zip(("value", "against"), KERNELS[job.arm](Bench(device, job.seed))))
        ready = warm_up(calls, device)
        with self.watching() as seen:
            found = time_calls(ready, device)
        return found | seen | {"wall_seconds": time.perf_counter() - began}


def warm_up(calls: dict[str, Call], device: torch.device) -> dict[str, Call]:
    """The calls, compiled; on a GPU as CUDA graphs."""
    for call in calls.values():
        for _ in range(WARMUP):
            call()
    if device.type != "cuda":
        return calls
    torch.cuda.synchronize(device)
    return {name: _capture(call) for name, call in calls.items()}


def time_calls(calls: dict[str, Call], device: torch.device) -> dict[str, float]:
    """The median milliseconds of each call, warm."""
    measure = _on_gpu(device) if device.type == "cuda" else _on_host
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            times[name] += measure(call)
    return {name: statistics.median(found) for name, found in times.items()}


def _on_host(call: Call) -> list[float]:
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        found.append(1e3 * (time.perf_counter() - began))
    return found


def _on_gpu(device: torch.device) -> Callable[[Call], list[float]]:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def measure(call: Call) -> list[float]:
        events = []
        for _ in range(REPEATS):
            flush.zero_()  # the host is ahead of the device when it launches the call
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize(device)
        return [begin.elapsed_time(end) for begin, end in events]

    return measure


def _capture(call: Call) -> Call:
    """The replay of a CUDA graph of the call. What the call holds must live as long as the graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()

    def replay(held: Call = call) -> None:
        graph.replay()

    return replay
