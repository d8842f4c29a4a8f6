"""A product of two thin matrices beside each matrix of the model (LoRA, Hu et al. 2021), learnt again for each document.

An adapter that restarts with every document must learn faster and from less text than SGD over a whole text: Adam at
its usual rate, over one window of context at a time.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam

from parbank.config import require
from parbank.eval.adaptation.base import AdaptConfig, Adapter, StepwiseAdapter, bank_masks
from parbank.model import GPT
from parbank.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class LowRankConfig(AdaptConfig):
    """Low-rank factors beside the matrices learn, from zero for each document."""

    name = "low-rank"
    help = "factors beside the matrices, anew for each document"
    per_document = True

    rank: int = 8
    """Inner width of the factors."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.rank >= 1, f"--rank must be at least 1, got {self.rank}")

    def make_adapter(self, model: GPT, runtime: Runtime, *, context: int, graphed: bool) -> Adapter:
        return LowRankAdapter(model, runtime, self, context=context, graph=graphed)


class LowRankAdapter(StepwiseAdapter[LowRankConfig]):
    """W + left @ right for every matrix, with left and right learnt by Adam; zero again at the start of a document.

    The sum is written over W, so the model that learns is the model that scores, at no extra cost. With G the
    gradient by W, left's gradient is G right^T and right's is left^T G.
    """

    def _begin(self, model: GPT) -> None:
        config, cuda = self._config, self._runtime.is_cuda
        model.requires_grad_(False)
        banks = {f"banks.{key}": model.banks.bank(key).requires_grad_() for key in model.banks.entries}
        masks = bank_masks(model, config)
        self._weights, self._masks = list(banks.values()), [masks.get(name) for name in banks]
        self._base = [bank.detach().clone() for bank in self._weights]
        generator = torch.Generator().manual_seed(0)  # the same draw on every rank, and for every document
        self._drawn = [
            (torch.randn(n, config.rank, cols, generator=generator) / math.sqrt(cols)).to(bank.device, bank.dtype)
            for bank in self._base
            for n, _, cols in [bank.shape]
        ]
        self._left = [bank.new_zeros(*bank.shape[:2], config.rank) for bank in self._base]
        self._right = [drawn.clone() for drawn in self._drawn]
        self._parameters = [*self._left, *self._right]
        self._moments = [torch.zeros_like(p) for p in self._parameters]
        self._squares = [torch.zeros_like(p) for p in self._parameters]
        self._steps = [
            torch.zeros((), device=p.device if cuda else "cpu", dtype=torch.float32) for p in self._parameters
        ]
        self._changed = False

    def learn(self, tokens: Tensor, progress: float) -> None:
        self._learn_from(tokens)
        self._changed = True

    @torch.no_grad()
    def reset(self) -> None:
        """Resets in place: a graph needs fixed addresses."""
        if not self._changed:
            return
        for left, right, drawn in zip(self._left, self._right, self._drawn):
            left.zero_()
            right.copy_(drawn)
        for tensor in (*self._moments, *self._squares, *self._steps):
            tensor.zero_()
        for bank, base in zip(self._weights, self._base):
            bank.copy_(base)
        self._changed = False

    @torch.no_grad()
    def _step(self, *batches: Tensor) -> None:
        super()._step(*batches)
        with self._in_full():
            for bank, base, mask, left, right in zip(self._weights, self._base, self._masks, self._left, self._right):
                change = left @ right
                bank.copy_(base + (change if mask is None else change * mask))

    def _update(self, grads: list[Tensor]) -> None:
        adam(
            self._parameters, grads, self._moments, self._squares, [], self._steps, amsgrad=False, beta1=0.9, beta2=0.999,
            lr=self._config.lr, weight_decay=0.0, eps=1e-8, maximize=False, capturable=self._runtime.is_cuda,
            fused=True if self._runtime.is_cuda else None,
        )  # fmt: skip

    def _gradients(self, inputs: Tensor, targets: Tensor, count: int) -> list[Tensor]:
        grads = super()._gradients(inputs, targets, count)
        with self._in_full():
            of_left = [grad @ right.mT for grad, right in zip(grads, self._right)]
            return of_left + [left.mT @ grad for grad, left in zip(grads, self._left)]

    def _in_full(self) -> torch.autocast:
        """Computes left and right in full precision, whatever the caller's autocast. They are small."""
        return torch.autocast(self._runtime.device.type, enabled=False)
