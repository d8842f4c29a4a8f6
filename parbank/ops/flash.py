"""Causal attention: FlashAttention 3 where it is installed, PyTorch's own elsewhere.

A query sees the keys up to its own, all of them or those of its document, and of these all or the last `window`.
Documents come as cumulative lengths over the batch laid out as one row, (documents + 1,) int32: where each document
begins, and then the end. A document never crosses a row of the batch, and equal neighbours are empty documents, so that
one shape serves batches of different counts. That is the varlen form of both libraries.

On Hopper FlashAttention 3 is faster than cuDNN, PyTorch's fastest backend, in both directions
(docs/log/step.md). PyTorch can route scaled_dot_product_attention to it, but only for the whole process,
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
from parbank.ops.register import operator

MODULE = "flash_attn_interface"
CAPABILITY = (9, 0)  # the kernels are made of Hopper's instructions
WIDEST_HEAD = 256
# The arguments used below, by name. Versions of the library differ in the others.
_LIMITS = {
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "window_size_left",
    "softmax_scale",
    "is_causal",
}
_FORWARD = {"q", "k", "v", "out", "num_splits"} | _LIMITS
_BACKWARD = {"dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "deterministic"} | _LIMITS

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
# PyTorch's own FlashAttention 2. A constant, as Dynamo needs it.
HAS_VARLEN = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0)


def _parts(q: Tensor, k: Tensor) -> int:
    """The number of calls of the backward pass. With two heads per key, each call takes every second head, so that the
    library sees as many keys as heads.

    In one call, the library sums the gradients of heads that share a key in float32 in memory. That needs zeros to
    start with and a pass to round. Two calls and the sum of their results take less, and round before the sum, as
    cuDNN does. With more heads per key, more calls would round more often and have less to do each.
    """
    return 2 if q.shape[2] == 2 * k.shape[2] else 1


@operator(
    "flash_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? lengths=None, int window=0) -> (Tensor, Tensor)",
)
def _attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, window: int = 0
) -> tuple[Tensor, Tensor]:
    """The output (B, T, heads, D), and the log-sum-exp of every query for each backward call: (calls, B, heads / calls,
    T), or with lengths (calls, heads / calls, B T)."""
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    limits, parts = _limits(q, lengths, window), _parts(q, k)
    q, k, v = (_aligned(_laid_out(x, lengths)) for x in (q, k, v))
    # Splitting keys among programs pays only for few queries, and makes sums depend on how many programs fit.
    _, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, out=_laid_out(y, lengths), num_splits=1, **limits)
    return y, lse.unflatten(-2, (-1, parts)).movedim(-2, 0).contiguous()


@operator(
    "flash_attention_backward",
    "(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor? lengths=None, int window=0)"
    " -> (Tensor, Tensor, Tensor)",
)
def _backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    lengths: Tensor | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, and the parts of dk and dv from each call: (calls, B, T, kv_heads, D)."""
    calls, limits = len(lse), _limits(q, lengths, window)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty((calls, *x.shape), dtype=x.dtype, device=x.device) for x in (k, v))
    dy, q, k, v, y = (_aligned(_laid_out(x, lengths)) for x in (dy, q, k, v, y))
    for i in range(calls):
        own = (..., slice(i, None, calls), slice(None))
        into = {"dq": _laid_out(dq, lengths)[own], "dk": _laid_out(dk[i], lengths), "dv": _laid_out(dv[i], lengths)}
        exact = torch.are_deterministic_algorithms_enabled()
        torch.ops.flash_attn_3.bwd(dy[own], q[own], k, v, y[own], lse[i], **into, deterministic=exact, **limits)
    return dq, dk, dv


