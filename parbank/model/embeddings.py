"""Embeddings before the first block: hashed bigrams (modded-nanogpt #201), the smear gate (#130), value embeddings."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parbank import ops
from parbank.ops.backend import use_triton

# Primes next to 2^16 over the golden ratio and over its square: multiples of them spread consecutive tokens evenly.
HASH_CURRENT, HASH_PREVIOUS = 40_499, 25_033


def make_table(rows: int, width: int) -> nn.Embedding:
    """An embedding with PyTorch's initial values. On "meta" none: initialising would import PyTorch's compiler, which
    takes seconds."""
    weight = torch.empty(rows, width)
    return nn.Embedding(rows, width, _weight=weight) if weight.is_meta else nn.Embedding(rows, width)


def look_up(table: nn.Embedding, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a table in `dtype`, (..., width).

    On a GPU the table is cast, not the rows: it is far smaller than a batch, and PyTorch adds up the gradients of a row
    in float32. On a CPU it would add them up in `dtype`.
    """
    if ids.is_cuda:
        return F.embedding(ids, table.weight.to(dtype))
    return table(ids).to(dtype)


class BigramEmbedding(nn.Module):
    """An embedding of the pair (previous token, this token), hashed into a fixed number of buckets.

    The last bucket stands for "no previous token".
    """

    def __init__(self, buckets: int, narrow: int, width: int) -> None:
        super().__init__()
        self.buckets = buckets
        self.embedding = make_table(buckets, narrow)
        self.projection = nn.Parameter(torch.zeros(width, narrow))
        self.scale = nn.Parameter(torch.tensor(0.05))

    def forward(self, ids: Tensor, starts: Tensor, dtype: torch.dtype) -> Tensor:
        """ids (B, T); starts (B, T) marks positions that must not see the position before."""
        previous = F.pad(ids[:, :-1], (1, 0))
        hashed = (HASH_CURRENT * ids ^ HASH_PREVIOUS * previous) % (self.buckets - 1)
        rows = torch.where(starts, self.buckets - 1, hashed)
        narrow = look_up(self.embedding, rows, dtype)
        if use_triton(narrow):
            # Folded into the projection, as the blocks' gains are: the scale's gradient is then a sum over a matrix, and
            # not over every token and channel.
            return F.linear(narrow, (self.scale * self.projection).to(dtype))
        return F.linear(narrow, self.projection.to(dtype)) * self.scale.to(dtype)


class SmearGate(nn.Module):
    """x + sigmoid(gate) * (previous position's x - x), one learned gate a channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        return ops.smear(x, torch.sigmoid(self.gate), starts)


class InputSmear(nn.Module):
    """x + scale * sigmoid(w . x[:channels]) * previous position's x: each position decides for itself."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(channels))
        self.scale = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        share = torch.sigmoid(x[..., : len(self.gate)].float() @ self.gate.float()) * self.scale.float()
        previous = F.pad(x[:, :-1], (0, 0, 1, 0))
        return x + share.masked_fill(starts, 0.0)[..., None].to(x.dtype) * previous


class ValueEmbedding(nn.Module):
    """A second, narrow token embedding that is added to the values of some layers, each with a learned scale."""

    def __init__(self, vocab_size: int, narrow: int, kv_width: int, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.slots = {layer: slot for slot, layer in enumerate(layers)}
        self.embedding = make_table(vocab_size, narrow)
        self.projection = nn.Parameter(torch.zeros(kv_width, narrow))
        self.scale = nn.Parameter(torch.tensor(0.1))
        self.layer_scales = nn.Parameter(torch.ones(len(layers)))

    def forward(self, ids: Tensor, dtype: torch.dtype) -> dict[int, Tensor]:
        """The addition to each layer's values, (B, T, kv_width), by layer."""
        narrow = look_up(self.embedding, ids, dtype)
        if use_triton(narrow):  # both scales folded into the projection, as above: two small products cost less
            scales = self.scale * self.layer_scales
            return {n: F.linear(narrow, (scales[slot] * self.projection).to(dtype)) for n, slot in self.slots.items()}
        shared = F.linear(narrow, self.projection.to(dtype)) * self.scale.to(dtype)
        return {layer: shared * self.layer_scales[slot].to(dtype) for layer, slot in self.slots.items()}
