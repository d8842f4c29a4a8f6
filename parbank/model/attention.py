"""Causal grouped-query attention with QK norm, partial RoPE, and the recipe's options on values and outputs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parbank import ops
from parbank.model.config import ModelConfig
from parbank.ops import reference


@dataclass(frozen=True)
class Context:
    """What every layer of one forward pass shares."""

    cos: Tensor  # (T, rope_dims / 2), float32
    sin: Tensor
    mask: Tensor | None  # (B, 1, T, T), true where attention may look; None means plain causal
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None  # in place of `attend`: see stream.py


def rope_tables(length: int, dims: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, (length, dims / 2), worked out in float64: position 30,000 has five digits."""
    frequencies = base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / max(dims, 1))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


class Attention(nn.Module):
    """The small parameters of one layer's attention; its four matrices come from the banks."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.exclusive = config.uses_xsa(layer)
        self.gain = nn.Parameter(torch.full((config.heads,), config.qk_gain)) if config.qk_gain else None
        # 2*sigmoid(0) = 1: a gated layer starts as an ungated one
        self.gate = nn.Parameter(torch.zeros(config.heads, config.width)) if config.gated_attention else None
        mixes = config.value_residual and layer > 0
        self.value_mix = nn.Parameter(torch.tensor([1.0, 0.0])) if mixes else None

    def forward(
        self, x: Tensor, weights: dict[str, Tensor], context: Context, extra: Tensor | None, first: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x (B, T, width); `extra` is added to the values; `first` is the first layer's values. Returns (out, values)."""
        c = self.config
        batch, length, _ = x.shape
        q, k, v = ops.qkv_norm_rope(
            x, weights["query"], weights["key"], weights["value"], c.heads, self.gain, context.cos, context.sin
        )
        if extra is not None:
            v = v + extra.view(v.shape)
        if self.value_mix is not None and first is not None:
            mix = self.value_mix.to(v.dtype)
            v = mix[0] * v + mix[1] * first
        y = attend(q, k, v, context.mask) if context.attend is None else context.attend(q, k, v)
        if self.exclusive:
            y = ops.remove_own_value(y, v)
        if self.gate is not None:
            y = y * (2 * torch.sigmoid(F.linear(x, self.gate.to(x.dtype))))[..., None]
        return F.linear(y.reshape(batch, length, c.width), weights["output"]), v


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention over (B, T, heads, D) with grouped keys and values: causal, or as the mask says."""
    return ops.causal_attention(q, k, v) if mask is None else reference.attention(q, k, v, mask)
