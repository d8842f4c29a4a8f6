"""Low-rank changes of a model's matrices, other ones for each document of a batch. (LoRA, Hu et al. 2021.)

Every document of a batch reads the same matrix W and adds left @ right: `right` is a fixed random projection that all
documents share, `left` is the document's own and learns. The sum is never made. x W^T and x right^T are products for
all documents together, and only the thin product with `left` is a batched one. `left` starts at zero, where the gradient
by `right` is zero too; a document is over before learning `right` would matter, and a fixed one halves the work.

Later documents may start where earlier ones ended on average, and with the mean square of their gradients (Reptile,
Nichol et al. 2018). An optimizer that knows no gradient yet moves every number by the whole rate at its first step.
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


class DocumentFactors:
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
        self._start = {name: torch.zeros(2, *left.shape[1:], device=device) for name, left in self.left.items()}
        self.end_size = 1 + sum(start.numel() for start in self._start.values())
        self.warm = False  # whether earlier documents have taught where to start

    @torch.no_grad()
    def reset(self) -> None:
        """Other documents begin. In place: a CUDA graph needs fixed addresses."""
        for name, (left, square) in self._start.items():
            self.left[name].copy_(left.expand_as(self.left[name]))
            self._square[name].copy_(square.expand_as(self._square[name]))

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor], rate: Tensor, number: Tensor, reading: Tensor) -> None:
        """One step on the first rows, as many as the gradients have, at each row's rate, (rows, 1, 1). `number` counts
        steps from 1, or is infinite where squares started warm. reading (rows, 1, 1): 0 for a document that is over,
        whose factors and squares stay."""
        for name, grad in grads.items():
            square = self._square[name][: len(grad)].lerp_(grad * grad, (1 - self.DECAY) * reading)
            width = (square / (1 - self.DECAY**number)).sqrt_().add_(self.EPS)
            self.left[name][: len(grad)] -= rate * grad / width

    @torch.no_grad()
    def sum_ends(self, rows: Tensor, steps: Tensor) -> Tensor:
        """One vector: the number of some rows, and the sums of what they learnt. rows (n,): their indices. steps (n,): the
        steps that each row took, at least one. A row does not count if a factor or a square is not finite any more."""
        # A mean square that started from zero is too small by this factor.
        known = torch.ones_like(steps) if self.warm else 1 - self.DECAY**steps
        known = known[:, None, None]
        counts = torch.ones_like(rows, dtype=torch.bool)
        for state in (*self.left.values(), *self._square.values()):
            counts &= state[rows].isfinite().flatten(1).all(1)
        parts = [counts.sum()[None].float()]
        for name, left in self.left.items():
            moved, square = left[rows] - self._start[name][0], self._square[name][rows] / known
            ends = torch.stack([moved, square], 1).flatten(1)
            parts.append(torch.where(counts[:, None], ends, 0.0).sum(0))
        return torch.cat(parts)

    @torch.no_grad()
    def start_from(self, ends: Tensor, share: float) -> None:
        """The next documents start at this share of the way to where earlier ones ended, on average. `ends`: what
        `sum_ends` gave, summed over groups of documents."""
        if ends[0] == 0:
            return
        parts = (ends[1:] / ends[0]).split([start.numel() for start in self._start.values()])
        for start, part in zip(self._start.values(), parts):
            moved, square = part.view_as(start)
            start[0] += share * moved
            start[1] = square
        self.warm = True
