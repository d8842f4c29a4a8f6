"""Low-rank changes of a model's matrices, other ones for each document of a batch. (LoRA, Hu et al. 2021.)

Every document of a batch reads the same matrix W and adds left @ right: `right` is a fixed random projection that all
documents share, `left` is the document's own and learns. The sum is never made. x W^T and x right^T are products for
all documents together, and only the thin product with `left` is a batched one. `left` starts at zero, where the gradient
by `right` is zero too; a document is over before learning `right` would matter, and a fixed one halves the work.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Adapted:
    """Stands for W + left @ right in `F.linear`, for a batch whose rows have a `left` of their own.

    Not a tensor: it has the attributes that ops check, and takes part in `F.linear` and nothing else.
    """

    def __init__(self, weight: Tensor, left: Tensor, right: Tensor) -> None:
        """weight (out, in); left (B, out, rank); right (rank, in)."""
        self.weight, self.left, self.right = weight, left, right
        self.shape, self.dtype, self.device, self.is_cuda = weight.shape, weight.dtype, weight.device, weight.is_cuda

    def dim(self) -> int:
        return self.weight.dim()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Tensor:
        if function is not F.linear:
            raise TypeError(f"a matrix with factors beside it takes part in F.linear only, not in {function}")
        x, own = args
        return F.linear(x, own.weight) + F.linear(x, own.right) @ own.left.mT


class Factors:
    """The factors of some matrices for `rows` documents, and the state of the optimizer that learns them.

    The optimizer is Adam without momentum: a chunk is learnt from once, and the next one is scored at once.
    """

    DECAY = 0.99  # of the mean square of gradients
    EPS = 1e-8

    def __init__(self, shapes: dict[str, tuple[int, int]], rows: int, rank: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)  # the same draw on every rank
        self.right = {
            name: torch.linalg.qr(torch.randn(cols, min(rank, cols), generator=generator))[0].mT.contiguous().to(device)
            for name, (_, cols) in shapes.items()
        }
        self.left = {
            name: torch.zeros(rows, outputs, min(rank, cols), device=device) for name, (outputs, cols) in shapes.items()
        }
        self._square = {name: torch.zeros_like(left) for name, left in self.left.items()}

    @torch.no_grad()
    def reset(self) -> None:
        """Other documents begin. In place: a CUDA graph needs fixed addresses."""
        for tensor in (*self.left.values(), *self._square.values()):
            tensor.zero_()

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor], rate: Tensor, number: Tensor) -> None:
        """One step on the first rows, as many as the gradients have, at each row's rate, (rows, 1, 1). `number` counts
        steps from 1."""
        for name, grad in grads.items():
            square = self._square[name][: len(grad)].lerp_(grad * grad, 1 - self.DECAY)
            width = (square / (1 - self.DECAY**number)).sqrt_().add_(self.EPS)
            self.left[name][: len(grad)] -= rate * grad / width
