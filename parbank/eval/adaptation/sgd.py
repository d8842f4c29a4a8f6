"""SGD over the model's own weights, which keep their changes to the end of the text. (Dynamic evaluation: Krause et al.
2017.)

As in parameter-golf #461 and #549: rate 0.002 over chunks of 32,768 tokens, falling to 0 over the text as a cosine.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from parbank.config import require
from parbank.eval.adaptation.base import AdaptConfig, Adapter, StepwiseAdapter, bank_masks, may_learn
from parbank.model import GPT
from parbank.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class SgdConfig(AdaptConfig):
    """All weights learn, over the whole text."""

    name = "sgd"
    help = "all weights, over the whole text"

    lr: float = 0.002
    """Learning rate, falling to 0 over the text as a cosine."""
    chunk: int | None = 32_768
    """Tokens scored before they are learnt from; none takes the context."""
    momentum: float = 0.9
    """Momentum of the SGD steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.momentum < 1, f"--momentum must lie in [0, 1), got {self.momentum}")

    def make_adapter(self, model: GPT, runtime: Runtime, *, context: int, graphed: bool) -> Adapter:
        return SgdAdapter(model, runtime, self, context=context, graph=graphed)


class SgdAdapter(StepwiseAdapter[SgdConfig]):
    """SGD over the model's own weights, which keep their changes to the end of the text."""

    def _begin(self, model: GPT) -> None:
        config, cuda = self._config, self._runtime.is_cuda
        named = {name: p for name, p in model.named_parameters() if may_learn(name, config)}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in named)
        self._weights = self._parameters = list(named.values())
        masks = bank_masks(model, config)
        self._masks = [masks.get(name) for name in named]
        # A graph stores a number for ever, but reads a tensor at each replay; only the fused form takes a tensor.
        self._rate: Tensor | float = torch.zeros((), device=self._runtime.device) if cuda else 0.0
        self._momenta: list[Tensor | None] = [None] * len(self._parameters) if config.momentum else []

    def learn(self, tokens: Tensor, progress: float) -> None:
        self._set_rate(self._config.lr * 0.5 * (1 + math.cos(math.pi * progress)))
        self._learn_from(tokens)

    def reset(self) -> None:
        """Does nothing: all documents are one text."""

    def _update(self, grads: list[Tensor]) -> None:
        sgd(
            self._parameters, grads, self._momenta, fused=True if self._runtime.is_cuda else None, weight_decay=0.0,
            momentum=self._config.momentum, lr=cast(float, self._rate), dampening=0.0, nesterov=False, maximize=False,
        )  # fmt: skip

    def _set_rate(self, rate: float) -> None:
        if isinstance(self._rate, Tensor):
            self._rate.fill_(rate)
        else:
            self._rate = rate
