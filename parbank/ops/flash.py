"""Causal attention: FlashAttention 3 where it is installed, PyTorch's own elsewhere.

On Hopper FlashAttention 3 is faster than cuDNN, PyTorch's fastest backend, in both directions
(docs/log/2026-11-15-ops.md). PyTorch can route scaled_dot_product_attention to it, but only for the whole process,
and a library must not change that for its host program. So this file wraps the library's two functions as two ops,
with the metadata that a compiler needs.

The package registers `torch.ops.flash_attn_3` when its module `flash_attn_interface` is imported. parbank imports it
once, with its own import, and only where the kernels can run.
"""

import importlib
import importlib.util
import logging
from typing import Any, NoReturn

import torch
from torch import Tensor

from parbank.errors import ParbankError
from parbank.ops import backend, reference
from parbank.ops.checks import check_floating, fake, same_device, takes_kernel

MODULE = "flash_attn_interface"
CAPABILITY = (9, 0)  # the kernels are made of Hopper's instructions
WIDEST_HEAD = 256
# The arguments used below, by name. Versions of the library differ in the others.
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


def _has_gpu() -> bool:
    return not (backend.why_no_kernels() or backend.INTERPRETED) and torch.cuda.get_device_capability() == CAPABILITY


def _load() -> bool:
    """Whether the library is installed and its functions have the arguments used here."""
    try:
        if importlib.util.find_spec(MODULE) is None:
            return False
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


AVAILABLE = _has_gpu() and _load()


def _parts(q: Tensor, k: Tensor) -> int:
    """The number of calls of the backward pass. With two heads per key, each call takes every second head, so that the
    library sees as many keys as heads.

    In one call, the library sums the gradients of heads that share a key in float32 in memory. That needs zeros to
    start with and a pass to round. Two calls and the sum of their results take less, and round before the sum, as
    cuDNN does. With more heads per key, more calls would round more often and have less to do each.
    """
    return 2 if q.shape[2] == 2 * k.shape[2] else 1


@torch.library.custom_op(
    "parbank::flash_attention", mutates_args=(), schema="(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)"
)
def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output (B, T, heads, D), and the log-sum-exp of every query for each backward call: (calls, B, heads / calls,
    T)."""
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q, k, v = map(_aligned, (q, k, v))
    # Splitting keys among programs pays only for few queries, and makes sums depend on how many programs fit.
    _, lse, *_ = torch.ops.flash_attn_3.fwd(
        q, k, v, out=y, softmax_scale=q.shape[-1] ** -0.5, is_causal=True, num_splits=1
    )
    return y, lse.unflatten(1, (-1, _parts(q, k))).movedim(2, 0).contiguous()


@torch.library.custom_op(
    "parbank::flash_attention_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse) -> (Tensor, Tensor, Tensor)",
)
def _backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, and the parts of dk and dv from each call: (calls, B, T, kv_heads, D)."""
    calls = len(lse)
    dy, q, k, v, y = map(_aligned, (dy, q, k, v, y))
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty((calls, *x.shape), dtype=x.dtype, device=x.device) for x in (k, v))
    for i in range(calls):
        own = slice(i, None, calls)
        torch.ops.flash_attn_3.bwd(
            dy[:, :, own], q[:, :, own], k, v, y[:, :, own], lse[i], dq=dq[:, :, own], dk=dk[i], dv=dv[i],
            softmax_scale=q.shape[-1] ** -0.5, is_causal=True, deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
    return dq, dk, dv


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy that TMA can address: contiguous channels, the start and every other stride a multiple of 16 bytes.

    The library checks the channels and assumes the rest. A clone, not contiguous(), which keeps any stride of a
    dimension of size one.
    """
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    fits = fits and all(step * x.element_size() % 16 == 0 for step in x.stride()[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


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
    """The compiler sums over calls, since it may fuse further terms into that sum."""
    if dy is None:
        return None, None, None
    dq, dk, dv = _backward(dy, *ctx.saved_tensors)
    return (dq, dk[0], dv[0]) if len(dk) == 1 else (dq, dk[0] + dk[1], dv[0] + dv[1])


def _refuse(ctx: Any, *grads: Any) -> NoReturn:
    raise ParbankError(
        "causal_attention has no second derivative (a backward through its backward was asked for), and PyTorch's own fused "
        "attention has none either; to differentiate twice, write it out as products and a softmax"
    )


_attention.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of q (B, T, heads, D) over k and v (B, T, kv_heads, D). Each query sees the keys up to its own."""
    _check(q, k, v)
    if AVAILABLE and _fits(q, k, v):
        return _attention(q, k, v)[0]
    return reference.attention(q, k, v)


def _fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return takes_kernel(q, k, v) and fits(q.dtype, q.shape[-1], q.numel())


def fits(dtype: torch.dtype, width: int, elements: int) -> bool:
    """Whether the library has kernels for heads of this width."""
    return dtype in (torch.float16, torch.bfloat16) and elements > 0 and width % 8 == 0 and width <= WIDEST_HEAD


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Checks shapes, lengths above all: with unequal lengths the library aligns the last query and key, PyTorch the
    first."""
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3]
    if not fits or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ParbankError(
            f"causal_attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit; they must be "
            "(B, T, heads, D) and twice (B, T, kv_heads, D) with heads a multiple of kv_heads"
        )
    check_floating("causal_attention", q=q, k=k, v=v)
    if not q.dtype == k.dtype == v.dtype:
        raise ParbankError(
            f"causal_attention: q is {q.dtype}, k {k.dtype} and v {v.dtype}; cast them to one type first"
        )
    same_device("causal_attention", q, k, v)
