"""Batches made ahead of the training loop: a producer thread fills a ring of reused buffers. (As in parameter-golf
#785.)

On CUDA each slot of the ring has a pinned host buffer and a device buffer, shared by three parties:

    producer thread   waits on the host until the slot's last copy is done, then refills the pinned buffer
    copy stream       waits for `released`, copies and widens, records `copied`
    compute stream    waits for `copied`; `released` is recorded on it once the consumer has moved on

The consumer never waits for the GPU. It waits only for a batch that is not ready, and `wait_seconds` counts that. On
a CPU the same ring runs without streams and events.
"""

import time
import warnings
import weakref
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from types import TracebackType
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from parbank.config import require
from parbank.errors import ConfigError, DataError, ParbankError

# Handing out a batch invalidates the batch before the last: a consumer may use the last two.
_HELD = 2

# A micro-batch is read in milliseconds, on a cold network disk in seconds. A producer that takes longer hangs in the file
# system, where nothing can stop it; waiting longer would hang the run as well.
_PATIENCE_SECONDS = 10.0

_copiers: dict[int, torch.cuda.Stream] = {}
"""By device: the copy stream of every prefetcher. PyTorch hands out 32 streams in turn, so a stream for each prefetcher would
in time be the one that captures."""


class BatchSource(Protocol):
    """The source of a Prefetcher. A stream may also have a `dtype`, the numpy dtype of its batches; the default is
    uint16."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of every batch."""

    def fill(self, out: np.ndarray) -> None:
        """Writes the next batch into `out`, every element of it. Raises StopIteration at the end."""

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream. The dict must not change when the stream moves on."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moves to a position that `state_dict` returned. A refused state must leave the stream unchanged."""


@dataclass(eq=False, repr=False)
class _Slot:
    """One slot of the ring. The thread that took it from a queue owns it; events order the GPU's work."""

    host: torch.Tensor  # the stream's shape, pinned on CUDA; int16 for uint16
    data: np.ndarray  # the same memory, in the stream's dtype
    batch: torch.Tensor  # on the device, for the consumer; int64 for uint16
    state: dict[str, Any] = field(default_factory=dict)  # the stream's, just after this batch
    filling_since: float = 0.0
    copied: torch.cuda.Event = field(init=False)  # set on CUDA only, like the next
    released: torch.cuda.Event = field(init=False)


class _Loader:
    """Makes one batch: reads it from the stream and copies it to the device. Uses no threads."""

    def __init__(self, stream: BatchSource) -> None:
        self.stream = stream
        self.dtype = np.dtype(getattr(stream, "dtype", np.uint16))
        self.widens = self.dtype == np.uint16  # to int64, on the device: torch has few ops on uint16
        try:
            self.host_dtype = torch.int16 if self.widens else torch.from_numpy(np.empty(0, self.dtype)).dtype
        except TypeError:
            raise ConfigError(
                f"a stream of {self.dtype} cannot become a tensor; give its batches another dtype"
            ) from None
        self.batch_dtype = torch.int64 if self.widens else self.host_dtype

    def make_slot(self) -> _Slot:
        host = torch.empty(self.stream.shape, dtype=self.host_dtype)
        return _Slot(host, host.numpy().view(self.dtype), torch.empty(self.stream.shape, dtype=self.batch_dtype))

    def fill(self, slot: _Slot) -> None:
        self.await_copy(slot)
        slot.filling_since = time.perf_counter()
        self.stream.fill(slot.data)
        slot.state = self.stream.state_dict()
        self.send(slot)

    def await_copy(self, slot: _Slot) -> None:
        """Blocks until no copy reads the slot's host buffer."""

    def send(self, slot: _Slot) -> None:
        # numpy, not torch: a torch op here would start a second pool of OpenMP threads.
        np.copyto(slot.batch.numpy(), slot.data)

    def receive(self, slot: _Slot) -> torch.Tensor:
        """The slot's batch, safe to use on the caller's current stream."""
        return slot.batch

    def release(self, slot: _Slot) -> None:
        """The consumer has queued all its work on the slot's batch: overwriting it must wait for that work."""


