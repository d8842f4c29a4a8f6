"""GPU work replayed as CUDA graphs: hundreds of launches become one.

A pass of a small model is many short kernels, and Python needs about as long to launch them as the GPU to run them. A
graph replays the same kernels on the same memory. So inputs are copied to the addresses that were captured, and
results stay in tensors of the work or are used at once.
"""

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from parbank.gpu import on_device

Places = list[int | None]
Result = TypeVar("Result")


def addresses(tensors: Iterable[Tensor | None]) -> Places:
    """The addresses of tensors; None for a missing tensor."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


@dataclass
class _Recorded:
    """The graph of one set of shapes, and the tensors that it keeps alive."""

    inputs: list[Tensor]
    places: Places
    graph: torch.cuda.CUDAGraph | None = None
    result: Any = None


class Graphs:
    """The graphs of one piece of work, one for each set of input shapes. They are freed with this object."""

    def __init__(self, *, enabled: bool) -> None:
        """If not enabled, every call runs launch by launch."""
        self._enabled = enabled
        self._recorded: dict[tuple[Any, ...], _Recorded] = {}
        self._pool: Any = None  # the opaque handle of graph_pool_handle
        self.captures = 0

    def run(
        self,
        work: Callable[..., Result],
        inputs: Sequence[Tensor],
        *,
        key: tuple[Any, ...] = (),
        places: Callable[[], Places] = list,
    ) -> Result:
        """Runs `work(*inputs)`: the first time launch by launch, which compiles and allocates, and from then on as a
        graph.

        `key` holds everything the work depends on besides the shapes of its inputs. `places` gives the addresses of
        tensors that the work uses and others may move; if they change, the graph is captured again. The work is
        passed with every call and not stored, so that no reference cycle keeps a graph's memory alive.

        Work that differentiates cannot be captured while the caller holds another loss of the same weights: the two share
        autograd's nodes of these weights, which wait on the stream where they were made, and the capture is on another.

        Returns the result of the work. A graph's tensors lie where it was captured, and the next run, of any shapes,
        may overwrite them.
        """
        if not self._enabled:
            return work(*inputs)
        with on_device(inputs[0].device):  # a capture records the current device only
            return self._run(work, inputs, (*key, *(tuple(tensor.shape) for tensor in inputs)), places)

    def _run(
        self, work: Callable[..., Result], inputs: Sequence[Tensor], name: tuple[Any, ...], places: Callable[[], Places]
    ) -> Result:
        recorded = self._recorded.get(name)
        if recorded is None or places() != recorded.places:
            result = work(*inputs)
            self._recorded[name] = _Recorded([tensor.clone() for tensor in inputs], places())
            return result
        for held, tensor in zip(recorded.inputs, inputs):
            held.copy_(tensor)
        if recorded.graph is None:
            recorded.graph, recorded.result = self._capture(work, recorded.inputs)
        replay(recorded.graph)
        again: Result = recorded.result
        return again

    def _capture(self, work: Callable[..., Result], inputs: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Records the work; nothing is computed yet."""
        graph = torch.cuda.CUDAGraph()
        # One pool for the graphs of all shapes: they run one after another, and their results lie outside it.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with recording(graph, self._pool):
            result = work(*inputs)
        self.captures += 1
        return graph, result


_one_at_a_time = threading.RLock()
_streams: dict[int, torch.cuda.Stream] = {}
"""By device: the stream of its captures. Graphs that share a pool reuse its memory only on one stream."""
_abandoned: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed: PyTorch's host allocator may still ask them which memory is theirs."""


class Recorded(Protocol):
    """Work that was captured."""

    def replay(self) -> None: ...


def replay(graph: Recorded) -> None:
    """Replays a graph, after a capture of another thread: PyTorch 2.11 has one flag, "in a capture", for the generator that all
    graphs of a device read, and a replay meanwhile would be an error."""
    with _one_at_a_time:
        graph.replay()


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Captures all launches on the current device inside this context. Other threads wait for their turn to capture.

    Garbage collection is off meanwhile: it might free an older graph, a pinned buffer or an event, which ends a
    capture. `thread_local` lets a loader's thread wait for its copies, which are on another stream.
    """
    with _one_at_a_time:
        collects, before, device = gc.isenabled(), torch.cuda.current_stream(), torch.cuda.current_device()
        pool = pool or torch.cuda.graph_pool_handle()
        if device not in _streams:  # PyTorch's own default is a stream of whichever device captured first
            _streams[device] = torch.cuda.Stream(device)
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=_streams[device], capture_error_mode="thread_local"):
                yield
        except BaseException:
            torch.cuda.set_stream(before)  # PyTorch leaves its stream only if the capture ends well
            _abandon(graph, pool, device)
            _release_generator(_streams[device], before)
            raise
        finally:
            if collects:
                gc.enable()


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any, device: int) -> None:
    """Ends the part of a failed capture that `capture_end` does not reach: the allocator would go on as if in a capture, and
    hold back memory that other streams have used."""
    _abandoned.append(graph)
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # it has ended: the work failed, and the capture did not
        return
    torch._C._cuda_releasePool(device, pool)


def _release_generator(stream: torch.cuda.Stream, before: torch.cuda.Stream) -> None:
    """Captures one small launch, and forgets it. PyTorch 2.11 leaves the device's default generator in a capture that
    failed: dropout, and replays of all other graphs, would be errors. The end of a good capture releases it."""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            torch.cuda._sleep(1)
    except RuntimeError:  # the error that ended the first capture is the one to report
        torch.cuda.set_stream(before)
