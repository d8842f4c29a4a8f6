"""Compiles the kernels of a scoring method in threads, or loads those that were kept, while the weights of a model are
decoded and its text is read.

An empty model of the same shape scores random tokens in a rehearsal (parbank/ops/rehearsal.py).
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from parbank import ahead
from parbank.data.progress import Say
from parbank.errors import ConfigError
from parbank.eval.methods.base import Method
from parbank.gpu import on_device
from parbank.model import GPT, ModelConfig
from parbank.ops.rehearsal import can_rehearse, rehearsal
from parbank.runtime import Runtime


class ScoringKernels:
    """A thread that rehearses, on a single GPU. Elsewhere, and for a second model, nothing happens."""

    def __init__(self, runtime: Runtime, say: Say) -> None:
        self._runtime, self._say = runtime, say
        self._future: Future[None] | None = None

    def begin(self, config: ModelConfig, make: Callable[[], Method]) -> None:
        """Starts the thread for a model of this shape and the method that `make` returns. Until `wait`, this process
        must not launch a kernel elsewhere."""
        runtime = self._runtime
        if self._future is None and runtime.is_cuda and runtime.world == 1 and can_rehearse():
            pool = ThreadPoolExecutor(1, thread_name_prefix="parbank-kernels")
            self._future = pool.submit(self._rehearse, config, make)
            pool.shutdown(wait=False)

    def wait(self) -> None:
        """Until kernels may be launched."""
        ahead.wait()
        if self._future is not None:
            self._future.result()

    def _rehearse(self, config: ModelConfig, make: Callable[[], Method]) -> None:
        """An error here costs time only: the score meets it again, and raises it."""
        try:
            rehearse_method(make(), config, self._runtime)
        except ConfigError:
            return
        except Exception as error:
            self._say(f"note: kernels could not be compiled ahead ({type(error).__name__}: {error})")


def rehearse_method(method: Method, config: ModelConfig, runtime: Runtime) -> None:
    """Requests every kernel of a score, and waits until all of them are ready."""
    with torch.device("meta"):
        model = GPT(config)
    with on_device(runtime.device), rehearsal(runtime.device):  # a new thread starts on the first GPU
        model.allocate(runtime.device)
        method.rehearse(model, runtime)
