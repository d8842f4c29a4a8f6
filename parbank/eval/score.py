"""Bits per byte: the one score, comparable across tokenizers because it is taken over bytes of the original text.

Every method ends in the same place: nats per token, in the order of the text, of which each rank has worked out some. Only
then is anything added up. So how the work was shared out cannot show in the result, to the last bit, as long as a piece of
work has the same shape on any number of ranks; shapes decide rounding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from parbank.config import require
from parbank.data.shards import TokenSet
from parbank.data.tokenizer import Tokenizer
from parbank.errors import DataError, ParbankError
from parbank.graphs import Graphs, addresses
from parbank.model import GPT
from parbank.model.gpt import MAX_POSITIONS
from parbank.precision import autocast
from parbank.runtime import Runtime

IGNORED = -100  # targets that are not scored: PyTorch's ignore_index
# Logits of one batch, tokens times vocabulary: a quarter of a gigabyte on a GPU; on a CPU what its caches can still hold.
_LOGITS_CUDA, _LOGITS_CPU = 1 << 26, 1 << 22
_BLOCK = 1 << 22  # tokens whose bytes are counted together

Progress = Callable[[float], None]


def silent(share: float) -> None:
    """No progress."""


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
        """Where scorers write, one slot a target, and one at the end for what is not scored."""
        return torch.zeros(self.targets + 1, dtype=torch.float32, device=self.ids.device)


@dataclass(frozen=True)
class Scored:
    """What every target of a text cost."""

    tokens: np.ndarray  # (N,) uint16
    nats: np.ndarray  # (N - 1,) float32, in the order of the text

    @classmethod
    def gather(cls, text: Text, nats: Tensor, runtime: Runtime) -> "Scored":
        """Every slot was written by one rank and is zero on the others, so this sum changes no bit."""
        return cls(text.tokens, runtime.sum(nats)[:-1].cpu().numpy())

    def byte_counts(self, tokenizer: Tokenizer) -> np.ndarray:
        """(N - 1,) the bytes each target stands for."""
        counts = np.empty(len(self.nats), dtype=np.int32)
        for start in range(0, len(counts), _BLOCK):
            piece = self.tokens[start : start + _BLOCK + 1].astype(np.int64)
            counts[start : start + _BLOCK] = tokenizer.count_bytes(piece[1:], piece[:-1])
        return counts

    def total(self, tokenizer: Tokenizer) -> Score:
        size = int(self.byte_counts(tokenizer).sum(dtype=np.int64))
        if size == 0:
            raise DataError("the validation text has no bytes: it holds nothing but document boundaries")
        nats = float(self.nats.sum(dtype=np.float64))
        if not math.isfinite(nats):
            place = int(np.flatnonzero(~np.isfinite(self.nats))[0])
            raise ParbankError(
                f"the score is not a number from token {place + 1:,} of {len(self.nats):,} on; the model's weights are broken, or "
                "adapting to the text made them so: lower --lr"
            )
        return Score(bits=nats / math.log(2), tokens=len(self.nats), bytes=size)


class Scorer(Protocol):
    """Scores a stretch of a text with the model's weights of the moment."""

    def score(self, text: Text, first: int, nats: Tensor, *, more: bool, progress: Progress = silent) -> None:
        """Targets `first` to the end of `text` into their slots of `nats`: this rank's share. `more` text will follow."""


