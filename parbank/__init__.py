"""parbank: small language models against two hard budgets, minutes and megabytes.

`train`, `load` and `pack` do the work of the commands with these names. `train` returns a `Run`, `load` a `Model`.
The other names are parts for your own trainer: the optimizer, its banks, the loader and the ops. docs/guide explains
each.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Model",
    "ParallelMuon",
    "Prefetcher",
    "Run",
    "__version__",
    "bank",
    "load",
    "ops",
    "orthogonalize",
    "pack",
    "split_parameters",
    "train",
]

if TYPE_CHECKING:
    from parbank import ops
    from parbank.api.model import Model, load
    from parbank.api.packing import pack
    from parbank.api.run import Run, train
    from parbank.data.prefetch import Prefetcher
    from parbank.optim import ParallelMuon, bank, orthogonalize, split_parameters
else:  # a type checker that saw this function would accept any name

    def __getattr__(name: str) -> Any:
        """Imports a name on first use, so that `parbank --help` need not wait for PyTorch."""
        if name == "ops":
            return importlib.import_module("parbank.ops")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)


_HOMES = {
    **dict.fromkeys(("Model", "load"), "parbank.api.model"),
    "pack": "parbank.api.packing",
    **dict.fromkeys(("Run", "train"), "parbank.api.run"),
    **dict.fromkeys(("ParallelMuon", "bank", "orthogonalize", "split_parameters"), "parbank.optim"),
    "Prefetcher": "parbank.data.prefetch",
}


def __dir__() -> list[str]:
    """The public names alone: importing a submodule does not add to them."""
    return list(__all__)