class _CudaLoader(_Loader):
    """The same through pinned memory and a copy stream. An event that was never recorded counts as done."""

    def __init__(self, stream: BatchSource, device: torch.device) -> None:
        super().__init__(stream)
        self._device = device
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in _copiers:
            _copiers[index] = torch.cuda.Stream(device)
        self._copier = _copiers[index]
        self._raw = self._allocate(torch.int16) if self.widens else None  # where copies land before they are widened

    def _allocate(self, dtype: torch.dtype) -> torch.Tensor:
        """Allocates device memory on the copy stream. Memory from the compute stream's pool might still be in use by
        kernels in flight, and the first copy would overtake them."""
        with torch.cuda.stream(self._copier):
            return torch.empty(self.stream.shape, dtype=dtype, device=self._device)

    def make_slot(self) -> _Slot:
        host = torch.empty(self.stream.shape, dtype=self.host_dtype, pin_memory=True)
        slot = _Slot(host, host.numpy().view(self.dtype), self._allocate(self.batch_dtype))
        slot.copied = torch.cuda.Event(blocking=True)  # blocking: the producer sleeps on it instead of spinning
        slot.released = torch.cuda.Event()
        return slot

    def await_copy(self, slot: _Slot) -> None:
        slot.copied.synchronize()

    def send(self, slot: _Slot) -> None:
        """Copies a batch. For uint16, two bytes a token cross the bus, a quarter of int64. They travel as int16, since
        torch has few uint16 ops: widening sign-extends, and a mask removes the sign bits. One `_raw` serves all
        slots, because only this stream uses it."""
        with torch.cuda.stream(self._copier):
            self._copier.wait_event(slot.released)
            if self._raw is None:
                slot.batch.copy_(slot.host, non_blocking=True)
            else:
                self._raw.copy_(slot.host, non_blocking=True)
                slot.batch.copy_(self._raw)
                slot.batch.bitwise_and_(0xFFFF)
            slot.copied.record(self._copier)

    def receive(self, slot: _Slot) -> torch.Tensor:
        compute = torch.cuda.current_stream(self._device)
        compute.wait_event(slot.copied)
        slot.batch.record_stream(compute)  # once freed, its memory is not recycled before this stream is done with it
        return slot.batch

    def release(self, slot: _Slot) -> None:
        slot.released.record(torch.cuda.current_stream(self._device))


class _Producer:
    """The thread and its two queues. Slots circulate: free -> (filled) -> ready -> (handed out) -> free.

    There are only `depth` slots, so neither queue can overflow, and the thread blocks on `free` only, where `stop`
    can wake it. SimpleQueue.put never blocks and is re-entrant: `stop` may run in a garbage collection.
    """

    def __init__(self, loader: _Loader, slots: list[_Slot]) -> None:
        self.free: SimpleQueue[_Slot | None] = SimpleQueue()
        self.ready: SimpleQueue[_Slot | BaseException] = SimpleQueue()
        self._stopping = Event()
        for slot in slots:
            self.free.put(slot)
        self._thread = Thread(target=self._run, args=(loader,), name="parbank-prefetch", daemon=True)
        self._thread.start()

    def _run(self, loader: _Loader) -> None:
        while True:
            slot = self.free.get()
            if slot is None or self._stopping.is_set():
                return
            try:
                loader.fill(slot)
            except BaseException as error:  # any error must reach the consumer, or it waits for ever
                self.ready.put(error)
                return
            self.ready.put(slot)

    def stop(self, timeout: float = _PATIENCE_SECONDS) -> bool:
        """Ends the thread. False if it hangs in a read and does not end in time. May be called again."""
        self._stopping.set()
        self.free.put(None)
        if self._thread is not current_thread():  # a garbage collection in the producer thread may call this
            self._thread.join(timeout)
        return not self._thread.is_alive()


