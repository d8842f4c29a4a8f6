"""Many documents at once, each with low-rank factors of its own that learn from the document's tokens once scored.

Documents of similar length form a group and are read side by side, a chunk of tokens at a time. One pass scores a
chunk with the factors of that moment; the gradient of the same scores then moves the factors. So a token is scored
before anything is learnt from it, and learning costs a backward pass and no second forward pass. Attention carries
keys and values from chunk to chunk, as in streaming. Documents that are read together see nothing of each other, so
their order changes nothing but rounding. Factors may start from what documents taught that were read before.

After parameter-golf #1530 and #1586, which learn from chunks of 24 to 48 tokens over many documents.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parbank import ops
from parbank.eval.adaptation.factors import Adapted, DocumentFactors
from parbank.eval.score import IGNORED
from parbank.graphs import Graphs
from parbank.model import GPT
from parbank.model.attention import Context
from parbank.model.gpt import matrix_shapes
from parbank.model.stream import BEFORE, Past, Reach, _embed, _rotations, attend_window, keep_last
from parbank.ops.backend import use_backend
from parbank.precision import autocast
from parbank.runtime import Runtime

# The matrices that learn. In parameter-golf's later records queries and values were left alone, and scores were better.
LEARNING = ("key", "output", "up", "down")


@dataclass(frozen=True)
class DocumentSpan:
    """Tokens first .. last of a text: the BOS and all up to the next BOS, which is the last target."""

    first: int
    last: int
    rate: int = 0
    """Number of the learning rate at which the document is read."""

    @property
    def targets(self) -> int:
        return self.last - self.first


def find_documents(tokens: np.ndarray, bos_id: int) -> list[DocumentSpan]:
    starts = np.flatnonzero(tokens == bos_id)
    cuts = sorted({0, *starts.tolist(), len(tokens) - 1})
    return [DocumentSpan(first, last) for first, last in itertools.pairwise(cuts)]


def group_documents(documents: list[DocumentSpan], rows: int) -> list[list[DocumentSpan]]:
    """Groups documents, longest first: those of a group end at about the same time, and active ones come first. A document
    that is read at several rates stays in the order of its rates."""
    ordered = sorted(documents, key=lambda document: (-document.targets, document.first))
    return [ordered[start : start + rows] for start in range(0, len(ordered), rows)]


class DocumentReader:
    """Reads groups of documents with a model whose weights stay as they are."""

    def __init__(
        self,
        model: GPT,
        runtime: Runtime,
        *,
        rows: int,
        rank: int,
        chunk: int,
        window: int,
        decay: int,
        temperatures: tuple[float, ...] = (1.0,),
        graphed: bool,
    ) -> None:
        self._model, self._device, self._temperatures = model, runtime.device, temperatures
        self._rows, self._chunk, self._window, self._decay = rows, chunk, window, decay
        c = model.config
        shapes = {name: shape for name, shape in matrix_shapes(c).items() if name.split(".")[-2] in LEARNING}
        self._factors = DocumentFactors(shapes, rows, rank, runtime.device)
        with autocast(runtime.device):
            dtype = model._compute_dtype(runtime.device)
        shape = (rows, window - 1, c.kv_heads, c.head_width)
        self._past: list[Past] = [
            (torch.zeros(shape, dtype=dtype, device=self._device), torch.zeros(shape, dtype=dtype, device=self._device))
            for _ in range(c.layers)
        ]
        self._graphs = Graphs(enabled=graphed and runtime.is_cuda)

    def read(
        self, ids: Tensor, group: list[DocumentSpan], rates: Sequence[float], *, teaches: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each chunk of all documents: its targets' places in the text, (rows, chunk), and their nats at every
        temperature, (rows, chunk, temperatures). The place of a target that is not scored is one past the last target.
        `rates` are the learning rates at the start of a document. `teaches`: other documents will start where these end."""
        self._factors.reset()
        for past in self._past:
            for tensor in past:
                tensor.zero_()
        empty = [0] * (self._rows - len(group))  # a row without a document has no targets
        ends = [[d.first for d in group] + empty, [d.last for d in group] + empty]
        first, last = torch.tensor(ends, device=self._device)[..., None]
        lr = torch.tensor([rates[d.rate] for d in group] + empty, device=self._device)[:, None, None].float()
        longest = max(document.targets for document in group)
        for start in range(0, longest, self._chunk):
            active = sum(document.targets > start for document in group)
            # On a GPU a power of two, so that there are few graphs. On a CPU rows without a document would only take time.
            rows = min(self._rows, 1 << (active - 1).bit_length()) if self._device.type == "cuda" else active
            place = first[:rows] + start + torch.arange(-BEFORE, self._chunk + 1, device=self._device)
            inside = (place >= first[:rows]) & (place <= last[:rows])
            wanted = torch.where(inside, ids[place.clamp(0, len(ids) - 1)].long(), IGNORED)
            targets = wanted[:, BEFORE + 1 :].contiguous()
            rate = lr[:rows] / (1 + start / self._decay) ** 0.5
            steps = math.inf if self._factors.warm else start // self._chunk + 1
            begun, number = (torch.full((), float(n), device=self._device) for n in (start, steps))
            learns = teaches or start + self._chunk < longest  # nothing of the group is scored after the last chunk
            work = partial(self._work, learns=learns)
            nats = self._graphs.run(work, [wanted[:, :-1].clamp(min=0), targets, begun, rate, number], key=(learns,))
            yield torch.where(targets != IGNORED, place[:, BEFORE:-1], len(ids) - 1), nats

    def new_ends(self, groups: int) -> Tensor:
        """Room for what the documents of some groups learn, (groups, numbers)."""
        return torch.zeros(groups, self._factors.end_size, device=self._device)

    def sum_ends(self, group: list[DocumentSpan], rate: int) -> Tensor:
        """What the documents of the group that was just read, and `teaches`, have learnt at one rate: see
        `DocumentFactors.sum_ends`."""
        own = [(row, document.targets) for row, document in enumerate(group) if document.rate == rate]
        rows = torch.tensor([row for row, _ in own], dtype=torch.long, device=self._device)
        steps = [float(-(-targets // self._chunk)) for _, targets in own]
        return self._factors.sum_ends(rows, torch.tensor(steps, device=self._device))

    def start_from(self, ends: Tensor, share: float) -> None:
        """Where the next documents start: see `DocumentFactors.start_from`."""
        self._factors.start_from(ends, share)

    def _work(
        self, ids: Tensor, targets: Tensor, start: Tensor, rate: Tensor, number: Tensor, *, learns: bool
    ) -> Tensor:
        """Scores a chunk of every row, and then learns from it."""
        left = {name: own[: len(ids)].detach().requires_grad_() for name, own in self._factors.left.items()}
        with autocast(self._device), use_backend("reference"):
            with torch.enable_grad():
                x = self._read(ids, start, left)
                nats = self._model.read_out(x, targets, "none")
            found = self._temper(x.detach(), targets, nats.detach())
        if learns:
            counts = (targets != IGNORED).sum(-1).clamp(min=1)
            grads = torch.autograd.grad((nats.sum(-1) / counts).sum(), list(left.values()))
            reading = (targets != IGNORED).any(-1)[:, None, None].float()
            self._factors.step(dict(zip(left, grads)), rate, number, reading)
        return found

    @torch.no_grad()
    def _temper(self, x: Tensor, targets: Tensor, nats: Tensor) -> Tensor:
        """The nats of logits divided by each temperature, (rows, chunk, temperatures). `nats` are those at 1."""
        if set(self._temperatures) == {1.0}:
            return nats[..., None]
        logits = self._model.read_out(x, None)
        # The largest becomes 0: a float32 near a large logsumexp has no digits left for the logarithm of the sum.
        logits = logits - logits.amax(-1, keepdim=True)
        own = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        # logsumexp would subtract the largest again: these steps give the same bits without it.
        found = [nats if t == 1 else (logits / t).exp_().sum(-1).log_() - own / t for t in self._temperatures]
        return torch.stack(found, -1)

    def _read(self, ids: Tensor, start: Tensor, left: dict[str, Tensor]) -> Tensor:
        """The normed output of the last block. As `Stream._read`, over rows, and with factors beside the matrices."""
        model, c = self._model, self._model.config
        dtype, length, rows = model._compute_dtype(ids.device), ids.shape[1] - BEFORE, len(ids)
        x, extras = _embed(model, ids, (BEFORE - start).clamp(min=0), dtype)
        cos, sin = _rotations(start, length, c.rope_dims, c.rope_base)
        low = (self._window - 1 - start).clamp(min=0).int().expand(length)  # the first key that is not empty
        reach = Reach(low, low, low)
        matrices: dict[str, Any] = dict(model.matrices(x))
        for name, own in left.items():
            matrices[name] = Adapted(matrices[name], own.to(dtype), self._factors.right[name].to(dtype))

        def attend_here(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            past = (self._past[layer][0][:rows], self._past[layer][1][:rows])
            y = attend_window(q, past, (k, v), min(self._window, c.window_of(layer) or self._window), reach)
            with torch.no_grad():  # no gradient goes through the past
                for old, new in zip(past, keep_last(past, (k, v))):
                    old.copy_(new)
            return y

        return ops.rms_norm(model.run_blocks(x, extras, Context(cos, sin, attend=attend_here), matrices))
