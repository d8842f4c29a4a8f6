"""Causal attention: FlashAttention 3 where it is installed, PyTorch's own everywhere else.

The kernels are not ours. On Hopper those of FlashAttention 3 take 1.82 ms a layer of golf both ways where cuDNN's, the fastest
PyTorch has, take 2.20 (docs/ops.md). PyTorch can put them behind scaled_dot_product_attention, but for the whole
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
_FORWARD = {"q", "k", "v", "out", "softmax_scale", "is_causal", "num_splits"}
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


def _parts(q: Tensor, k: Tensor) -> int:
    """In how many calls: with two heads to a key each takes every second query head, and the library sees as many keys as queries.

    In one call it adds up the gradients of heads that share a key in float32 and in memory, which takes zeros to begin with
    and a pass to round. Two calls and the sum of their results take less, and round before the sum, as cuDNN does. More heads
    a key would round more often, and each call would have less to do.
    """
    return 2 if q.shape[2] == 2 * k.shape[2] else 1


@torch.library.custom_op(
    "parbank::flash_attention", mutates_args=(), schema="(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)"
)
def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output (B, T, heads, D), and the log-sum-exp of every query by call, (calls, B, heads / calls, T)."""
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    calls, sums = _parts(q, k), []
    for i in range(calls):
        own = slice(i, None, calls)
        # Splitting keys among programs pays for a few queries on many keys, and makes sums depend on how many programs fit.
        _, lse, *_ = torch.ops.flash_attn_3.fwd(
            q[:, :, own], k, v, out=y[:, :, own], softmax_scale=q.shape[-1] ** -0.5, is_causal=True, num_splits=1
        )
        sums.append(lse)
    return y, torch.stack(sums)


@torch.library.custom_op(
    "parbank::flash_attention_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse) -> (Tensor, Tensor, Tensor)",
)
def _backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, and what each call has of dk and dv: (calls, B, T, kv_heads, D)."""
    calls, dy = len(lse), _neighbours(dy)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty((calls, *x.shape), dtype=x.dtype, device=x.device) for x in (k, v))
    for i in range(calls):
        own = slice(i, None, calls)
        torch.ops.flash_attn_3.bwd(
            dy[:, :, own], q[:, :, own], k, v, y[:, :, own], lse[i], dq=dq[:, :, own], dk=dk[i], dv=dv[i],
            softmax_scale=q.shape[-1] ** -0.5, is_causal=True, deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
    return dq, dk, dv


@fake(_attention)
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    calls = _parts(q, k)
    return q.new_empty(q.shape), q.new_empty((calls, batch, heads // calls, length), dtype=torch.float32)


@fake(_backward)
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    calls = _parts(q, k)
    return q.new_empty(q.shape), k.new_empty((calls, *k.shape)), v.new_empty((calls, *v.shape))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """The sums over calls are the compiler's, which may have more to add to them."""
    if dy is None:
        return None, None, None
    dq, dk, dv = _backward(dy, *ctx.saved_tensors)
    return (dq, dk[0], dv[0]) if len(dk) == 1 else (dq, dk[0] + dk[1], dv[0] + dv[1])


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
