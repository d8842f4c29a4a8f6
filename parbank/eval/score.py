"""Bits per byte of the original text: a score that is comparable across tokenizers.

Every method ends with nats per token, in the order of the text; each rank has computed some of them. Only then is
anything summed. So the result does not depend on the number of ranks, to the last bit, as long as a piece of work has
the same shape on any number of ranks: shapes decide rounding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from parbank.config import require
from parbank.data.shards import TokenSet
from parbank.data.tokenizer import Tokenizer
from parbank.errors import DataError, ParbankError
from parbank.eval.audit import Audited, audited
from parbank.model import GPT
from parbank.ops import loss
from parbank.runtime import Runtime

IGNORED = loss.IGNORED  # targets that are not scored
# A token of probability 1 costs 0 nats. Rounding may go so far below: the loss subtracts float32 numbers of up to 60.
LEAST_NATS = -1e-4
# Logits of one batch, tokens times vocabulary: a quarter of a gigabyte on a GPU; on a CPU what its caches can still hold.
_LOGITS_CUDA, _LOGITS_CPU = 1 << 26, 1 << 22
# Of windows on a GPU: tokens, and tokens times channels of an MLP, a quarter of a gigabyte in bfloat16. A GPU has a megabyte for
# each of the tokens: the weights and CUDA graphs of training are there as well, and a small GPU needs longer for its passes.
_WINDOWS_CUDA, _HIDDEN_CUDA, _WINDOW_TOKEN_BYTES = 1 << 16, 1 << 27, 1 << 20
_BLOCK = 1 << 22  # tokens whose bytes are counted together

Progress = Callable[[float], None]


def silent(share: float) -> None:
    """No progress."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A sum of bits over a text. Everything else is a ratio of these numbers."""

    bits: float
    tokens: int
    bytes: int
    bpb: float = field(init=False)
    """Bits per byte."""
    loss: float = field(init=False)
    """Nats per token."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bpb", self.bits / self.bytes)
        object.__setattr__(self, "loss", self.bits * math.log(2) / self.tokens)


@dataclass(frozen=True)
class Text:
    """Tokens to score: on the host, and the same on the device. Target t is token t + 1, given tokens up to t."""

    tokens: np.ndarray  # (N,) uint16
    ids: Tensor  # (N,) int32, on the device

    @classmethod
    def load(cls, tokens: TokenSet, runtime: Runtime) -> "Text":
        if len(tokens) < 2:
            raise DataError(f"the validation text has {len(tokens)} tokens; scoring needs at least 2")
        found = tokens.read(0, len(tokens))
        return cls(found, torch.from_numpy(found.astype(np.int32)).to(runtime.device))

    @property
    def targets(self) -> int:
        return len(self.tokens) - 1

    def upto(self, target: int) -> "Text":
        """The text with the first `target` targets and no token more."""
        return Text(self.tokens[: target + 1], self.ids[: target + 1])

    def new_nats(self) -> Tensor:
        """The tensor that scorers write to: one slot per target, and one at the end for tokens that are not scored."""
        return torch.zeros(self.targets + 1, dtype=torch.float32, device=self.ids.device)


@dataclass(frozen=True)
class Scored:
    """The cost of every target of a text."""

    tokens: np.ndarray  # (N,) uint16
    nats: np.ndarray  # (N - 1,) float32, in the order of the text
    audit: Audited = field(default_factory=Audited)
    """Whether the nats are those of probabilities, at a sample of positions."""
    plain: np.ndarray | None = None  # (N - 1,) the plain score of the same tokens, where a method starts from one

    @classmethod
    def gather(cls, text: Text, nats: Tensor, runtime: Runtime, audit: Audited) -> "Scored":
        """Sums over ranks. One rank wrote each slot and the others hold zero, so the sum changes no bit."""
        return cls(text.tokens, runtime.sum(nats)[:-1].cpu().numpy(), audit)

    def refuse_faults(self) -> None:
        """Raises an error if these nats are no costs of tokens: not finite, below zero, or not of probabilities."""
        if len(broken := np.flatnonzero(~np.isfinite(self.nats))):
            raise ParbankError(
                f"the score is not a number from token {int(broken[0]) + 1:,} of {len(self.nats):,} on; the model's weights are "
                "broken, or adapting to the text made them so (with `eval --method ttt`: lower --lr)"
            )
        if (least := float(self.nats.min(initial=0.0))) < LEAST_NATS:
            place = int(self.nats.argmin())
            raise ParbankError(
                f"token {place + 1:,} of {len(self.nats):,} costs {least:.3g} nats, and no probability is above 1; the score is "
                "refused: score on another device (--device cpu), and report it"
            )
        self.audit.refuse_faults()

    def byte_counts(self, tokenizer: Tokenizer) -> np.ndarray:
        """(N - 1,) the bytes each target stands for."""
        counts = np.empty(len(self.nats), dtype=np.int32)
        for start in range(0, len(counts), _BLOCK):
            piece = self.tokens[start : start + _BLOCK + 1].astype(np.int64)
            counts[start : start + _BLOCK] = tokenizer.count_bytes(piece[1:], piece[:-1])
        return counts

    def total(self, tokenizer: Tokenizer) -> Score:
        """The score. Nats that cannot be the costs of tokens are refused."""
        self.refuse_faults()
        size = int(self.byte_counts(tokenizer).sum(dtype=np.int64))
        if size == 0:
            raise DataError("the validation text has no bytes: it holds nothing but document boundaries")
        nats = float(self.nats.sum(dtype=np.float64))
        return Score(bits=nats / math.log(2), tokens=len(self.nats), bytes=size)


class Scorer(Protocol):
    """Scores a part of a text with the model's current weights."""

    def score(self, text: Text, first: int, nats: Tensor, *, more: bool, progress: Progress = silent) -> None:
        """Targets `first` to the end of `text` into their slots of `nats`: this rank's share. `more` text will follow."""


