"""parbank: small language models against two hard budgets, minutes and megabytes.

The command line is `parbank`; these are the parts that other trainers import.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["ParallelMuon", "__version__", "bank", "orthogonalize", "split_parameters"]

if TYPE_CHECKING:
    from parbank.optim import ParallelMuon, bank, orthogonalize, split_parameters


def __getattr__(name: str) -> Any:
    """Imported on first use, so that `parbank --help` need not wait for PyTorch."""
    if name in __all__:
        from parbank import optim

        return getattr(optim, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