class Prefetcher:
    """Hands out a stream's batches on the device, made up to `depth` batches ahead by a thread. Depth 0 makes each batch
    when it is asked for, without a thread; the batches are the same.

    A stream is any object with the methods of `parbank.data.prefetch.BatchSource`: the shape of a batch, `fill`, and its state.
    Batches of uint16, the usual dtype of tokens on disk, come out as int64; any other dtype comes out as it is.

    >>> import numpy as np
    >>> class Windows:
    ...     shape = (2, 4)  # rows, tokens
    ...     def __init__(self, tokens):
    ...         self.tokens, self.start = tokens, 0
    ...     def fill(self, out):  # called on the prefetcher's thread
    ...         if self.start + out.size > len(self.tokens):
    ...             raise StopIteration  # a stream without an end never does
    ...         out[:] = self.tokens[self.start : self.start + out.size].reshape(out.shape)
    ...         self.start += out.size
    ...     def state_dict(self):
    ...         return {"start": self.start}
    ...     def load_state_dict(self, state):
    ...         self.start = state["start"]
    >>> tokens = np.arange(26, dtype=np.uint16)
    >>> with parbank.Prefetcher(Windows(tokens), device="cpu") as batches:
    ...     for batch in batches:  # a batch's memory is used again two batches later
    ...         print(batch.dtype, batch[0].tolist(), batches.state_dict())
    ...     batches.rewind({"start": 8})
    ...     print(batches.next()[0].tolist())
    torch.int64 [0, 1, 2, 3] {'start': 8}
    torch.int64 [8, 9, 10, 11] {'start': 16}
    torch.int64 [16, 17, 18, 19] {'start': 24}
    [8, 9, 10, 11]

    `state_dict` is the state after the last batch handed out, without those made ahead, as a checkpoint needs.

    The stream belongs to the prefetcher until `close()`, which leaves it just after the last batch handed out. A
    prefetcher that is dropped without `close()` ends its thread when it is collected or the interpreter exits.
    """

    def __init__(self, stream: BatchSource, *, device: torch.device | str, depth: int = 3) -> None:
        require(depth >= 0, f"the prefetch depth must be 0 (no thread) or more, got {depth}")
        missing = [name for name in ("shape", "fill", "state_dict", "load_state_dict") if not hasattr(stream, name)]
        require(
            not missing,
            f"a Prefetcher takes a parbank.data.prefetch.BatchSource, and a {type(stream).__name__} has no {', '.join(missing)}",
        )
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:  # the current device is per thread
            device = torch.device("cuda", torch.cuda.current_device())
        self.depth = depth
        self.wait_seconds = 0.0
        """Time `next` has blocked so far because a batch was not made yet. Time in which the producer itself waited for
        the GPU to give a buffer back is not counted: then the loop is ahead of the device, and the device has work."""
        self._stream = stream
        self._loader = _CudaLoader(stream, device) if device.type == "cuda" else _Loader(stream)
        self._slots = [self._loader.make_slot() for _ in range(depth + _HELD)]
        self._held = deque(self._slots[:_HELD])  # handed out last, oldest first
        self._closed = False
        self._failure: BaseException | None = None
        self._producer: _Producer | None = None
        self._start()

    def next(self) -> torch.Tensor:
        """The next batch, `stream.shape` on the device, for the caller's current CUDA stream.

        Its memory is reused from the next call but one. Raises StopIteration at the end of the stream. If the batch
        could not be made, raises DataError (or RuntimeError, if the data is not at fault) with the original error as
        its cause, and again on every later call until `rewind`.
        """
        self._check_open()
        if self._failure is not None:
            _raise_failure(self._failure)
        asked = time.perf_counter()
        made = self._make() if self._producer is None else self._producer.ready.get()
        if isinstance(made, BaseException):
            self._failure = made
            _raise_failure(made)
        self.wait_seconds += time.perf_counter() - max(asked, made.filling_since)
        self._hold(made)
        self._state = made.state
        return self._loader.receive(made)

    @property
    def last_on_host(self) -> np.ndarray:
        """The batch that `next` returned last, as the stream wrote it, in host memory: for questions whose answers the
        host needs without waiting for the GPU. It is valid as long as that batch; do not write to it."""
        return self._held[-1].data

    def state_dict(self) -> dict[str, Any]:
        """The stream's state after the batches handed out, without those made ahead."""
        return dict(self._state)

    def rewind(self, state: dict[str, Any], timeout: float = _PATIENCE_SECONDS) -> None:
        """Continues from a saved state. The old producer is stopped before the stream moves, so that it cannot run
        ahead. A state that the stream refuses changes nothing."""
        self._check_open()
        if not self._stop(timeout):
            # Kept, because the old producer ends after that read and `next` would wait for ever.
            self._failure = DataError(
                "cannot go back to a saved data position: a read of the training data has been hanging for "
                f"{timeout:g} s; check the disk or network share that holds the data, then resume"
            )
            raise self._failure
        try:
            self._stream.load_state_dict(state)
        finally:
            self._start()

    def close(self, timeout: float = _PATIENCE_SECONDS) -> None:
        """Ends the producer. Returns after `timeout` seconds at the latest, with a warning if a read still hangs."""
        if self._closed:
            return
        self._closed = True
        if not self._stop(timeout):
            self._finalizer.detach()  # after one wait, the interpreter's exit need not wait again
            warnings.warn(
                f"a read of the training data has been hanging for {timeout:g} s; its thread is left behind, and ends "
                "with the read or with the process",
                RuntimeWarning,
                stacklevel=2,
            )

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> torch.Tensor:
        return self.next()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._state = self._stream.state_dict()
        self._failure = None
        if self.depth == 0:
            return
        # The last batches handed out stay valid across a rewind: their slots are reused when later ones replace them.
        self._producer = _Producer(self._loader, [slot for slot in self._slots if slot not in self._held])
        self._finalizer = weakref.finalize(self, self._producer.stop)

    def _stop(self, timeout: float) -> bool:
        """Ends the producer and moves the stream back to the last batch handed out; False if the producer hangs."""
        if self._producer is not None:
            if not self._producer.stop(timeout):
                return False
            self._finalizer.detach()
            self._producer = None
        self._stream.load_state_dict(self._state)
        return True

    def _make(self) -> _Slot | BaseException:
        """Without a thread: fills the next slot now."""
        slot = self._held[0]
        self._loader.release(slot)
        try:
            self._loader.fill(slot)
        except Exception as error:
            return error
        return slot

    def _hold(self, slot: _Slot) -> None:
        self._held.append(slot)
        oldest = self._held.popleft()
        if self._producer is not None:
            self._loader.release(oldest)
            self._producer.free.put(oldest)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this prefetcher is closed; make a new one over the stream")


def _raise_failure(cause: BaseException) -> NoReturn:
    """A user can fix bad data or a failing disk; any other error is a bug and must keep its traceback."""
    if isinstance(cause, StopIteration):
        raise StopIteration
    kind = DataError if isinstance(cause, (ParbankError, OSError)) else RuntimeError
    raise kind(f"the next batch could not be made: {type(cause).__name__}: {cause}") from cause
