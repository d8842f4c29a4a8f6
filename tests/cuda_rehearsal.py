"""A GPU's rules without a GPU: the Python of every CUDA path runs here, on CPU memory that says it is on `cuda:0`.

    with StandIn(monkeypatch) as gpu:
        model.to("cuda")          # `is_cuda` and `device` say so; every op runs on the CPU

It finds these faults, each by an error in the line that makes it:

- two tensors of one op on different devices;
- in a capture: anything that waits for the device (`item`, `tolist`, a test of a tensor, a synchronisation), copies between
  host and device, and ops whose result has no fixed shape. As in CUDA, a capture in the mode `thread_local` refuses its own
  thread only, and any other capture refuses all threads;
- a capture while another device is the current one: `gpu.current` is its number, and all memory is on device 0;
- in a capture: gradients of a weight that an older autograd graph, of a loss that is still held, uses as well. Both share the
  weight's AccumulateGrad node, and that is on the stream where the older graph was made;
- state that a replay does not repeat. `CUDAGraph` records ops and kernel launches and runs them again on the same memory. As on
  a GPU, a capture computes nothing: memory from before it keeps its values, and new numbers are NaN until the first replay.

`gpu.waits` counts what waits for the device. It cannot find other faults of streams (tests/data/fake_gpu.py does for the
loader), of memory that a graph's pool uses again, or of anything below Python. Kernels run in Triton's interpreter where a
test asks for them; other threads see tensors on the CPU.
"""

import gc
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
_DEVICE = torch._C.TensorBase.device  # type: ignore[attr-defined]
# Ops that read a number, or give as many numbers as their values say.
_WAITING = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "bincount",
}
# Ops that take tensors of two devices: copies, and indices on the host.
_MIXING = {
    "copy_",
    "_to_copy",
    "_foreach_copy_",
    "index",
    "index_put_",
    "index_put",
    "_index_put_impl_",
    "set_",
    "lift_fresh",
}


class CaptureError(RuntimeError):
    """What CUDA says of an operation that a capture does not permit."""


_memory: dict[int, tuple[bool, Any]] = {}
"""By the address of a storage: whether it is on the GPU, and the storage, so that no other one comes to its address."""


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cpu and _memory.get(tensor.untyped_storage()._cdata, (False,))[0]


def _true_device(tensor: Tensor) -> torch.device:
    with torch._C.DisableTorchFunction():  # which would come back to the property of this name
        found: torch.device = _DEVICE.__get__(tensor)
        return found


def put(tensor: Tensor, on_gpu: bool = True) -> Tensor:
    """Says of a tensor's memory where it is."""
    storage = tensor.untyped_storage()
    _memory[storage._cdata] = (on_gpu, storage)
    return tensor


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _selects(name: str, given: list[Tensor]) -> bool:
    """Whether a mask selects numbers: how many, only the device knows. Where all get one number, nobody needs to."""
    masked = name.startswith("index") and any(index.dtype == torch.bool for index in given[1:])
    return masked and (name == "index" or given[-1].numel() > 1)


