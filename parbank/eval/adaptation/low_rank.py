"""Low-rank adapters beside the model's matrices, anew for each document."""

import math

import torch
from torch import Tensor

from parbank.eval.adaptation.base import StepwiseAdapter, bank_masks
from parbank.model import GPT


class LowRankAdapter(StepwiseAdapter):
    """W + left @ right for every matrix, with left and right learnt by Adam; zero again at the start of a document.

    The sum is written to where W stands, so the model that learns is the model that scores, and no more than the model is
    compiled. With G the gradient by W, left's is G right^T and right's is left^T G.
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
        self._optimizer = torch.optim.Adam(
            self._parameters, lr=config.lr or 0.0, capturable=cuda, fused=True if cuda else None
        )
        self._changed = False

    def learn(self, tokens: Tensor, progress: float) -> None:
        self._learn_from(tokens)
        self._changed = True

    @torch.no_grad()
    def reset(self) -> None:
        """In place: a graph knows its tensors by their addresses."""
        if not self._changed:
            return
        for left, right, drawn in zip(self._left, self._right, self._drawn):
            left.zero_()
            right.copy_(drawn)
        for state in self._optimizer.state.values():
            for tensor in state.values():
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

    def _gradients(self, inputs: Tensor, targets: Tensor, count: int) -> list[Tensor]:
        grads = super()._gradients(inputs, targets, count)
        with self._in_full():
            of_left = [grad @ right.mT for grad, right in zip(grads, self._right)]
            return of_left + [left.mT @ grad for grad, left in zip(grads, self._left)]

    def _in_full(self) -> torch.autocast:
        """Left and right are small and kept in full precision, whatever our caller has switched on."""
        return torch.autocast(self._runtime.device.type, enabled=False)
