"""Work on a GPU replayed as CUDA graphs: some hundreds of launches become one.

A pass of a small model is many short kernels, and Python needs about as long to launch them as the GPU to run them. A graph
replays the same kernels on the same memory. So what it reads and writes must stay in place: inputs are copied to where it
found them, and results are what the work leaves in tensors of its own, or hands back for use at once.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Places = list[int | None]
Result = TypeVar("Result")


def addresses(tensors: Iterable[Tensor | None]) -> Places:
    """Where tensors lie; None for what is not there."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


@dataclass
class _Recorded:
    """The graph of one set of shapes, and what it holds on to."""

    inputs: list[Tensor]
    places: Places
    graph: torch.cuda.CUDAGraph | None = None
    result: Any = None


class Graphs:
    """The graphs of one piece of work, one for each set of shapes it meets. They are freed with this object."""

    def __init__(self, *, enabled: bool) -> None:
        """Not enabled, every call runs launch by launch."""
        self._enabled = enabled
        self._recorded: dict[tuple[Any, ...], _Recorded] = {}
        self._pool: Any = None  # what graph_pool_handle gives: an opaque handle
        self.captures = 0

    def run(
        self,
        work: Callable[..., Result],
        inputs: Sequence[Tensor],
        *,
        key: tuple[Any, ...] = (),
        places: Callable[[], Places] = list,
    ) -> Result:
        """`work(*inputs)`: the first time as it is, which compiles and makes what stays, and from then on as a graph.

        `key` is what the work depends on beside the shapes of its inputs; `places` gives the addresses of what it uses and
        somebody else may move: where they have changed it starts over. The work is handed in with every call, not kept, so
        that who owns both is in no cycle with its graphs, and their memory is free the moment it is dropped.

        What the work returned is returned. The tensors of a graph lie where it was recorded, and the next run, of whatever
        shapes, may overwrite them.
        """
        if not self._enabled:
            return work(*inputs)
        name = (*key, *(tuple(tensor.shape) for tensor in inputs))
        recorded = self._recorded.get(name)
        if recorded is None or places() != recorded.places:
            result = work(*inputs)
            self._recorded[name] = _Recorded([tensor.clone() for tensor in inputs], places())
            return result
        for held, tensor in zip(recorded.inputs, inputs):
            held.copy_(tensor)
        if recorded.graph is None:
            recorded.graph, recorded.result = self._capture(work, recorded.inputs)
        recorded.graph.replay()
        again: Result = recorded.result
        return again

    def _capture(self, work: Callable[..., Result], inputs: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Records the work; nothing is computed yet."""
        graph = torch.cuda.CUDAGraph()
        # One pool for the graphs of all shapes: they run one after another, and what they leave lies outside it.
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with recording(graph, self._pool):
            result = work(*inputs)
        self.captures += 1
        return graph, result


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """What is launched inside becomes the graph.

    Python's garbage collector waits until it is done: it may find an older graph, a pinned buffer or an event, and freeing one
    of those ends a recording. A loader's thread may wait for its copies meanwhile (thread_local): no stream of ours.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()
