"""The ops: each has one definition in plain PyTorch, and a kernel where a kernel is faster.

    >>> import torch
    >>> x = torch.randn(2, 8, requires_grad=True)
    >>> parbank.ops.rms_norm(x).square().mean().backward()
    >>> x.grad.shape
    torch.Size([2, 8])

`parbank.ops.reference` holds the definitions. `PARBANK_OPS=reference` in the environment makes every op use its own.
"""

from parbank.ops.activation import leaky_relu_squared
from parbank.ops.exclusive import remove_own_value
from parbank.ops.fan_out import fan_out
from parbank.ops.flash import causal_attention
from parbank.ops.linear_loss import linear_softcap_cross_entropy
from parbank.ops.loss import softcap_cross_entropy
from parbank.ops.mix import add_mix_rms_norm, mix_rms_norm
from parbank.ops.mlp import mlp
from parbank.ops.norm import add_rms_norm, rms_norm
from parbank.ops.qkv import qkv_norm_rope
from parbank.ops.reference import BlockInput as BlockInput
from parbank.ops.residual import add_linear, residual_mlp, stream_attention, stream_qkv
from parbank.ops.rope import qk_norm_rope
from parbank.ops.smear import smear
from parbank.ops.symmetric import ax_plus_bx, ba_plus_caa, symmetric_product, xxt
from parbank.ops.window_attention import window_attention

__all__ = [
    "add_linear",
    "add_mix_rms_norm",
    "add_rms_norm",
    "ax_plus_bx",
    "ba_plus_caa",
    "causal_attention",
    "fan_out",
    "leaky_relu_squared",
    "linear_softcap_cross_entropy",
    "mix_rms_norm",
    "mlp",
    "qk_norm_rope",
    "qkv_norm_rope",
    "remove_own_value",
    "residual_mlp",
    "rms_norm",
    "smear",
    "softcap_cross_entropy",
    "stream_attention",
    "stream_qkv",
    "symmetric_product",
    "window_attention",
    "xxt",
]
