"""Forward and backward over one micro-batch, launch by launch or replayed as one CUDA graph.

A pass of the golf model is some six hundred launches, and Python needs almost as long to make them as the GPU to run them (58 of
69 ms on an H200: benchmarks/results/step_before_h200_2026-11-15). A graph makes them one. What it reads and writes stays in place:
the batch is copied in, gradients are added to where they lie, and the loss is added to a total.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from parbank.eval.score import autocast


class Passes:
    """Adds up the loss and the gradients of the micro-batches of one step."""

    def __init__(
        self, forward: Callable[..., Tensor], model: nn.Module, device: torch.device, count: int, *, graph: bool
    ) -> None:
        """`count` passes make a step; each loss and gradient is divided by it."""
        self._forward, self._device, self._count = forward, device, count
        self._parameters = list(model.parameters())
        self._total = torch.zeros((), device=device)
        self._use_graph = graph and device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Tensor | None = None
        self._addresses: list[int | None] = []
        self.captures = 0

    def start(self) -> None:
        """A new step: the loss starts at zero. (Gradients are the optimizer's to clear.)"""
        self._total.zero_()

    @property
    def loss(self) -> Tensor:
        """The mean over the passes since `start`, on the device; the next `start` overwrites it."""
        return self._total

    def add(self, batch: Tensor) -> None:
        """Forward and backward of one micro-batch (rows, length + 1)."""
        if not self._use_graph:
            self._run(batch)
            return
        if self._batch is None or self._batch.shape != batch.shape or self._places() != self._addresses:
            # compiles, and makes the gradients that a graph then finds where they are
            self._run(batch)
            self._batch, self._graph, self._addresses = batch.clone(), None, self._places()
            return
        self._batch.copy_(batch)
        if self._graph is None:
            self._capture(self._batch)
        assert self._graph is not None
        self._graph.replay()

    def _run(self, batch: Tensor) -> None:
        with autocast(self._device):
            loss = self._forward(batch[:, :-1], batch[:, 1:]) / self._count
        loss.backward()
        self._total += loss.detach()

    def _capture(self, batch: Tensor) -> None:
        """Records one pass; nothing is computed yet."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: the loader's thread may wait for its copies meanwhile, which concerns no stream of ours
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._run(batch)
        self._graph = graph
        self.captures += 1

    def _places(self) -> list[int | None]:
        """Where the weights and gradients are that a graph was captured with."""
        pairs = [(p, p.grad) for p in self._parameters]
        return [tensor.data_ptr() if tensor is not None else None for pair in pairs for tensor in pair]
