"""QK-clip (Kimi K2, 2025): keeps attention logits below a threshold by shrinking the query and key weights of a head.

Muon's updates have a high rank, and logits of attention without a QK norm can grow without bound. After a step, each
head whose largest logit S exceeds the threshold T has its weights scaled: W_q and W_k by sqrt(T / S) each, so that the
logits shrink by T / S. Heads below the threshold stay as they are, bit for bit.

Flash attention never writes the logits. Two ways to S without them:

- The bound |q| |k| of Cauchy and Schwarz, from the longest query and the longest key of each head: one pass over q and
  k. It is never too small, so logits stay below the threshold; it may be too large by the angle between them.
- Exact, in tiles: the products again, a tile of queries at a time, under no_grad. It costs about a forward of
  attention; call it on every tenth step, or on a part of the batch.

If queries share a key head, the key's factor is that of the head that needs the most, and each query takes the rest.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parbank.config import require

TILE = 256  # queries: a tile of logits is then TILE x keys, for each head and sequence


MOVED = (
    "a weight has moved since QKClip.add(), and only its old memory would be scaled; add layers after the model is on its "
    "device, in its dtype and in its banks"
)


@dataclass(eq=False)
class QueryKeyWeights:
    """One layer's query and key weights, (heads * channels, width), and the largest logits seen since the last clip."""

    query: Tensor
    key: Tensor
    heads: int
    kv_heads: int
    scale: float | None
    largest: Tensor = field(init=False)

    def __post_init__(self) -> None:
        for name, weight, count in (("query", self.query, self.heads), ("key", self.key, self.kv_heads)):
            require(
                weight.shape[0] % count == 0,
                f"the {name} weight has {weight.shape[0]} rows, which {count} heads do not divide; give the rows of the "
                f"{name} alone, for instance joint.weight[:width]",
            )
        require(
            self.heads % self.kv_heads == 0, f"{self.heads} query heads cannot share {self.kv_heads} key heads evenly"
        )
        self.largest = torch.zeros(self.heads, dtype=torch.float32, device=self.query.device)
        self._owners = [weight if weight._base is None else weight._base for weight in (self.query, self.key)]
        self.query, self.key = self.query.detach(), self.key.detach()

    def check_place(self) -> None:
        """Refuses weights that lie elsewhere by now: to scale their old memory would do nothing."""
        for weight, owner in zip((self.query, self.key), self._owners):
            require(weight.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr(), MOVED)

    @torch.no_grad()
    def observe(self, q: Tensor, k: Tensor, *, exact: bool = False) -> None:
        """Call it with the tensors that attention gets: q (..., heads, time, channels), k (..., key heads, time, channels).

        The mask does not matter: a masked logit only makes the bound larger.
        """
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        q, k = q.detach(), k.detach()
        if k.shape[-3] != q.shape[-3]:
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
        bound = _find_largest(q, k) if exact else _find_length(q) * _find_length(k)
        self.largest = torch.maximum(self.largest, bound * scale, out=self.largest)

    def factors(self, largest: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
        """The factor of each query head and of each key head."""
        wanted = (threshold / largest.clamp(min=1e-20)).clamp(max=1.0).view(self.kv_heads, -1)
        keys = wanted.amin(dim=1).sqrt()
        return (wanted / keys[:, None]).clamp(max=1.0).flatten(), keys


class QKClip:
    """Attention layers whose logits must stay below a threshold.

    Make one, `add` each layer, call `observe` in its forward, and `apply` after each step; or pass `apply` as
    `extra_captured`, which also works in a CUDA graph: nothing waits for the device.

        clip = QKClip(threshold=100.0)
        layer.watch = clip.add(layer.qkv.weight[:512], layer.qkv.weight[512:768], heads=8, kv_heads=4)
        ... layer.watch.observe(q, k) before scaled_dot_product_attention(q, k, v) ...
        opt = ParallelMuon(groups, extra_captured=clip.apply)
    """

    def __init__(self, threshold: float = 100.0, process_group: Any = None) -> None:
        require(threshold > 0, f"threshold must be positive, got {threshold}")
        self.threshold = threshold
        self.process_group = process_group
        self.layers: list[QueryKeyWeights] = []

    def add(
        self, query: Tensor, key: Tensor, *, heads: int, kv_heads: int | None = None, scale: float | None = None
    ) -> QueryKeyWeights:
        """A layer by its weights, or views of them. `scale` multiplies the products, 1 / sqrt(channels) by default."""
        self.layers.append(QueryKeyWeights(query, key, heads, kv_heads or heads, scale))
        return self.layers[-1]

    @torch.no_grad()
    def apply(self) -> None:
        """Scales the weights of heads above the threshold, and forgets the observed logits; NaN and infinite ones do not count.
        Collective with several ranks."""
        if not self.layers:
            return
        for layer in self.layers:
            layer.check_place()
        # After an overflow in a forward pass the optimizer skips the step, and weights must stay as well.
        largest = torch.cat([layer.largest for layer in self.layers]).nan_to_num(nan=0.0, posinf=0.0)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(self.process_group) > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.process_group)  # replicas must stay equal
        for layer, seen in zip(self.layers, largest.split([layer.heads for layer in self.layers])):
            for weight, factors in zip((layer.query, layer.key), layer.factors(seen, self.threshold)):
                rows = factors.repeat_interleave(weight.shape[0] // len(factors), output_size=weight.shape[0])
                weight.mul_(rows.to(weight.dtype).view(-1, *[1] * (weight.ndim - 1)))
            layer.largest.zero_()


def _find_length(x: Tensor) -> Tensor:
    """(heads,): the longest vector of each head."""
    lengths = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    return lengths.amax(dim=-1).reshape(-1, x.shape[-3]).amax(dim=0)


def _find_largest(q: Tensor, k: Tensor) -> Tensor:
    """(heads,): the largest product in magnitude."""
    by_tile = [
        (tile @ k.mT).abs().amax(dim=(-2, -1)).reshape(-1, q.shape[-3]).amax(dim=0) for tile in q.split(TILE, -2)
    ]
    return torch.stack(by_tile).amax(dim=0).float()
