"""The model over a running text: each token is computed once, with a full window of context. (Cached segments:
Transformer-XL, Dai et al.)

A text of any length is read in segments. In every layer a token attends to the last `window` tokens, itself included,
with the keys and values that earlier tokens got when they were computed. A segment passes its last window - 1 keys
and values on, layer by layer. This equals one pass over the whole text under a banded mask, so segment boundaries
change the result by rounding only. The receptive field is `layers` times the window.

Keys are rotated by their absolute position. RoPE is relative, and cosines from float64 are as accurate at token ten
million as at the first. So a carried key is never rotated again.

Nothing else is carried. Smear and bigrams see one and two tokens back, and a segment receives those two tokens.
"""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from parbank import ops
from parbank.graphs import Graphs, addresses
from parbank.model.attention import Context, pad_lengths
from parbank.model.gpt import GPT
from parbank.ops import flash
from parbank.ops.window_attention import takes

BEFORE = 2  # tokens before a segment: smear reads one back, and that embedding's bigram one more

Past = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Segment:
    """A run of tokens of the text. Everything in it follows from the text; the rest comes through a Carry."""

    ids: Tensor  # (T,) its tokens
    start: int  # the place of the first one in the text
    before: Tensor  # (BEFORE,) the tokens ahead of it; at the start of the text any number stands for none
    document: int = 0  # where the document of its first token begins
    inside: tuple[int, ...] = ()  # where other documents begin, counted from the segment's first token
    padding: int = 0  # how many tokens at its end are not of the text

    @classmethod
    def cut(
        cls, tokens: Tensor, start: int, end: int, *, length: int = 0, documents: np.ndarray | None = None
    ) -> "Segment":
        """tokens[start:end] of a text, padded at its end to `length`: nothing looks ahead, and padding is not carried on.

        `documents` holds the places where documents begin, in order; it matters where they are isolated.
        """
        padding = max(0, length - (end - start))
        ids = F.pad(tokens[start:end], (0, padding))
        there = min(start, BEFORE)
        before = F.pad(tokens[start - there : start], (BEFORE - there, 0))
        if documents is None:
            return cls(ids, start, before, padding=padding)
        first, last = np.searchsorted(documents, (start, end - 1), side="right")
        document = int(documents[first - 1]) if first else 0
        return cls(ids, start, before, document, tuple((documents[first:last] - start).tolist()), padding)


class Carry(Protocol):
    """Source and destination of a layer's keys and values: the memory of one process, or neighbouring ranks."""

    def take(self, layer: int) -> Past | None: ...
    def give(self, layer: int, past: Past) -> None: ...


class LocalCarry:
    """The carry of a stream that one process reads. Its tensors stay in place, as a CUDA graph needs."""

    def __init__(self) -> None:
        self._held: dict[int, Past] = {}

    def take(self, layer: int) -> Past | None:
        return self._held.get(layer)

    def give(self, layer: int, past: Past) -> None:
        held = self._held.setdefault(layer, past)
        if held is not past:
            for old, new in zip(held, past):
                old.copy_(new)


@dataclass(frozen=True)
class Reach:
    """How far back the queries of a segment may see, counting keys from the first carried key.

    A query sees a key that is in the window and not before `low`. `queries` and `keys` hold the same as runs, one per
    document, in the form of varlen attention.
    """

    low: Tensor  # (T,)
    queries: Tensor  # (runs + 1,) int32: where each run of queries begins, then the end
    keys: Tensor
    varlen: bool = False  # whether these runs may go to FlashAttention, which the device has

    @classmethod
    def spread(cls, queries: Tensor, keys: Tensor, length: int) -> "Reach":
        """From the runs, for a segment of so many tokens. Computed on the device: `low` is as long as the segment, and
        copying it would wait for the GPU."""
        place = torch.arange(length, dtype=torch.int32, device=keys.device)
        low = keys[torch.searchsorted(queries[1:], place, right=True)]
        return cls(low, queries, keys, varlen=flash.HAS_VARLEN and keys.is_cuda)


