"""A GPU in Python, as far as a loader uses one: streams that run apart, events, and memory that copies reach late.

Work that is put on a stream waits there. A stream that `lags` does nothing until somebody waits for it: the worst a real GPU
may do. A stream that does not lag works at once, and makes others work only as far as it was told to wait for them. So a
wait that is missing shows as wrong data every time, and not once in a thousand runs.

    gpu = FakeGpu(lags={"copy"})
    monkeypatch.setattr(prefetch, "torch", gpu.torch)
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

COMPUTE, COPY = "compute", "copy"


class Stream:
    """Work in order. `done` counts how much of it has run."""

    def __init__(self, gpu: "FakeGpu", name: str) -> None:
        self.gpu, self.name = gpu, name
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def put(self, work: Callable[[], object]) -> int:
        """Queues work; returns how much of the stream must have run for it to be done."""
        with self.gpu.lock:
            self.work.append(work)
            if self.name not in self.gpu.lags:
                self.run_to(len(self.work))
            return len(self.work)

    def run_to(self, count: int) -> None:
        while self.done < count:
            self.done += 1
            self.work[self.done - 1]()

    def wait_event(self, event: "Event") -> None:
        with self.gpu.lock:
            place = event.place  # of the record that was made last: a later one is not waited for
        if place is not None:
            self.put(lambda: place[0].run_to(place[1]))


class Event:
    """A place in a stream. One that was never recorded counts as reached."""

    def __init__(self, gpu: "FakeGpu") -> None:
        self.gpu = gpu
        self.place: tuple[Stream, int] | None = None

    def record(self, stream: Stream) -> None:
        with self.gpu.lock:
            self.place = (stream, stream.put(lambda: None))

    def synchronize(self) -> None:
        if self.place is not None:
            time.sleep(self.gpu.seconds)
            with self.gpu.lock:
                self.place[0].run_to(self.place[1])


class DeviceTensor:
    """Device memory: whatever is done to it is put on the stream of whoever asks."""

    def __init__(self, gpu: "FakeGpu", data: torch.Tensor) -> None:
        self.gpu, self.data = gpu, data.fill_(-1)  # a value that no token has
        self.pool = gpu.current
        self.users: set[str] = set()

    def copy_(self, source: "DeviceTensor | torch.Tensor", non_blocking: bool = False) -> None:
        place = self.gpu.current.put(lambda: self.data.copy_(self.gpu.memory(source)))
        if not non_blocking and isinstance(source, torch.Tensor):  # from host memory: PyTorch then waits for it
            self.gpu.current.run_to(place)

    def bitwise_and_(self, mask: int) -> None:
        self.gpu.current.put(lambda: self.data.bitwise_and_(mask))

    def record_stream(self, stream: Stream) -> None:
        self.users.add(stream.name)


class FakeGpu:
    """Two streams: `compute`, which is current, and `copy`, the only one that anybody makes."""

    def __init__(self, lags: set[str], seconds: float = 0.0) -> None:
        """`seconds`: what the host waits for an event."""
        self.lags, self.seconds, self.lock = lags, seconds, threading.RLock()
        self.compute, self.copier = Stream(self, COMPUTE), Stream(self, COPY)
        self._local = threading.local()
        self.made = 0  # streams that were asked for
        self.torch = _Torch(self)

    @property
    def current(self) -> Stream:
        return getattr(self._local, "stream", self.compute)  # as on CUDA, every thread has its own

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current, stream
        try:
            yield
        finally:
            self._local.stream = before

    def memory(self, tensor: DeviceTensor | torch.Tensor) -> torch.Tensor:
        return tensor.data if isinstance(tensor, DeviceTensor) else tensor

    def read(self, tensor: DeviceTensor) -> torch.Tensor:
        """A kernel on the current stream that copies the tensor elsewhere; filled once the stream has come so far."""
        out = torch.empty_like(tensor.data)
        self.current.put(lambda: out.copy_(tensor.data))
        return out

    def synchronize(self) -> None:
        with self.lock:
            for stream in (self.copier, self.compute):
                stream.run_to(len(stream.work))


class _Torch:
    """What a loader takes from `torch`: the GPU's part faked, the rest PyTorch's own."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.cuda = _Cuda(gpu)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, shape: Any, *, dtype: torch.dtype, device: Any = None, pin_memory: bool = False) -> Any:
        data = torch.empty(shape, dtype=dtype)
        return DeviceTensor(self._gpu, data) if torch.device(device or "cpu").type == "cuda" else data


class _Cuda:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.stream = gpu.on

    def Stream(self, device: torch.device) -> Stream:
        self._gpu.made += 1
        return self._gpu.copier

    def Event(self, blocking: bool = False) -> Event:
        return Event(self._gpu)

    def current_stream(self, device: torch.device) -> Stream:
        return self._gpu.current

    def current_device(self) -> int:
        return 0
