"""microsoft/dion's Muon at its documented settings: Triton kernels, batched by shape, eager or as a CUDA graph."""

import importlib
import importlib.util
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
GRAM_PACKAGE = "gram_newton_schulz"  # pip install gram-newton-schulz==0.1.6, as its requirements_gns.txt says
DIFFERS = ("Nesterov momentum is on, as in the other providers; its default is off",)


def describe() -> dict[str, Any]:
    """What a result says of its optimizer."""
    return PEER.describe(*DIFFERS, *describe_gram())


def describe_gram() -> tuple[str, ...]:
    """How its optional Gram Newton-Schulz kernels differ, or that they could not run."""
    if importlib.util.find_spec(GRAM_PACKAGE) is None:
        return ("its optional Gram Newton-Schulz kernels, a package of their own, are not installed",)
    return ("its Gram iteration has Polar Express coefficients, and takes square matrices without Gram",)


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


def muon(
    weights: list[nn.Parameter],
    *,
    lr: float = 0.02,
    weight_decay: float = 0.01,
    triton: bool = True,
    gram: bool = False,
) -> Any:
    """An optimizer over these matrices. Without a GPU, its Triton kernels must be off."""
    options = {"use_triton": triton, "use_gram_newton_schulz": gram}
    return load().Muon(weights, lr=lr, mu=0.95, weight_decay=weight_decay, nesterov=True, **options)


def captured(weights: list[nn.Parameter], *, compiled: bool, gram: bool = False) -> Callable[[], Any]:
    """A step that replays a CUDA graph. Its documentation asks for capture without torch.compile; its tests compile."""
    optimizer = load().cuda_graph.CudaGraphOptimizer(muon(weights, gram=gram), warmup_steps=WARMUP)
    with nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
        for _ in range(WARMUP + 1):
            optimizer.step()
    return optimizer.step


def newton_schulz(gram: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """Its iteration on a stack of matrices, in Triton, division by the norm included; or the package of the Gram iteration, as
    its optimizers set it."""
    if not gram:
        return load().newton_schulz_triton.newton_schulz_triton
    package = importlib.import_module(GRAM_PACKAGE)
    options = {"use_gram_newton_schulz": True, "gram_newton_schulz_reset_iterations": [2]}
    return package.GramNewtonSchulz(
        ns_use_kernels=True, compile_kwargs={"fullgraph": True, "mode": "default"}, **options
    )