def _find_accumulator(weight: Tensor) -> Any:
    """Its AccumulateGrad node: the one that some autograd graph holds, or else a new one."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
        return weight.view_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _mark_older_graphs() -> None:
    """Marks the nodes that something holds now, unless they were made in a capture, on the stream of captures."""
    for weight in [found for found in gc.get_objects() if issubclass(type(found), Tensor)]:
        if not weight._is_view() and weight.is_leaf and weight.requires_grad and is_on_gpu(weight):
            _find_accumulator(weight).metadata["looked at"] = True
            marks = _find_accumulator(weight).metadata  # a new node, if nothing held that one
            if "looked at" in marks:
                marks.setdefault("captured", False)


def _find_accumulators(roots: list[Tensor]) -> list[Any]:
    """The AccumulateGrad nodes of an autograd graph."""
    ahead, seen, found = [root.grad_fn for root in roots], set(), []
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [following for following, _ in node.next_functions]
            found += [node] if hasattr(node, "variable") else []
    return found


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class Graph:
    """As torch.cuda.CUDAGraph."""

    gpu: "StandIn"

    def __init__(self) -> None:
        self._records: list[Callable[[], None]] = []
        self._fresh: list[Tensor] = []
        self._own: set[int] = set()
        self.replays = 0

    def capture_begin(self, *pool: Any, capture_error_mode: str = "global", **options: Any) -> None:
        assert self.gpu.graph is None, "a capture inside a capture"
        assert self.gpu.current == GPU.index, "a capture on a device that has none of the work"
        self._thread = threading.get_ident() if capture_error_mode == "thread_local" else None
        _mark_older_graphs()
        self.gpu.graph = self

    def refuses_this_thread(self) -> bool:
        """Whether the calling thread may not wait or copy while this graph is captured."""
        return self._thread in (None, threading.get_ident())

    def capture_end(self) -> None:
        self.gpu.graph = None
        with torch.no_grad():
            for tensor in self._fresh:
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)

    def replay(self) -> None:
        if self.gpu.graph is not None:
            raise CaptureError("a replay inside a capture")
        self.replays += 1
        with torch.no_grad(), self.gpu.inside():
            for record in self._records:
                record()

    def add(self, func: Callable[..., Any], args: Any, kwargs: Any, out: Any, fresh: list[Tensor]) -> None:
        """Records an op with its new tensors `fresh`, as far as the result `out` has some."""
        self._fresh += fresh
        self._own |= {tensor.untyped_storage()._cdata for tensor in fresh}
        mine = {id(tensor) for tensor in fresh}
        places = [number for number, leaf in enumerate(tree_leaves(out)) if id(leaf) in mine]

        def record() -> None:
            found = tree_leaves(func(*args, **kwargs))
            for place, tensor in zip(places, fresh):
                tensor.copy_(found[place])

        self._records.append(record)

    def owns(self, tensor: Tensor) -> bool:
        """Whether its memory is of this capture."""
        return tensor.untyped_storage()._cdata in self._own


class _Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None:
        Graph.gpu.wait("a stream is waited for")


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        Graph.gpu.wait("an event is waited for")

    def elapsed_time(self, _: Any) -> float:
        return 1.0


class StandIn:
    """One GPU of compute capability 9.0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graph: Graph | None = None
        self.waits = 0
        self.current = 0
        self.makes = False
        """Whether the call under way names the GPU for its result."""
        self._depth = 0
        self._patch = monkeypatch
        self._modes: list[Any] = []

    def __enter__(self) -> "StandIn":
        # Dynamo keeps the functions of torch that it knows from its import on. Importing it later would keep the replaced ones.
        importlib.import_module("torch._dynamo.variables.torch")
        Graph.gpu = self
        set_ = self._patch.setattr
        set_(torch.Tensor, "device", property(lambda t: GPU if is_on_gpu(t) else _true_device(t)), raising=False)
        set_(torch.Tensor, "is_cuda", property(is_on_gpu), raising=False)
        set_(torch.Tensor, "record_stream", lambda tensor, stream: None)
        resize = torch.UntypedStorage.resize_

        def resize_outside_captures(storage: torch.UntypedStorage, size: int) -> Any:
            """What a graph frees goes back to the graph's own memory, which replays still use."""
            return storage if self.graph is not None else resize(storage, size)

        set_(torch.UntypedStorage, "resize_", resize_outside_captures)
        self._replace_cuda(set_)
        self._replace_kernels(set_)
        self._modes = [_Calls(self), _Ops(self)]
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        self._patch.undo()
        _memory.clear()

    def _replace_cuda(self, set_: Callable[..., None]) -> None:
        stream = _Stream()
        about = SimpleNamespace(
            name="stand-in", major=9, minor=0, multi_processor_count=132, total_memory=140 * 2**30, uuid="0",
            L2_cache_size=60 * 2**20,
        )  # fmt: skip
        names: dict[str, Any] = {
            "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1, "_lazy_init": lambda: None,
            "current_device": lambda: self.current, "set_device": lambda device: None, "device": self._on,
            "get_device_capability": lambda *_: (9, 0), "get_device_properties": lambda *_: about,
            "get_device_name": lambda *_: about.name, "mem_get_info": lambda *_: (130 * 2**30, 140 * 2**30),
            "memory_allocated": lambda *_: 0, "max_memory_allocated": lambda *_: 0, "memory_reserved": lambda *_: 0,
            "reset_peak_memory_stats": lambda *_: None, "empty_cache": lambda: self._refuse("the cache is emptied"),
            "synchronize": lambda *_: self.wait("the device is waited for"), "CUDAGraph": Graph, "Stream": _Stream,
            "Event": _Event, "current_stream": lambda *_: stream, "default_stream": lambda *_: stream,
            "set_stream": lambda stream: None, "stream": lambda stream: nullcontext(), "_sleep": lambda cycles: None,
            "graph_pool_handle": lambda: (0, 1), "is_current_stream_capturing": lambda: self.graph is not None,
            "get_rng_state": lambda *_: torch.get_rng_state(), "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        }  # fmt: skip
        for name, value in names.items():
            set_(torch.cuda, name, value, raising=False)
        set_(torch._C, "_host_emptyCache", lambda: None, raising=False)
        group = torch.utils._foreach_utils._group_tensors_by_device_and_dtype

        def regroup(*args: Any, **kwargs: Any) -> Any:  # it asks C++ for the device
            found = group(*args, **kwargs)
            return {(lists[0][0][0].device, dtype): lists for (_, dtype), lists in found.items()}

        set_(torch.nn.utils.clip_grad, "_group_tensors_by_device_and_dtype", regroup)
        set_(sys.modules["torch.optim.optimizer"], "_group_tensors_by_device_and_dtype", regroup)
        # Ops see a CPU, so that the CPU's autocast casts for them. Its list of ops differs a little.
        kind, enabled, dtype = torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype
        set_(torch, "autocast", lambda device, *args, **more: kind("cpu", *args, **more))
        set_(torch, "is_autocast_enabled", lambda device="cpu": enabled("cpu"))
        set_(torch, "get_autocast_dtype", lambda device: dtype("cpu"))

    def _replace_kernels(self, set_: Callable[..., None]) -> None:
        try:
            from triton.runtime.interpreter import GridExecutor
        except ImportError:
            return
        launch = GridExecutor.__call__

        def run(executor: Any, *args: Any, **kwargs: Any) -> None:
            host = [tensor for tensor in _tensors((args, kwargs)) if not is_on_gpu(tensor)]
            assert not host, f"a kernel reads host memory: {[tuple(tensor.shape) for tensor in host]}"

            def work() -> None:
                with self.inside():
                    launch(executor, *args, **kwargs)

            if self.graph is None or self._depth:
                work()
            else:
                self.graph.add(work, (), {}, (), [])

        set_(GridExecutor, "__call__", run)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside an op: its parts are no ops of their own."""
        self._depth += 1
        try:
            with _disable_current_modes(), _Calls(self):
                yield
        finally:
            self._depth -= 1

    @contextmanager
    def _on(self, device: torch.device | int | None) -> Iterator[None]:
        """As torch.cuda.device: None changes nothing."""
        before, index = self.current, device.index if isinstance(device, torch.device) else device
        self.current = before if index is None else index
        try:
            yield
        finally:
            self.current = before

    def _refuse(self, what: str) -> None:
        graph = self.graph  # another thread may end the capture meanwhile
        if graph is not None and graph.refuses_this_thread():
            raise CaptureError(f"operation not permitted when stream is capturing: {what}")

    def wait(self, what: str) -> None:
        self._refuse(what)
        self.waits += 1

    def copy(self, source: bool, target: bool, *, waits: bool) -> None:
        """A copy between memory of which `source` and `target` say whether it is the GPU's."""
        if source == target:
            return
        self._refuse(f"a copy {'from' if source else 'to'} the device")
        self.waits += waits and source

    def differentiate(self, roots: list[Tensor], weights: list[Tensor] | None) -> None:
        """A backward, by all weights or by some."""
        for node in _find_accumulators(roots) if self.graph is not None else []:
            older = not node.metadata.setdefault("captured", True)
            if older and (weights is None or any(weight is node.variable for weight in weights)):
                raise CaptureError(
                    "operation would make the legacy stream depend on a capturing blocking stream: an older autograd graph "
                    f"holds the weight of shape {tuple(node.variable.shape)}"
                )

    def run(self, func: Any, args: Any, kwargs: Any, *, makes: bool = False) -> Any:
        """An op. `makes`: it makes new memory on the GPU."""
        name, given = func.overloadpacket.__name__, _tensors((args, kwargs))
        here = [is_on_gpu(tensor) for tensor in given]
        if name in ("copy_", "_foreach_copy_"):
            pairs = (
                [(given[0], given[1])]
                if name == "copy_"
                else zip(*(given[: len(given) // 2], given[len(given) // 2 :]))
            )
            for target, source in pairs:
                blocks = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
                self.copy(is_on_gpu(source), is_on_gpu(target), waits=blocks)
        elif name not in _MIXING and any(here):
            apart = [tuple(tensor.shape) for tensor, on_gpu in zip(given, here) if not on_gpu and tensor.dim()]
            if apart:
                raise RuntimeError(f"Expected all tensors to be on the same device: {func} of the host's {apart}")
        if any(here) and (name in _WAITING or _selects(name, given)):
            self.wait(str(func))
        if not (makes or any(here)):
            return func(*args, **kwargs)
        if self.graph is not None and not self._depth:
            return self._capture(func, args, kwargs, given)
        with self.inside():
            out = func(*args, **kwargs)
        self._claim(out)
        return out

    def _claim(self, out: Any) -> list[Tensor]:
        """Puts new tensors on the GPU; returns them."""
        new = [tensor for tensor in _tensors(out) if tensor.untyped_storage()._cdata not in _memory]
        return [put(tensor) for tensor in new]

    def _capture(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        """Memory from before the capture keeps its values: an op that writes to it works on a copy here."""
        assert self.graph is not None
        copies: dict[int, Tensor] = {}
        if func._schema.is_mutable:
            for argument, value in zip(
                func._schema.arguments, (*args, *(kwargs.get(a.name) for a in func._schema.arguments[len(args) :]))
            ):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in _tensors(value):
                        if not self.graph.owns(tensor):
                            copies[id(tensor)] = tensor
        with self.inside():
            swapped = {key: put(tensor.detach().clone()) for key, tensor in copies.items()}
            mine = tree_map(lambda x: swapped.get(id(x), x), (args, kwargs))
            out = func(*mine[0], **mine[1])
        back = {id(copy): copies[key] for key, copy in swapped.items()}
        out = tree_map(lambda x: back.get(id(x), x), out)
        self.graph.add(func, args, kwargs, out, self._claim(out))
        return out


class _Ops(TorchDispatchMode):
    def __init__(self, gpu: StandIn) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._gpu.run(func, args, kwargs or {}, makes=self._gpu.makes)


class _Calls(TorchFunctionMode):
    """Calls of PyTorch's functions: those that name a device, or pinned memory."""

    def __init__(self, gpu: StandIn) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to:
            return self._move(*args, **kwargs)
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return self._move(args[0], "cuda:0" if func is torch.Tensor.cuda else "cpu")
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func in (torch.Tensor.backward, torch.autograd.grad):
            by = kwargs.get("inputs", args[1] if func is torch.autograd.grad and len(args) > 1 else None)
            self._gpu.differentiate(_tensors(args[0]), None if by is None else _tensors(by))
        if func is torch.Tensor.numpy or (func is torch.Tensor.__array__):
            assert not is_on_gpu(args[0]), "can't convert cuda:0 device type tensor to numpy"
        if func is torch.Tensor.tolist and is_on_gpu(args[0]):
            self._gpu.wait("tolist")
            return _plain(args[0]).tolist()
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is None or isinstance(device, int):
            return func(*args, **kwargs)
        on_gpu = _is_cuda(device)
        if func in (torch.tensor, torch.as_tensor):  # of the host's numbers
            self._gpu.copy(False, on_gpu, waits=True)
        kwargs["device"] = "cpu" if on_gpu else device
        before, self._gpu.makes = self._gpu.makes, on_gpu
        try:
            out = func(*args, **kwargs)
        finally:
            self._gpu.makes = before
        if isinstance(out, Tensor) and torch.device(kwargs["device"]).type == "cpu":
            put(out, on_gpu)
        return out

    def _move(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        target = is_on_gpu(tensor) if device is None else device.type == "cuda"
        if device is not None and device.type not in ("cuda", "cpu"):
            return torch._C.TensorBase.to(tensor, *args, **kwargs)
        source = is_on_gpu(tensor)
        self._gpu.copy(source, target, waits=not non_blocking)
        kind = dtype or tensor.dtype
        if source == target:
            return torch._C.TensorBase.to(tensor, kind, copy=copy)
        before, self._gpu.makes = self._gpu.makes, target
        try:
            return put(torch._C.TensorBase.to(tensor, kind, copy=True), target)
        finally:
            self._gpu.makes = before


def _plain(tensor: Tensor) -> Tensor:
    with _disable_current_modes():
        return tensor.detach().clone()