class Stream:
    """A model reading one text, segment after segment."""

    def __init__(self, model: GPT, window: int, *, carry: Carry | None = None, graph: bool = False) -> None:
        """`graph` replays segments of one length, from the second on, as a CUDA graph. That pays for short segments,
        which take longer to launch than to run. It needs a carry that stays in place, and keeps the memory of a pass."""
        self.model, self.window = model, window
        self._graph = graph and model.token_embedding.weight.is_cuda
        self._graphs = Graphs(enabled=self._graph)
        self.carry = carry if carry is not None else LocalCarry()

    @property
    def captures(self) -> int:
        """The number of captured graphs."""
        return self._graphs.captures

    def read(
        self,
        tokens: Tensor,
        start: int,
        end: int,
        targets: Tensor | None = None,
        *,
        length: int = 0,
        documents: np.ndarray | None = None,
        last: bool = False,
    ) -> Tensor:
        """Reads the next segment of a text, tokens[start:end]; see `Segment.cut` for `length` and `documents`.

        Returns the nats of `targets` (T,), one each, or the logits of the next token at every position (`last`: at the
        last only). Use them before the next segment is read: a graph overwrites them.
        """
        return self._read_segment(Segment.cut(tokens, start, end, length=length, documents=documents), targets, last)

    def _read_segment(self, segment: Segment, targets: Tensor | None = None, last: bool = False) -> Tensor:
        device = self.model.token_embedding.weight.device
        ids = torch.cat([segment.before, segment.ids])[None].long()
        padded = self._graph or segment.padding > 0  # a graph serves segments with and without padding
        # The second number says how many of the `ids` lie before the text.
        numbers = (segment.start, BEFORE - min(segment.start, BEFORE), len(segment.ids) - segment.padding)
        start, first, count = (torch.full((), number, device=device) for number in numbers)
        runs = find_runs(segment, self.window, isolated=self.model.config.isolate_documents)
        inputs = [ids, start, first, count, *runs, *([] if targets is None else [targets])]
        dtype = self.model._compute_dtype(device)
        work = partial(self._read, dtype=dtype, last=last, padded=padded)
        key = (dtype, last, padded)
        return self._graphs.run(work, inputs, key=key, places=lambda: addresses(self.model.parameters()))

    def _read(
        self,
        ids: Tensor,
        start: Tensor,
        first_of_text: Tensor,
        count: Tensor,
        queries: Tensor,
        keys: Tensor,
        targets: Tensor | None = None,
        *,
        dtype: torch.dtype,
        last: bool,
        padded: bool,
    ) -> Tensor:
        model, c = self.model, self.model.config
        length, device = ids.shape[1] - BEFORE, ids.device
        x, extras = _embed(model, ids, first_of_text, dtype)
        cos, sin = _rotations(start, length, c.rope_dims, c.rope_base)
        reach = Reach.spread(queries, keys, length)

        def attend_here(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            past = self.carry.take(layer) or self._nothing(dtype, device)
            y = attend_window(q, past, (k, v), min(self.window, c.window_of(layer) or self.window), reach)
            self.carry.give(layer, keep_last(past, (k, v), count if padded else None))
            return y

        x = model.run_blocks(x, extras, Context(cos, sin, attend=attend_here), model.matrices(x))
        x = x[:, -1:] if last else x
        return model.read_out(ops.rms_norm(x), None if targets is None else targets[None], "none")[0]

    def _nothing(self, dtype: torch.dtype, device: torch.device) -> Past:
        """The carry before the text: as many keys as always, so that shapes stay; `Reach.low` masks them."""
        c = self.model.config
        shape = (1, self.window - 1, c.kv_heads, c.head_width)
        # two tensors: Dynamo would compile once for keys and values as one tensor, and again for two
        return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)