def tokens_together(vocab_size: int, runtime: Runtime) -> int:
    """The default number of tokens that go through the model together."""
    return max(1, (_LOGITS_CUDA if runtime.is_cuda else _LOGITS_CPU) // vocab_size)


def window_tokens_together(model: GPT, runtime: Runtime) -> int:
    """The same for windows. On a GPU their passes are launched one by one, and Python takes longer to launch a short pass than
    the GPU to run it. Where the head makes its logits in chunks, more tokens need little more memory. Not so with a mask of
    documents, which has an entry for each token and each token of its window. Every rank calls it, and gets the least of all,
    since the number of a batch decides which rank takes it."""
    config = model.config
    found = tokens_together(config.vocab_size, runtime)
    if not runtime.is_cuda:
        return found
    if not config.isolate_documents and isinstance(model, GPT) and model.chunks_logits():
        memory = torch.cuda.get_device_properties(runtime.device).total_memory // _WINDOW_TOKEN_BYTES
        by_memory = 1 << (memory.bit_length() - 1)  # GPUs of one kind may differ a little
        found = max(found, min(_WINDOWS_CUDA, by_memory, _HIDDEN_CUDA // max(config.hidden, config.width)))
    return -int(runtime.agree([-found])[0])


class Pace:
    """Keeps the host only slightly ahead of the device, so that progress shows finished work, not queued work."""

    AHEAD = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []

    def step(self) -> None:
        """Records that work was queued, and waits for the piece before the last."""
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)
        if len(self._events) > self.AHEAD:
            self._events.pop(0).synchronize()


def check_context(context: int) -> None:
    require(context >= 1, f"a window has at least 1 token, got {context}")


def run_scorer(scorer: Scorer, model: GPT, text: Text, runtime: Runtime, progress: Progress) -> Scored:
    """One pass over a text with constant weights."""
    nats = text.new_nats()
    training = model.training
    model.eval()
    try:
        with audited(model, runtime.device) as audit:
            scorer.score(text, 0, nats, more=False, progress=progress)
    finally:
        model.train(training)
    return Scored.gather(text, nats, runtime, audit.gather(runtime))
