"""microsoft/dion's Muon at its documented settings: Triton kernels, batched by shape, eager or as a CUDA graph."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import nn

from peers.catalogue import PEERS

PEER = PEERS["dion"]
WARMUP = 3  # eager steps before the capture
GRAM = "its optional Gram Newton-Schulz kernels, a package of their own, are not installed"
DIFFERS = ("Nesterov momentum is on, as in the other providers; its default is off", GRAM)


def load() -> ModuleType:
    """The package `dion`, as brought into .peers."""
    folder = str(PEER.path("dion/muon.py").parents[1])
    if folder not in sys.path:
        sys.path.append(folder)
    import dion
    import dion.cuda_graph

    # Its own tests raise this: the compiled parts see a new shape with every model, and a recompile during capture fails.
    torch._dynamo.config.cache_size_limit = 64
    return dion


def muon(weights: list[nn.Parameter], *, lr: float = 0.02, weight_decay: float = 0.01, triton: bool = True) -> Any:
    """An optimizer over these matrices. Without a GPU, its Triton kernels must be off."""
    return load().Muon(weights, lr=lr, mu=0.95, weight_decay=weight_decay, nesterov=True, use_triton=triton)


def captured(weights: list[nn.Parameter], *, compiled: bool) -> Callable[[], Any]:
    """A step that replays a CUDA graph. Its documentation asks for capture without torch.compile; its tests compile."""
    optimizer = load().cuda_graph.CudaGraphOptimizer(muon(weights), warmup_steps=WARMUP)
    with nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
        for _ in range(WARMUP + 1):
            optimizer.step()
    return optimizer.step
