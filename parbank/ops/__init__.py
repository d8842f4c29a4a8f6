"""The ops: one plain-PyTorch definition each, and kernels where they pay."""

from parbank.ops.reference import (
    ba_plus_caa,
    leaky_relu_squared,
    linear_softcap_cross_entropy,
    mix_rms_norm,
    mlp,
    qk_norm_rope,
    rms_norm,
    softcap_cross_entropy,
    xxt,
)

__all__ = [
    "ba_plus_caa",
    "leaky_relu_squared",
    "linear_softcap_cross_entropy",
    "mix_rms_norm",
    "mlp",
    "qk_norm_rope",
    "rms_norm",
    "softcap_cross_entropy",
    "xxt",
]
