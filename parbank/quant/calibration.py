"""Measurements of the loss for quantisation, as plain tensors. `parbank.artifact.calibrate` makes them."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The expected loss increase, in nats a token, of an error D of a tensor: 1/2 sum_r g_r D_r H D_r^T."""

    hessians: dict[str, Tensor] = field(default_factory=dict)
    """H (cols, cols) by name: the mean of x x^T over the tensor's inputs."""
    sensitivity: dict[str, Tensor] = field(default_factory=dict)
    """g (rows,) by name: the mean square of the loss's gradient by each output."""
    logits: frozenset[str] = frozenset()
    """The tensors whose outputs are logits: large errors of them cost more than their square; see `parbank.quant.bank`."""
    tokens: int = 0
    """Tokens it was measured on; 0: nothing was measured."""