def tokens_together(vocab_size: int, runtime: Runtime) -> int:
    """How many tokens go through the model at once, unless somebody says otherwise."""
    return max(1, (_LOGITS_CUDA if runtime.is_cuda else _LOGITS_CPU) // vocab_size)


def plan_windows(first: int, last: int, context: int, stride: int) -> np.ndarray:
    """(windows, 3): the window's start, and the targets from .. to that it scores, for targets `first` to `last`.

    The public protocol: windows of `context` tokens, moved by `stride`. The first one of a text scores all its tokens, each
    later one its last `stride`: every token once, with at least context - stride tokens before it where there are that
    many. A stride of `context` cuts the text into windows side by side.
    """
    head = [[0, 0, min(context, last)]] if first == 0 and last > 0 else []
    begins = np.arange(head[0][2] if head else first, last, stride)
    rest = np.stack([np.maximum(0, begins + stride - context), begins, np.minimum(begins + stride, last)], axis=1)
    return np.concatenate([np.array(head, dtype=np.int64).reshape(-1, 3), rest])


class Pace:
    """Keeps the host a little ahead of the device, and no more: progress then says what is done, not what is queued."""

    AHEAD = 2

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []

    def step(self) -> None:
        """A piece of work was queued; waits for the one before the last."""
        if not self._cuda:
            return
        event = torch.cuda.Event()
        event.record()
        self._events.append(event)
        if len(self._events) > self.AHEAD:
            self._events.pop(0).synchronize()


class WindowScorer:
    """Windows, many at a time; which rank takes a batch is decided by its number."""

    def __init__(
        self, model: GPT, runtime: Runtime, *, width: int, stride: int, rows: int, compiled: bool = False
    ) -> None:
        """`rows` windows of at most `width` tokens go through together. Compiled, every batch is padded to that, and on a
        GPU replayed as a graph: Python takes longer to launch such a pass than the GPU to run it."""
        self._forward: Callable[..., Tensor] = torch.compile(model, dynamic=False) if compiled else model
        self._runtime, self._width, self._stride, self._rows = runtime, width, stride, rows
        self._padded = compiled
        self._model = model
        self._graphs = Graphs(enabled=compiled and runtime.is_cuda)

    @property
    def captures(self) -> int:
        """How many graphs were made."""
        return self._graphs.captures

    @torch.inference_mode()
    def score(self, text: Text, first: int, nats: Tensor, *, more: bool, progress: Progress = silent) -> None:
        windows = torch.from_numpy(plan_windows(first, text.targets, self._width, self._stride))
        batches = windows.to(text.ids.device).split(self._rows)
        pace = Pace(text.ids.device)
        for number in range(self._runtime.rank, len(batches), self._runtime.world):
            self._score_batch(text.ids, batches[number], nats)
            pace.step()
            progress(min(1.0, (number + self._runtime.world) / len(batches)))

    def _score_batch(self, ids: Tensor, windows: Tensor, nats: Tensor) -> None:
        if self._padded and len(windows) < self._rows:  # windows that score nothing
            windows = torch.cat([windows, windows.new_zeros(self._rows - len(windows), 3)])
        start, begin, end = windows[:, :, None].unbind(1)
        place = start + torch.arange(self._width, device=ids.device)
        known = place.clamp(max=len(ids) - 1)
        inputs = torch.where(place < end, ids[known], 0).long()
        scored = (place >= begin) & (place < end)
        targets = torch.where(scored, ids[(known + 1).clamp(max=len(ids) - 1)], IGNORED).long()
        losses = self._graphs.run(self._run, [inputs, targets], places=lambda: addresses(self._model.parameters()))
        nats[torch.where(scored, place, len(nats) - 1)] = losses.float()

    def _run(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast(inputs.device):
            return self._forward(inputs, targets, reduction="none")


def check_context(context: int) -> None:
    require(context >= 1, f"a window has at least 1 token, got {context}")


def check_windows(context: int, stride: int, *, width: int | None = None) -> None:
    """`width`: how long windows get, where that is known to be less than the context."""
    check_context(context)
    require(
        (width or context) <= MAX_POSITIONS,
        f"a window of {context} tokens is longer than the model's {MAX_POSITIONS} positions; lower --context, or use streaming "
        "scores, which have no longest window",
    )
    allowed = f"a stride must lie in 1..{context}, the context"
    require(stride >= 1, f"{allowed}: with {stride} windows would not move on; raise --stride")
    require(stride <= context, f"{allowed}: with {stride} tokens would be left out; lower --stride, or raise --context")


def make_window_scorer(
    model: GPT,
    runtime: Runtime,
    *,
    targets: int,
    piece: int | None = None,
    context: int,
    stride: int,
    batch_tokens: int | None,
    compiled: bool,
) -> WindowScorer:
    """For a text of so many targets that comes whole, or in pieces of at most so many."""
    width = min(context, targets)
    check_windows(context, stride, width=width)
    together = batch_tokens or tokens_together(model.config.vocab_size, runtime)
    stride = min(stride, width)
    rows = min(max(1, together // width), 1 + (piece or targets) // stride)  # never more than there are windows to fill
    return WindowScorer(model, runtime, width=width, stride=stride, rows=rows, compiled=compiled)


def score_windows(
    model: GPT,
    tokens: TokenSet,
    *,
    context: int,
    stride: int,
    runtime: Runtime,
    batch_tokens: int | None = None,
    compiled: bool = False,
    progress: Progress = silent,
) -> Scored:
    """Sliding windows over a text; see plan_windows for the protocol."""
    check_context(context)
    text = Text.load(tokens, runtime)
    scorer = make_window_scorer(
        model,
        runtime,
        targets=text.targets,
        context=context,
        stride=stride,
        batch_tokens=batch_tokens,
        compiled=compiled,
    )
    return run_scorer(scorer, model, text, runtime, progress)


def run_scorer(scorer: Scorer, model: GPT, text: Text, runtime: Runtime, progress: Progress) -> Scored:
    """One pass over a text with weights that stay as they are."""
    nats = text.new_nats()
    training = model.training
    model.eval()
    try:
        scorer.score(text, 0, nats, more=False, progress=progress)
    finally:
        model.train(training)
    return Scored.gather(text, nats, runtime)


def score_chunked(
    model: GPT,
    tokens: TokenSet,
    tokenizer: Tokenizer,
    *,
    context: int,
    runtime: Runtime,
    batch_tokens: int | None = None,
    progress: Progress = silent,
) -> Score:
    """Cuts the text into windows of `context` tokens and scores each token once, given what precedes it in its window.

    The first token (a BOS) is given. A BOS that closes a document is predicted like any token and counts no bytes: the
    bits that say where a text ends are part of its price. How many windows go through the model together is fixed by the
    model and the kind of device, because it decides the rounding: a score taken again is the same to the last bit.
    """
    scored = score_windows(
        model,
        tokens,
        context=context,
        stride=max(1, context),
        runtime=runtime,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    return scored.total(tokenizer)