def _embed(model: GPT, ids: Tensor, first: Tensor, dtype: torch.dtype) -> tuple[Tensor, dict[int, Tensor]]:
    """GPT.features up to the first block, over (B, BEFORE + T) ids, without the tokens ahead; `first` is the place in it
    that has nothing before. Beyond that: the additions to the values, by layer."""
    c = model.config
    starts = (torch.arange(ids.shape[1], device=ids.device) == first).expand(ids.shape)
    if c.isolate_documents:
        starts = starts | (ids == c.bos_id)
    x, own = model.embed(ids, starts, dtype), ids[:, BEFORE:]
    return x[:, BEFORE:], model.value_embedding(own, dtype) if model.value_embedding is not None else {}


def keep_last(past: Past, own: Past, count: Tensor | None = None) -> Past:
    """The last keys and values of both, as many as were carried: the next carry. See `_keep` for `count`."""
    return _keep(past[0], own[0], count), _keep(past[1], own[1], count)


def _keep(past: Tensor, own: Tensor, count: Tensor | None) -> Tensor:
    """The last keys of both, as many as were carried. A copy, since a view would keep the whole segment alive.

    Only the first `count` keys of a padded segment are of the text. A graph serves every count, so it reads a tensor.
    """
    carried, length = past.shape[1], own.shape[1]
    if count is not None:
        return torch.cat([past, own], dim=1).index_select(1, count + torch.arange(carried, device=own.device))
    if length < carried:
        return torch.cat([past[:, length:], own], dim=1)
    return own[:, length - carried :].clone(memory_format=torch.contiguous_format)


def _rotations(start: Tensor, length: int, dims: int, base: float) -> tuple[Tensor, Tensor]:
    """Rows start .. start + length of the model's rotation tables, computed: a text may be longer than the tables."""
    frequencies = base ** (-torch.arange(0, dims, 2, dtype=torch.float64, device=start.device) / max(dims, 1))
    angles = (start + torch.arange(length, device=start.device)).double()[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def find_runs(segment: Segment, window: int, *, isolated: bool) -> tuple[Tensor, Tensor]:
    """The queries and keys of a Reach: within one text, or within each document."""
    length, carried, device = len(segment.ids), window - 1, segment.ids.device
    begin = segment.document if isolated else 0
    cuts = [0, *segment.inside] if isolated else [0]
    heads = [
        max(0, carried - (segment.start - begin)),
        *(carried + cut for cut in cuts[1:]),
    ]  # the first key of each run
    queries, keys = pad_lengths(cuts, length), pad_lengths(heads, carried + length)
    # Non-blocking: waiting for a copy would drain the GPU. The driver has read the numbers when the call returns.
    first, second = (torch.tensor(n, dtype=torch.int32).to(device, non_blocking=True) for n in (queries, keys))
    return first, second


def attend_window(q: Tensor, past: Past, own: Past, window: int, reach: Reach) -> Tensor:
    """Softmax attention of q (1, T, heads, D) over carried keys and values (1, window - 1, kv_heads, D) and its own (1,
    T, kv_heads, D). Each query sees the `window` keys up to its own, as far as `reach` allows. This function chooses
    the implementation: a single query, as in sampling, is too little work for the kernel, which has one program per
    tile and head."""
    if reach.varlen and flash.fits_varlen(q, q.shape[-1]) and (q.shape[1] == 1 or not takes(q, *past, *own)):
        return _attend_flash(q, past, own, window, reach)
    return ops.window_attention(q, *past, *own, reach.low, window)


def _attend_flash(q: Tensor, past: Past, own: Past, window: int, reach: Reach) -> Tensor:
    """The varlen form, one run per document. Keys before the first run are never read, so the empty carry at the start of
    a text is skipped in the same way."""
    k, v = (torch.cat(pair, dim=1) for pair in zip(past, own))
    return flash.attend_varlen(q[0], k[0], v[0], reach.queries, reach.keys, window, q.shape[1], k.shape[1])[None]
