"""The interface of a model that parbank did not write, and how such a model is scored."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from parbank.errors import ConfigError
from parbank.model.config import ModelConfig


class LanguageModel(Protocol):
    """A language model that parbank did not write, to be trained on banks, scored, sampled and packed.

    It is a `torch.nn.Module`: `Model`, `pack` and `split_parameters` refuse anything else, since the types of layers show
    the roles of weights. This protocol lists what parbank reads of it; nothing more is read. A module has all of it but
    the call, so `forward` is all that you write.

    - To train: `bank(model)` moves weights of one shape into one tensor, `split_parameters(model)` says which optimizer
      each parameter gets, and `ParallelMuon` steps them. If the model has `get_input_embeddings`,
      `get_output_embeddings` or `get_classifier`, as in transformers and timm, they say what is an embedding or a head.
    - To score and to sample: `Model(model, tokenizer, context=...)`. The call must give one logit for each token of the
      tokenizer. A position must not see the positions after it: parbank cannot check that, and a model that does scores
      far too well.
    - To pack: `pack(model, max_bytes=..., calibration=...)`. Weights become integers; buffers of integers and bools are
      kept exactly.
    """

    training: bool

    def __call__(self, ids: Tensor, /) -> Any:
        """ids (B, T) int64 -> logits (B, T, vocabulary), or an object that has them as `.logits`."""

    def state_dict(self) -> dict[str, Any]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...

    def train(self, mode: bool = True) -> Any: ...

    def eval(self) -> Any: ...

    def requires_grad_(self, requires_grad: bool = True) -> Any: ...


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