def _limits(q: Tensor, lengths: Tensor | None, window: int) -> dict[str, Any]:
    """The library's arguments for which keys a query sees. It counts a window without the query's own key."""
    limits: dict[str, Any] = {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": True}
    if window:
        limits["window_size_left"] = window - 1
    if lengths is not None:
        limits |= {
            "cu_seqlens_q": lengths,
            "cu_seqlens_k": lengths,
            "max_seqlen_q": q.shape[1],
            "max_seqlen_k": q.shape[1],
        }
    return limits


def _laid_out(x: Tensor, lengths: Tensor | None) -> Tensor:
    """x (B, T, heads, D), with lengths as one row (B T, heads, D)."""
    return x if lengths is None else x.flatten(0, 1)


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy that TMA can address: contiguous channels, the start and every other stride a multiple of 16 bytes.

    The library checks the channels and assumes the rest. A clone, not contiguous(), which keeps any stride of a
    dimension of size one.
    """
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    fits = fits and all(step * x.element_size() % 16 == 0 for step in x.stride()[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


@fake(_attention)
def _(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, window: int = 0) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    calls = _parts(q, k)
    shape = (batch, heads // calls, length) if lengths is None else (heads // calls, batch * length)
    return q.new_empty(q.shape), q.new_empty((calls, *shape), dtype=torch.float32)


@fake(_backward)
def _(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    lengths: Tensor | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    calls = _parts(q, k)
    return q.new_empty(q.shape), k.new_empty((calls, *k.shape)), v.new_empty((calls, *v.shape))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, lengths, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, lengths)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """The compiler sums over calls, since it may fuse further terms into that sum."""
    if dy is None:
        return None, None, None, None, None
    dq, dk, dv = _backward(dy, *ctx.saved_tensors, ctx.window)
    of_k, of_v = (dk[0], dv[0]) if len(dk) == 1 else (dk[0] + dk[1], dv[0] + dv[1])
    return dq, of_k, of_v, None, None


def _refuse(ctx: Any, *grads: Any) -> NoReturn:
    raise ParbankError(
        "causal_attention has no second derivative (a backward through its backward was asked for), and PyTorch's own fused "
        "attention has none either; to differentiate twice, write it out as products and a softmax"
    )


torch.library.register_autograd(_attention, _differentiate, setup_context=_save)
torch.library.register_autograd(_backward, _refuse)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, window: int = 0) -> Tensor:
    """Softmax attention of q (B, T, heads, D) over k and v (B, T, kv_heads, D). Each query sees the keys up to its own:
    with `lengths` (see above) only those of its document, with a `window` only the last so many, its own included."""
    _check(q, k, v)
    check_limits("causal_attention", q, lengths, window)
    if AVAILABLE and _fits(q, k, v):
        return _attention(q, k, v, lengths, window)[0]
    if (lengths is not None or window) and takes_varlen(q, q.shape[-1]):
        if lengths is None:
            return attend_varlen(q, k, v, None, None, window)
        row, keys, values = (x.flatten(0, 1) for x in (q, k, v))
        return attend_varlen(row, keys, values, lengths, lengths, window, q.shape[1], q.shape[1]).view(q.shape)
    return reference.causal_attention(q, k, v, lengths, window)


def attend_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    window: int,
    longest_query: int | None = None,
    longest_key: int | None = None,
) -> Tensor:
    """PyTorch's own FlashAttention 2 over (tokens, heads, D), with cumulative lengths of queries and keys, or over
    (B, T, heads, D) without; `longest_...` bounds the longest run. In a run the last query is aligned with the last key.

    `torch.nn.attention.varlen` calls the same function, and its arguments differ from version to version.
    """
    sizes = (longest_query or q.shape[1], longest_key or k.shape[1])
    outputs = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        queries,
        keys,
        *sizes,
        0.0,
        False,
        False,
        window_size_left=window - 1 if window else -1,
        window_size_right=0,
    )
    y: Tensor = outputs[0]
    return y


def fits_varlen(x: Tensor, width: int) -> bool:
    """Whether PyTorch's own FlashAttention 2 takes heads of this width. It has documents and windows, which
    scaled_dot_product_attention does not expose."""
    return HAS_VARLEN and x.is_cuda and fits(x.dtype, width)


def takes_varlen(x: Tensor, width: int) -> bool:
    """Whether attention within documents or windows takes a kernel. Without one, a mask made once serves all layers. On
    cards other than 8.0 and 9.0, heads wider than 192 have no backward pass."""
    return fits_varlen(x, width) and width <= 192 and takes_kernel(x)


def _fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return takes_kernel(q, k, v) and fits(q.dtype, q.shape[-1]) and q.numel() > 0


def fits(dtype: torch.dtype, width: int) -> bool:
    """Whether the libraries have kernels for heads of this width."""
    return dtype in (torch.float16, torch.bfloat16) and width % 8 == 0 and width <= WIDEST_HEAD


def check_limits(op: str, x: Tensor, lengths: Tensor | None, window: int) -> None:
    """Checks all but the numbers in `lengths`, which are on the device. `x` is on the device of the queries."""
    if window < 0:
        raise ParbankError(f"{op}: a window of {window} keys; it must be 0 (no limit) or positive")
    if lengths is None:
        return
    if lengths.dim() != 1 or lengths.dtype != torch.int32 or len(lengths) < 2 or not lengths.is_contiguous():
        raise ParbankError(
            f"{op}: lengths is {lengths.dtype} {tuple(lengths.shape)}; it must be a contiguous int32 (documents + 1,): where "
            "each document begins in the batch laid out as one row, then the end"
        )
    same_device(op, x, lengths)


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
