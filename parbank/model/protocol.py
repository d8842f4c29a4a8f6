"""The interface of a model that parbank did not write, and how such a model is scored."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from parbank.errors import ConfigError
from parbank.model.config import ModelConfig


class LanguageModel(Protocol):
    """A language model that parbank can train, score and pack. Any `nn.Module` whose forward takes token ids and returns
    logits is one; nothing needs to be inherited or registered.

    - To train: `named_parameters()`. `split_parameters(model)` says which optimizer each parameter gets, `bank(model)`
      moves weights of one shape into one tensor, and `ParallelMuon` steps them.
    - To score and to sample: the call below, with a vocabulary of the tokenizer's size. A position must not see the
      positions after it: parbank cannot check that, and a model that does scores far too well.
    - To pack: `state_dict()`. Weights become integers; buffers of integers and bools are kept exactly.
    """

    training: bool

    def __call__(self, ids: Tensor, /) -> Any:
        """ids (B, T) int64 -> logits (B, T, vocabulary), or an object that has them as `.logits`."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def train(self, mode: bool = True) -> Any: ...

    def eval(self) -> Any: ...


class PlainModel(nn.Module):
    """Any language model behind the interface that scoring uses: with targets, the loss of each token."""

    def __init__(self, module: nn.Module, *, vocab_size: int, bos_id: int) -> None:
        super().__init__()
        self.module = module
        self.config = ModelConfig(vocab_size=vocab_size, bos_id=bos_id)

    def forward(self, ids: Tensor, targets: Tensor | None = None, reduction: str = "mean") -> Tensor:
        """ids (B, T). With targets (B, T) the loss in nats (mean, sum, or none: one per token), else the logits."""
        return self.read_out(self.features(ids), targets, reduction)

    def features(self, ids: Tensor) -> Tensor:
        """The module's logits, checked."""
        found = self.module(ids)
        logits = getattr(found, "logits", found)
        expected = (*ids.shape, self.config.vocab_size)
        if not isinstance(logits, Tensor) or logits.shape != expected:
            given = tuple(logits.shape) if isinstance(logits, Tensor) else type(found).__name__
            raise ConfigError(
                f"{type(self.module).__name__} returned {given} for ids of shape {tuple(ids.shape)}; a language model returns "
                f"logits of shape {expected}, one for each token of its tokenizer, or an object that has them as .logits"
            )
        return logits

    def read_out(self, logits: Tensor, targets: Tensor | None, reduction: str = "mean") -> Tensor:
        """The loss, or the logits in float32."""
        if targets is None:
            return logits.float()
        losses = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction=reduction)
        return losses.view(targets.shape) if reduction == "none" else losses
