"""Helpers that several ops share: dispatch to a kernel, tensors as rows, persistent programs, refused derivatives."""

import functools
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from parbank.errors import ParbankError
from parbank.ops.backend import use_triton

TILE_SIDE = 256  # the longest side of a tile in any table
MULTIPROCESSORS_INTERPRETED = 3  # few enough that a small test loops in each program, odd so that work splits unevenly


def as_rows(x: Tensor) -> Tensor:
    """x (..., width) as (rows, width), contiguous along a row: a view where the strides allow it, else a copy."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] <= 1 else rows.contiguous()


def unit_channels(x: Tensor) -> Tensor:
    """x (..., channels) with contiguous channels: x itself, or a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def as_vector(x: Tensor | None) -> Tensor | None:
    """A vector of channels as a contiguous tensor. A column of a parameter, for instance, has a stride."""
    return None if x is None else x.contiguous()


def persistent_programs(device: torch.device, per_multiprocessor: int, tiles: int) -> int:
    """How many programs share `tiles` tiles: a fixed number per multiprocessor, so that sums have a fixed order."""
    return max(1, min(tiles, per_multiprocessor * _multiprocessors(device)))


def takes_kernel(*tensors: Tensor | None) -> bool:
    """Whether a call takes the kernel: as the backend says, but never under torch.func or forward-mode differentiation.

    A torch.library op with an autograd formula refuses grad, jvp and jacrev; vmap would launch once per example; the
    tangent of a dual number would be dropped silently.
    """
    if not use_triton(*tensors) or forward_ad._current_level >= 0:
        return False
    return torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active()


def near(x: Tensor, sides: Mapping[int, int]) -> Tensor:
    """x, or a compact copy where offsets within a tile of these sides (by dimension) do not fit into 32 bits.

    Kernels keep the offsets of tiles in 64 bits. 64-bit offsets within a tile would cost registers, and hardly any
    tensor needs them.
    """
    reach = sum(side * x.stride(dim) for dim, side in sides.items())
    return x.contiguous() if reach >= 2**31 else x


def is_near(*sizes: int) -> bool:
    """Whether `near` can help for matrices of these sides: the step from row to row is at least a row's length."""
    return all((TILE_SIDE + 1) * size < 2**31 for size in sizes)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def refuse_double_backward(op: str) -> Callable[..., NoReturn]:
    """Raises an error for second derivatives, which are asked for by mistake more often than on purpose."""

    def refuse(ctx: Any, *grads: Any) -> NoReturn:
        raise ParbankError(
            f"{op} has no second derivative in its Triton kernel (a backward through its backward was asked for); "
            "run it under parbank.ops.backend.use_backend('reference'), which has"
        )

    return refuse


class _Final(torch.autograd.Function):
    """Returns the first `count` tensors unchanged, as functions of the other tensors, and refuses their derivative."""

    @staticmethod
    def forward(ctx: Any, op: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.op = op
        return tuple(y.view_as(y) for y in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:  # type: ignore[override]
        refuse_double_backward(ctx.op)(ctx, *grads)


def differentiate_once(op: str, backward: Callable[..., Any], ctx: Any, *grads: Tensor | None) -> Any:
    """Calls a backward pass that consists of several ops, and refuses second derivatives of everything it returns.

    The ops refuse by themselves only where a tensor that depends on the inputs reaches them. Tensors kept by the
    forward pass have no history, so a product with such a tensor would have a silently incomplete derivative.
    """
    # Under a compiler, the compiled function itself refuses another derivative.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return backward(ctx, *grads)
    with torch.no_grad():
        gradients = backward(ctx, *grads)
    made = [y for y in gradients if y is not None]
    if not made:
        return gradients
    behind = [x for x in (*ctx.saved_tensors, *grads) if x is not None and x.requires_grad]
    final = iter(_Final.apply(op, len(made), *made, *behind))
    return tuple(None if y is None else next(final) for y in gradients)


def fake(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`torch.library.register_fake`. It also applies `_shorten_log_lines`, since a compiler calls the fake before it looks up the
    op."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def shapes(*args: Any, **kwargs: Any) -> Any:
            _shorten_log_lines()
            return function(*args, **kwargs)

        torch.library.register_fake(op, shapes)
        return function

    return register


def _shorten_log_lines() -> None:
    """Before torch 2.13, Inductor formats a disabled log line for each op without a lowering. The line writes out the
    graph behind the op, once for every path through it. A residual stream has exponentially many paths, and compiling
    eleven layers never ended."""
    exc: Any = sys.modules.get("torch._inductor.exc")
    if exc is not None and torch.__version__ < "2.13":
        exc.OperatorIssue.operator_str = staticmethod(lambda target, args, kwargs: f"  target: {target}")


def check_floating(op: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.dtype.is_floating_point:
            raise ParbankError(
                f"{op}: {name} is {tensor.dtype}; it must be floating point (float32, float16, bfloat16 or float64)"
            )


def same_device(op: str, *tensors: Tensor | None) -> None:
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise ParbankError(f"{op}: tensors on {' and '.join(sorted(map(str, devices)))}; move them to one device")


@lru_cache
def _count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS_INTERPRETED
    return _count(torch.cuda.current_device() if device.index is None else device.index)
