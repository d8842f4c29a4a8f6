"""Bits per byte: the one score, comparable across tokenizers because it is taken over bytes of the original text."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from parbank.config import require
from parbank.data.shards import TokenSet
from parbank.data.tokenizer import Tokenizer
from parbank.errors import DataError
from parbank.model import GPT
from parbank.runtime import Runtime

IGNORED = -100  # targets that pad the last window: PyTorch's ignore_index
# Logits of one batch, tokens times vocabulary: a quarter of a gigabyte on a GPU; on a CPU what its caches can still hold.
_LOGITS_CUDA, _LOGITS_CPU = 1 << 26, 1 << 22


@dataclass(frozen=True, kw_only=True)
class Score:
    """A sum of bits over a text. Everything else is a ratio of these."""

    bits: float
    tokens: int
    bytes: int

    @property
    def bpb(self) -> float:
        return self.bits / self.bytes

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.bits * math.log(2) / self.tokens


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bfloat16 on CUDA, float32 elsewhere: the precision of training and of scoring alike."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


@torch.inference_mode()
def score_chunked(
    model: GPT,
    tokens: TokenSet,
    tokenizer: Tokenizer,
    *,
    context: int,
    runtime: Runtime,
    batch_tokens: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Score:
    """Cuts the text into windows of `context` tokens and scores each token once, given what precedes it in its window.

    The first token (a BOS) is given. A BOS that closes a document is predicted like any token and counts no bytes: the
    bits that say where a text ends are part of its price. How many windows go through the model together is fixed by the
    model and the kind of device, because it decides the rounding: a score taken again is the same to the last bit.
    """
    require(context >= 1, f"a window has at least 1 token, got {context}")
    if len(tokens) < 2:
        raise DataError(f"the validation text has {len(tokens)} tokens; scoring needs at least 2")
    windows = math.ceil((len(tokens) - 1) / context)
    mine = np.arange(runtime.rank, windows, runtime.world)
    if batch_tokens is None:
        batch_tokens = (_LOGITS_CUDA if runtime.is_cuda else _LOGITS_CPU) // tokenizer.vocab_size
    rows = max(1, batch_tokens // context)
    total = torch.zeros(1, dtype=torch.float64, device=runtime.device)
    counts = np.zeros(2, dtype=np.int64)
    training = model.training
    model.eval()
    for first in range(0, len(mine), rows):
        inputs, targets = _gather(tokens, mine[first : first + rows], context)
        scored = targets != IGNORED
        counts += scored.sum(), tokenizer.count_bytes(targets[scored], inputs[scored]).sum()
        x, y = (torch.from_numpy(a).to(runtime.device) for a in (inputs, targets))
        with autocast(runtime.device):
            total += model(x, y, reduction="none").double().sum()
        progress(min(1.0, (first + rows) / len(mine)))
    model.train(training)
    sums = torch.cat([total.cpu(), torch.from_numpy(counts).double()])
    nats, scored_tokens, scored_bytes = runtime.sum(sums).tolist()
    if scored_bytes == 0:
        raise DataError("the validation text has no bytes: it holds nothing but document boundaries")
    return Score(bits=nats / math.log(2), tokens=int(scored_tokens), bytes=int(scored_bytes))


def _gather(tokens: TokenSet, windows: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets (rows, context), int64, the last window padded with ignored targets."""
    width = min(context, len(tokens) - 1)
    inputs = np.zeros((len(windows), width), dtype=np.int64)
    targets = np.full((len(windows), width), IGNORED, dtype=np.int64)
    for row, window in enumerate(windows):
        start = int(window) * context
        count = min(context, len(tokens) - 1 - start)
        piece = tokens.read(start, count + 1).astype(np.int64)
        inputs[row, :count], targets[row, :count] = piece[:-1], piece[1:]
    return inputs, targets
