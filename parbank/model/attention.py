"""Causal grouped-query attention with QK norm, partial RoPE, and the recipe's options on values and outputs.

Sources: GQA (Ainslie et al.), QK norm (Henry et al.), RoPE (Su et al.), exclusive attention (Zhai), value residual
(Zhou et al.), gated attention (Qiu et al.).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parbank import ops
from parbank.model.config import ModelConfig
from parbank.ops import reference

_ROPE_ROWS = 1024  # positions whose angles are computed at a time


@dataclass(frozen=True)
class Context:
    """The inputs that all layers of a forward pass share."""

    cos: Tensor  # (T, rope_dims / 2), float32
    sin: Tensor
    mask: Tensor | None = None  # (B, 1, T, T), true where attention may look; None means causal, within `lengths`
    lengths: Tensor | None = None  # cumulative lengths of documents: see `parbank.ops.flash`
    attend: Callable[[int, Tensor, Tensor, Tensor], Tensor] | None = None  # layer, q, k, v; in place of `attend`
    fp8_mlp: bool = False  # the MLPs multiply in FP8
    dropout: float = 0.0  # the share of channels dropped from the outputs of attention and MLP


def fill_rope_tables(cos: Tensor, sin: Tensor, base: float) -> None:
    """cos and sin of position * frequency, (positions, dims / 2), computed in float64: position 30,000 has five digits. A
    part at a time, because whole tables in float64 would take five times their memory."""
    dims = 2 * cos.shape[1]
    frequencies = base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / max(dims, 1))
    for start in range(0, len(cos), _ROPE_ROWS):
        rows = slice(start, min(start + _ROPE_ROWS, len(cos)))
        angles = torch.arange(rows.start, rows.stop, dtype=torch.float64)[:, None] * frequencies
        cos[rows].copy_(angles.cos().float())
        sin[rows].copy_(angles.sin().float())


def pad_lengths(starts: Sequence[int], end: int) -> list[int]:
    """Cumulative lengths from where runs start, with empty runs up to a power of two, so that there are few shapes and few
    CUDA graphs."""
    return [*starts, *[end] * ((1 << (len(starts) - 1).bit_length()) - len(starts) + 1)]


class Attention(nn.Module):
    """The small parameters of one layer's attention; its four matrices come from the banks."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.exclusive = config.uses_xsa(layer)
        self.window = config.window_of(layer)
        self.gain = nn.Parameter(torch.full((config.heads,), config.qk_gain)) if config.qk_gain else None
        # 2*sigmoid(0) = 1: a gated layer starts as an ungated one
        self.gate = nn.Parameter(torch.zeros(config.heads, config.width)) if config.gated_attention else None
        mixes = config.value_residual and layer > 0
        self.value_mix = nn.Parameter(torch.tensor([1.0, 0.0])) if mixes else None

    def forward(
        self,
        x: Tensor,
        weights: dict[str, Tensor],
        context: Context,
        first: Tensor | None,
        block_input: ops.BlockInput,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """x (B, T, width) is the input of the block; `block_input` says how its stream follows from x; `first` are the first
        layer's values.

        Returns x for later readers, the stream, the output of attention (B, T, width), and the values where a later
        layer needs them.
        """
        c = self.config
        batch, length, _ = x.shape
        own = (weights["query"], weights["key"], weights["value"], c.heads, self.gain, context.cos, context.sin)
        if context.mask is None and context.attend is None and self.value_mix is None:
            wanted = self.exclusive or c.value_residual
            total, stream, y, v = ops.stream_attention(x, *own, block_input, wanted, context.lengths, self.window)
        else:
            total, stream, q, k, v = ops.stream_qkv(x, *own, block_input)
            if self.value_mix is not None and first is not None:
                mix = self.value_mix.to(v.dtype)
                v = mix[0] * v + mix[1] * first
            y = context.attend(self.layer, q, k, v) if context.attend else attend(context, self.window, q, k, v)
        if self.exclusive:
            assert v is not None  # asked for above
            y = ops.remove_own_value(y, v)
        if self.gate is not None:
            normed = ops.rms_norm(stream, scale=block_input.scale)
            y = y * (2 * torch.sigmoid(F.linear(normed, self.gate.to(x.dtype))))[..., None]
        return total, stream, y.reshape(batch, length, c.width), v


def attend(context: Context, window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention over (B, T, heads, D) with grouped keys and values: causal, within documents and the window."""
    if context.mask is None:
        return ops.causal_attention(q, k, v, context.lengths, window)
    mask = context.mask & reference.causal_mask(q.shape[1], q.device, window=window) if window else context.mask
    return reference.attention(q, k, v, mask)
