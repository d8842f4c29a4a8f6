"""Scores by windows of a text: the plan of the public protocol, and the scorer that runs it.

Chunked scores use adjacent windows, sliding scores overlapping ones, and test-time training may score its chunks by
windows.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from parbank.config import require
from parbank.data.shards import TokenSet
from parbank.data.tokenizer import Tokenizer
from parbank.eval.score import (
    IGNORED,
    Pace,
    Progress,
    Score,
    Scored,
    Text,
    check_context,
    run_scorer,
    silent,
    window_tokens_together,
)
from parbank.graphs import Graphs, addresses
from parbank.model import GPT
from parbank.model.gpt import MAX_POSITIONS
from parbank.precision import autocast
from parbank.runtime import Runtime


def plan_windows(first: int, last: int, context: int, stride: int) -> np.ndarray:
    """(windows, 3): the window's start, and the targets from .. to that it scores, for targets `first` to `last`.

    The public protocol: windows of `context` tokens, moved by `stride`. The first window of a text scores all its
    tokens, each later one its last `stride`. So every token is scored once, with at least context - stride tokens
    before it if there are that many. A stride of `context` gives adjacent windows.
    """
    head = [[0, 0, min(context, last)]] if first == 0 and last > 0 else []
    begins = np.arange(head[0][2] if head else first, last, stride)
    rest = np.stack([np.maximum(0, begins + stride - context), begins, np.minimum(begins + stride, last)], axis=1)
    return np.concatenate([np.array(head, dtype=np.int64).reshape(-1, 3), rest])


def find_window_reach(pieces: Iterable[tuple[int, int]], targets: int, context: int, stride: int) -> np.ndarray:
    """(targets,) context of each target, for a text scored in pieces: the tokens of its window before its predecessor."""
    width = min(context, targets)
    plans = [plan_windows(first, last, width, min(stride, width)) for first, last in pieces]
    start, begin, end = np.concatenate(plans).T
    return np.arange(targets) - np.repeat(start, end - begin)


class WindowScorer:
    """Scores many windows at a time. The number of a batch decides which rank takes it."""

    def __init__(
        self, model: GPT, runtime: Runtime, *, width: int, stride: int, rows: int, graphed: bool = False
    ) -> None:
        """`rows` windows of at most `width` tokens go through the model together. If graphed, every batch is padded to
        that size and replayed as a CUDA graph: Python takes longer to launch such a pass than the GPU to run it."""
        self._runtime, self._width, self._stride, self._rows = runtime, width, stride, rows
        self._padded = graphed
        self._model = model
        self._graphs = Graphs(enabled=graphed and runtime.is_cuda)

    @property
    def captures(self) -> int:
        """The number of captured graphs."""
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
            return self._model(inputs, targets, reduction="none")


def check_windows(context: int, stride: int, *, width: int | None = None) -> None:
    """`width`: the length of windows, if known to be less than the context."""
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
    graphed: bool,
) -> WindowScorer:
    """For a text of so many targets that comes whole, or in pieces of at most so many."""
    width = min(context, targets)
    check_windows(context, stride, width=width)
    together = batch_tokens or window_tokens_together(model, runtime)
    stride = min(stride, width)
    rows = min(max(1, together // width), 1 + (piece or targets) // stride)  # never more than there are windows to fill
    return WindowScorer(model, runtime, width=width, stride=stride, rows=rows, graphed=graphed)


def score_windows(
    model: GPT,
    tokens: TokenSet,
    *,
    context: int,
    stride: int,
    runtime: Runtime,
    batch_tokens: int | None = None,
    graphed: bool = False,
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
        graphed=graphed,
    )
    return run_scorer(scorer, model, text, runtime, progress)


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
    """Divides the text into windows of `context` tokens and scores each token once, given the text before it in its
    window.

    The first token (a BOS) is given. A BOS that closes a document is predicted like any token and counts no bytes:
    its bits say where a text ends. The model and the kind of device fix how many windows go through the model
    together, because that decides the rounding: a repeated score is the same to the last bit.
    """
    scored = score_windows(
        model,
        tokens,
        context=context,
        stride=context,
        runtime=runtime,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    return scored.total(tokenizer)
