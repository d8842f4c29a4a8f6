"""A rehearsal runs work once to compile its Triton kernels, all in parallel, without launching any.

A step of the golf model has 36 kernels. Compiled one after another, at first launch, they take half a minute
(docs/log/startup.md): C++ on one core, and a C compiler that Triton starts for the code around each launch. In a
rehearsal a launch only requests its kernel, and a pool of threads compiles and loads all kernels at once. Everything
else runs normally, on uninitialised memory. So the results are garbage, and the caller restores its state.

Work may be rehearsed if no address and no decision of the host depends on values that a kernel writes.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from parbank import ahead
from parbank.cores import count_cores
from parbank.ops import backend


def can_rehearse() -> bool:
    """Whether this Triton compiles in threads. Otherwise kernels are compiled at first launch."""
    if not backend.HAS_TRITON or backend.INTERPRETED:
        return False
    try:
        from triton.runtime import _async_compile  # noqa: F401
    except ImportError:
        return False
    return True


class _LoadingPool:
    """Compiles kernels in threads, and loads each with the code that launches it, as a first launch would."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(self._load, compile_kernel)

    def _load(self, compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        kernel.run  # noqa: B018 (a property that loads)
        return kernel


@contextmanager
def rehearsal(device: torch.device, threads: int | None = None) -> Iterator[None]:
    """Inside this context, launches of Triton kernels on `device` only compile them. At its end all of them are ready."""
    from triton.runtime._async_compile import AsyncCompileMode, active_mode
    from triton.runtime.jit import JITFunction

    ahead.wait()
    launch = JITFunction.run

    def ask(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, warmup=True, **options)

    index = torch.cuda.current_device() if device.index is None else device.index  # set_device wants a number
    pool = ThreadPoolExecutor(threads or count_cores(), initializer=torch.cuda.set_device, initargs=(index,))
    JITFunction.run = ask
    try:
        # Autograd's own threads do not know that a pool is open, so backward runs in this one.
        with torch.autograd.set_multithreading_enabled(False), pool, AsyncCompileMode(_LoadingPool(pool)):
            yield
    finally:
        JITFunction.run = launch
        active_mode.set(None)  # after a kernel that does not compile, Triton leaves its mode on
