"""Causal attention: FlashAttention 3 where it is installed, PyTorch's own everywhere else.

The kernels are not ours. On Hopper those of FlashAttention 3 take 1.82 ms a layer of golf both ways where cuDNN's, the fastest
PyTorch has, take 2.20 (docs/log/2026-11-15-ops.md). PyTorch can put them behind scaled_dot_product_attention, but for the whole
process, and parbank must not choose that for a program which only imports it. So there are two ops of our own around the
library's two functions, with what a compiler needs to know of them.

The package registers `torch.ops.flash_attn_3` when its module `flash_attn_interface` is imported. That is done once, with
parbank's own import, and only where the kernels can run.
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


def _has_gpu() -> bool:
    return not (backend.why_no_kernels() or backend.INTERPRETED) and torch.cuda.get_device_capability() == CAPABILITY


def _load() -> bool:
    """Whether the library is there and has the functions in the form used here."""
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
    """In how many calls backward: with two heads to a key each takes every second one, and the library sees as many keys as heads.

    In one call it adds up the gradients of heads that share a key in float32 and in memory, which takes zeros to begin with
    and a pass to round. Two calls and the sum of their results take less, and round before the sum, as cuDNN does. More heads
    a key would round more often, and each call would have less to do.
    """
    return 2 if q.shape[2] == 2 * k.shape[2] else 1


@torch.library.custom_op(
    "parbank::flash_attention", mutates_args=(), schema="(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)"
)
def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output (B, T, heads, D), and the log-sum-exp of every query by call of the backward, (calls, B, heads / calls, T)."""
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q, k, v = map(_aligned, (q, k, v))
    # Splitting keys among programs pays for a few queries on many keys, and makes sums depend on how many programs fit.
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
    """dq, and what each call has of dk and dv: (calls, B, T, kv_heads, D)."""
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
    """x as the copy engine can address it: channels side by side, the start and every other step a multiple of 16 bytes.

    The library asks for the first in words and takes the rest for granted. A clone and not contiguous(), which leaves alone
    what a dimension of one has for its step.
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
    """The sums over calls are the compiler's, which may have more to add to them."""
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
    """Softmax attention of q (B, T, heads, D) over k and v (B, T, kv_heads, D), each query over the keys up to its own."""
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
    """Keys of another length above all: the library would have the last query see the last key, PyTorch the first the first."""
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
