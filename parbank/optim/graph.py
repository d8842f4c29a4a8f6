"""The whole step as one CUDA graph: about forty launches become one.

A graph replays the same kernels on the same memory. Between replays, values in memory may change: gradients, weights,
state, and the table of hyperparameters. The key holds everything else: every address, the layout, and the numbers
that an algorithm takes by value (`Algorithm.constants`). When the key changes, the step runs without a graph until
the key has been stable for CALM steps, and is then captured again. Those steps also compile kernels, fill tables and
create the state.

Gradients that are set to None and created by every backward may have new addresses each time. After PATIENCE such
steps they are copied to fixed memory first (one launch, one pass over the gradients).
"""

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parbank.errors import DeviceError
from parbank.graphs import recording
from parbank.optim.algorithm import find_algorithm

if TYPE_CHECKING:
    from parbank.optim.parallel_muon import ParallelMuon

CALM = 2  # the first step makes the state, so that the second has the addresses of all later ones
PATIENCE = 8  # changes in a row without one replay

_log = logging.getLogger("parbank")


class GraphedStep:
    """Runs an optimizer's step: eagerly while addresses or settings change, then from a graph."""

    def __init__(self, optimizer: "ParallelMuon") -> None:
        self._optimizer = optimizer
        self._graph: torch.cuda.CUDAGraph | None = None
        self._key: tuple[Any, ...] | None = None
        self._calm = 0
        self._restless = 0
        self._places: dict[Tensor, Tensor] = {}
        self.captures = 0
        """How often the step has been captured: more than a few times a run means that something keeps changing."""

    def step(self) -> None:
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        if not params[0].is_cuda:
            raise DeviceError(
                f"cuda_graph=True needs parameters on a GPU, and they are on {params[0].device}; "
                "move the model there first, or leave it out"
            )
        if getattr(self._optimizer, "found_inf", None) is not None:  # a GradScaler brings new tensors every step
            self._optimizer.run()
            return
        if self._places or self._restless >= PATIENCE:
            self._settle_gradients(params)
        key = self._current_key(params)
        if key != self._key:
            self._restless += 1
            self._key, self._calm, self._graph = key, 0, None
        if self._graph is None and self._calm < CALM:
            self._calm += 1
            self._optimizer.run()
            # The first step makes the state: its addresses belong to the key of the next one.
            self._key = self._current_key(params)
            return
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        self._restless = 0
        self._graph.replay()

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph):
                self._optimizer.run()
        except RuntimeError as error:
            raise DeviceError(
                "the optimizer step could not be captured as a CUDA graph; extra_captured must not wait for the device or copy "
                f"from ordinary host memory. Leave out cuda_graph=True to run without. The cause: {error}"
            ) from error
        self._graph = graph
        self.captures += 1
        _log.info("optimizer step captured as a CUDA graph (capture %d)", self.captures)

    def _settle_gradients(self, params: list[Tensor]) -> None:
        """Copies gradients to the addresses that the graph reads, and leaves them there."""
        having = [(param, param.grad) for param in params if param.grad is not None]
        for param, grad in having:
            if param not in self._places or self._places[param].dtype != grad.dtype:
                self._places[param] = torch.empty_like(grad)
        moved = [(param, grad) for param, grad in having if grad is not self._places[param]]
        if moved:
            torch._foreach_copy_([self._places[param] for param, _ in moved], [grad for _, grad in moved])
            for param, _ in moved:
                param.grad = self._places[param]

    def _current_key(self, params: list[Tensor]) -> tuple[Any, ...]:
        optimizer = self._optimizer
        addresses: list[Any] = []
        for param in params:
            addresses.append(param.data_ptr())
            addresses.append(None if param.grad is None else param.grad.data_ptr())
            if param in optimizer.state:
                addresses += [v.data_ptr() for v in optimizer.state[param].values() if isinstance(v, Tensor)]
        numbers = [(group["maximize"], find_algorithm(group).constants(group)) for group in optimizer.param_groups]
        clips = optimizer.max_norm is not None  # decides the order of the step
        fixed = (optimizer.reduce_gradients, clips, id(optimizer.extra_captured), optimizer.fixed_addresses())
        return tuple(addresses), tuple(numbers), optimizer.layout_key(), fixed
