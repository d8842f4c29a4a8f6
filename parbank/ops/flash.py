"""Causal attention: FlashAttention 3 where it is installed, PyTorch's own everywhere else.

The kernels are not ours. On Hopper those of FlashAttention 3 take 1.88 ms a layer of golf both ways where cuDNN's, the fastest
PyTorch has, take 2.15 (docs/performance.md). PyTorch can put them behind scaled_dot_product_attention, but for the whole
process, and parbank must not choose that for a program which only imports it. So there are two ops of our own around the
library's two functions, with what a compiler needs to know of them.

The package registers `torch.ops.flash_attn_3` when its module `flash_attn_interface` is imported. That is done once, with
parbank's own import, and only where the kernels can run.
"""

import importlib
import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor

from parbank.ops import backend, reference
from parbank.ops.checks import fake, refuse_double_backward, takes_kernel

MODULE = "flash_attn_interface"
CAPABILITY = (9, 0)  # the kernels are made of Hopper's instructions
WIDEST_HEAD = 256
# What is called below, by name: versions differ in what else there is.
_FORWARD = {"q", "k", "v", "softmax_scale", "is_causal", "num_splits"}
_BACKWARD = {
    "dout",
    "q",
    "k",
    "v",
    "out",
    "softmax_lse",
    "dq",
    "dk",
    "dv",
    "softmax_scale",
    "is_causal",
    "deterministic",
}

_log = logging.getLogger("parbank")


def _load() -> bool:
    """Whether the library is there, has the functions in the form used here, and this process has a GPU for them."""
    if backend.why_no_kernels() or backend.INTERPRETED or torch.cuda.get_device_capability() != CAPABILITY:
        return False
    if importlib.util.find_spec(MODULE) is None:
        return False
    try:
        importlib.import_module(MODULE)
        return _knows("fwd", _FORWARD) and _knows("bwd", _BACKWARD)
    except Exception as error:  # another CUDA, another PyTorch, half an upgrade: training works without it
        _log.warning("FlashAttention 3 is installed but cannot be used (%s: %s)", type(error).__name__, error)
        return False


def _knows(function: str, names: set[str]) -> bool:
    schema = getattr(torch.ops.flash_attn_3, function).default._schema
    missing = names - {argument.name for argument in schema.arguments}
    if missing:
        _log.warning(
            "the installed FlashAttention 3 is not used: its %s has no %s", function, ", ".join(sorted(missing))
        )
    return not missing


AVAILABLE = _load()


@torch.library.custom_op(
    "parbank::flash_attention", mutates_args=(), schema="(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)"
)
def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output (B, T, heads, D) and the log-sum-exp of every query, (B, heads, T)."""
    # Splitting keys among programs pays for a few queries on many keys, and makes sums depend on how many programs fit.
    y, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, softmax_scale=q.shape[-1] ** -0.5, is_causal=True, num_splits=1)
    return y, lse.contiguous()


@torch.library.custom_op(
    "parbank::flash_attention_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse) -> (Tensor, Tensor, Tensor)",
)
def _backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    torch.ops.flash_attn_3.bwd(
        _neighbours(dy), q, k, v, y, lse, dq=dq, dk=dk, dv=dv, softmax_scale=q.shape[-1] ** -0.5, is_causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return dq, dk, dv


@fake(_attention)
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, length), dtype=torch.float32)


@fake(_backward)
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None, None, None) if dy is None else _backward(dy, *ctx.saved_tensors)


_attention.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(refuse_double_backward("causal_attention"))


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of q (B, T, heads, D) over k and v (B, T, kv_heads, D), each query over the keys up to its own."""
    if AVAILABLE and _fits(q, k, v):
        return _attention(_neighbours(q), _neighbours(k), _neighbours(v))[0]
    return reference.attention(q, k, v)


def _neighbours(x: Tensor) -> Tensor:
    """x with the channels of a head side by side: any other stride the kernels take."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    width = q.shape[-1]
    return (
        takes_kernel(q, k, v)
        and q.dtype == k.dtype == v.dtype
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.numel() > 0
        and k.shape == v.shape
        and width % 8 == 0
        and width <= WIDEST_HEAD
    )
