"""The interface of a model that parbank did not write, and how such a model is scored."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parbank.errors import ConfigError
from parbank.model.config import ModelConfig
from parbank.precision import autocast

CAUSAL_WINDOW = 1024  # tokens, at most: a mask that is missing shows in any window
CAUSAL_TOLERANCE = 2.0**-10  # of the largest logit: kernels that add in any order differ by less, in float32


@runtime_checkable
class LanguageModel(Protocol):
    """A language model that parbank did not write, to be trained on banks, scored, sampled and packed.

    It is a `torch.nn.Module`: `Model`, `pack` and `split_parameters` refuse anything else, since the types of layers show
    the roles of weights. This protocol lists what parbank reads of it; nothing more is read. A module has all of it but
    the call, so `forward` is all that you write.

    - To train: `bank(model)` moves weights of one shape into one tensor, `split_parameters(model)` says which optimizer
      each parameter gets, and `ParallelMuon` steps them. If the model has `get_input_embeddings`,
      `get_output_embeddings` or `get_classifier`, as in transformers and timm, they say what is an embedding or a head.
    - To score and to sample: `Model(model, tokenizer, context=...)`. The call must give one logit for each token of the
      tokenizer. A position must not see the positions after it, nor another row: `score` tries that with random tokens,
      and refuses a model that does.
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

    @property
    def device(self) -> torch.device:
        """That of its weights; the CPU if it has none."""
        return next((tensor.device for tensor in self.module.state_dict().values()), torch.device("cpu"))

    @torch.no_grad()
    def check_causal(self, length: int) -> None:
        """Refuses a module whose logits depend on later tokens, or on another row: its scores would be far too good, since
        windows of one text overlap.

        It reads two windows of random tokens, and again with other tokens at their ends, or in one of them. What comes
        before, or the other window, must stay as it was. All passes have the same shape, so a causal module gives the same
        bits, or nearly so where its kernels add in any order. A module that gives other logits for the same tokens, such as
        one with noise, is judged by that difference.
        """
        length = min(length, CAUSAL_WINDOW)
        ids = torch.randint(self.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
        others = (ids + 1) % self.config.vocab_size
        training = self.training
        self.eval()
        try:
            before = self._read(ids)
            noise = _distance(self._read(ids), before)
            allowed = 4 * noise + CAUSAL_TOLERANCE * before.nan_to_num(posinf=0.0, neginf=0.0).abs().max().item()
            for cut in {length // 2, length - 1} - {0}:
                ends = torch.cat([ids[:, :cut], others[:, cut:]], dim=1)
                change = _distance(self._read(ends)[:, :cut], before[:, :cut])
                if change > allowed:
                    raise ConfigError(
                        f"{type(self.module).__name__} sees later tokens: its logits before position {cut} change by {change:.3g} "
                        "with the tokens from there on, so a score would be far too good; mask its attention (is_causal=True)"
                    )
            for rows, kept in ((ids[:1], others[1:]), 0), ((others[:1], ids[1:]), 1):
                change = _distance(self._read(torch.cat(rows))[kept], before[kept])
                if change > allowed:
                    raise ConfigError(
                        f"{type(self.module).__name__} mixes the rows of a batch: the logits of one text change by {change:.3g} "
                        "with the text beside it, so a score would be wrong; PyTorch's attention layers need batch_first=True"
                    )
        finally:
            self.train(training)

    def _read(self, ids: Tensor) -> Tensor:
        with autocast(self.device):
            return self.features(ids.to(self.device)).float()

    def read_out(self, logits: Tensor, targets: Tensor | None, reduction: str = "mean") -> Tensor:
        """The loss, or the logits in float32."""
        if targets is None:
            return logits.float()
        losses = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction=reduction)
        return losses.view(targets.shape) if reduction == "none" else losses


def _distance(logits: Tensor, others: Tensor) -> float:
    """The largest difference. Tokens that a module rules out have -inf both times."""
    return torch.where(logits == others, 0.0, (logits - others).abs()).max().item()
