"""Cross-entropy of softcapped logits, z = cap*tanh(x/cap): one pass over the logits each way. (Softcap: Gemma 2.)

    loss  = log(sum(exp(z))) - z[target]
    dx[c] = dloss * (softmax(z)[c] - [c == target]) * (1 - (z[c]/cap)^2)

Forward keeps the log-sum-exp of each row in base 2, the hardware's base, as two numbers: the largest z, and log2 of the
sum of exp(z - largest). Their sum as one number would lose the second to rounding where logits are large: at 1e9 a float32
has no digits left for it, and every token would cost nothing. Only for caps up to `BOUNDED_CAP` one number is enough.
Backward reads the logits again and writes their gradient. No float32 tensor has the size of the logits.

At these sizes tanh, not memory, would bound the time: an accurate tanh takes two operations of the special-function
unit per element, exp a third, and memory leaves time for fewer than two. So a tile whose logits all lie within
0.7*cap, as those of a trained model nearly always do, uses a polynomial of eight ordinary operations. Other tiles
compute both forms.
"""

import math
from typing import Any

import torch
from torch import Tensor

from parbank.errors import ParbankError
from parbank.gpu import on_device
from parbank.ops import configs, reference
from parbank.ops.backend import tl, triton
from parbank.ops.checks import as_rows, fake, refuse_double_backward, same_device, takes_kernel
from parbank.ops.configs import ANY, Launch
from parbank.ops.register import operator

# exp(2 * 40) is within float32, so a row may be shifted by any bound on |z| instead of its own maximum. And up to 40 the
# log-sum-exp is one number, with an error of a few millionths.
BOUNDED_CAP = 40.0

IGNORED = -100
"""A target that has no loss: the default ignore_index, as in PyTorch."""


def _launch(rows: int, block: int, warps: int) -> Launch:
    return Launch({"BLOCK_ROWS": rows, "BLOCK": block}, num_warps=warps, num_stages=1)


# By vocabulary. Forward a row is held whole up to 8192 and walked in blocks beyond; 16 to 32 elements a thread.
configs.register(
    "softcap_cross_entropy", sm80=[(1024, _launch(1, 1024, 1)), (4096, _launch(1, 4096, 4)), (ANY, _launch(1, 8192, 8))]
)
configs.register("softcap_cross_entropy_backward", sm80=[(1024, _launch(2, 1024, 2)), (ANY, _launch(1, 4096, 4))])


@triton.jit
def _near(x, cap):
    """cap*tanh(x/cap) for |x| <= 0.7*cap: tanh(t) = t + t^3 q(t^2), q of degree 4 by minimax, error below 1.5e-8."""
    u = x * x * (1.0 / (cap * cap))
    q = 0.020111659583453567 - 0.005155114805644487 * u
    q = q * u - 0.05356698947148803
    q = q * u + 0.1332924312007887
    q = q * u - 0.3333319661491843
    return x + x * u * q


@triton.jit
def _far(x, cap):
    """cap*tanh(x/cap) for any x: 1 - 2/(exp(2t) + 1) is inaccurate near zero, where the polynomial is accurate."""
    size = tl.abs(x)
    power = tl.exp2(
        tl.minimum(size * (2.8853900817779268 / cap), 126.0)
    )  # exp(2t), as 2^(2t / ln 2), short of infinity
    far = cap - 2.0 * cap / (power + 1.0)
    return tl.where(size > 0.7 * cap, tl.where(x < 0, -far, far), _near(x, cap))


@triton.jit
def _softcap(x, cap, peak):
    """`peak` is the largest |x| of the tile: one branch for all of it."""
    if peak > 0.7 * cap:
        z = _far(x, cap)
    else:
        z = _near(x, cap)
    return z


@triton.jit
def _scores(pointers, inside, known, cap, CAPPED: tl.constexpr, BOUNDED: tl.constexpr):
    """The capped logits of a tile, and for each row a bound to shift its exponentials by. Finite for masked rows too."""
    if CAPPED:
        x = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        peak = tl.max(tl.abs(x), 1)
        z = _softcap(x, cap, tl.max(peak, 0))
        if BOUNDED:
            top = tl.minimum(peak, cap)  # |tanh(t)| is below |t| and 1
        else:
            top = tl.max(tl.where(known[None, :], z, -1.0e38), 1)
    else:
        # The floor is set after the cast: in float16 it would be infinite.
        z = tl.where(inside, tl.load(pointers, mask=inside, other=0.0).to(tl.float32), -1.0e38)
        top = tl.max(z, 1)
    return z, top


@triton.jit
def _exp(z, largest, log2_sum, BOUNDED: tl.constexpr):
    """exp(z - largest) / 2^log2_sum; where bounded, exp(z) / 2^log2_sum, with one rounding less."""
    if BOUNDED:
        power = tl.exp2(z * 1.4426950408889634 - log2_sum[:, None])
    else:
        power = tl.exp2((z - largest[:, None]) * 1.4426950408889634 - log2_sum[:, None])
    return power


@triton.jit
def _log_sum_exp(
    start, live, cap, VOCAB: tl.constexpr, CAPPED: tl.constexpr, BOUNDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of each row that begins at `start`, walking it in blocks: the largest z, and log2 of the sum of
    exp(z - largest); where bounded, 0 and log2 of the sum of exp(z)."""
    # The floor is finite and below any row's largest: infinities would give NaNs.
    largest = tl.full((BLOCK_ROWS,), -1.0e38, tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    none = tl.zeros((BLOCK_ROWS,), tl.float32)
    for first in range(0, VOCAB, BLOCK):
        col = first + tl.arange(0, BLOCK)
        known = col < VOCAB
        z, top = _scores(start[:, None] + col[None, :], live[:, None] & known[None, :], known, cap, CAPPED, BOUNDED)
        new = tl.maximum(largest, top)
        if BOUNDED:
            power = _exp(z, none, new * 1.4426950408889634, BOUNDED)
        else:
            power = _exp(z, new, none, BOUNDED)
        if VOCAB % BLOCK != 0:
            power = tl.where(known[None, :], power, 0.0)
        total = total * tl.exp2((largest - new) * 1.4426950408889634) + tl.sum(power, 1)
        largest = new
    return _pair(largest, tl.log2(total), BOUNDED)


@triton.jit
def _pair(largest, log2_sum, BOUNDED: tl.constexpr):
    """The two numbers of a log-sum-exp, from the shift of its exponentials and log2 of their sum."""
    if BOUNDED:
        log2_sum = largest * 1.4426950408889634 + log2_sum
        largest = largest * 0.0
    return largest, log2_sum


@triton.jit
def _loss(start, live, target, largest, log2_sum, cap, ignore, VOCAB: tl.constexpr, CAPPED: tl.constexpr):
    """The loss of each row: 0 where it is ignored, NaN where the target is not in the vocabulary."""
    known = live & (target >= 0) & (target < VOCAB)
    z = tl.load(start + target, mask=known, other=0.0).to(tl.float32)
    if CAPPED:
        z = _far(z, cap)
    # In this order: largest - z is exact or large, and log2_sum keeps its digits.
    loss = tl.where(known, (largest - z) + log2_sum * 0.6931471805599453, float("nan"))
    return tl.where(target == ignore, 0.0, loss)


@triton.jit
def _loss_forward_kernel(
    logits, targets, losses, counted, sums, rows, stride, cap, ignore,
    VOCAB: tl.constexpr, CAPPED: tl.constexpr, BOUNDED: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < rows
    start = logits + row * stride
    target = tl.load(targets + row, mask=live, other=0)
    largest, log2_sum = _log_sum_exp(start, live, cap, VOCAB, CAPPED, BOUNDED, BLOCK_ROWS, BLOCK)
    if BOUNDED:
        tl.store(sums + row, log2_sum, mask=live)
    else:
        tl.store(sums + 2 * row, log2_sum, mask=live)
        tl.store(sums + 2 * row + 1, largest, mask=live)
    tl.store(losses + row, _loss(start, live, target, largest, log2_sum, cap, ignore, VOCAB, CAPPED), mask=live)
    if COUNT:
        tl.store(counted + row, (target != ignore).to(tl.float32), mask=live)


@triton.jit
def _gradient(z, largest, log2_sum, col, target, cap, CAPPED: tl.constexpr, BOUNDED: tl.constexpr):
    """dz of one row's loss, through the cap."""
    back = _exp(z, largest, log2_sum, BOUNDED)
    back = tl.where(col[None, :] == target[:, None], back - 1.0, back)
    if CAPPED:
        t = z * (1.0 / cap)
        back *= 1.0 - t * t
    return back


@triton.jit
def _loss_backward_kernel(
    grad, logits, targets, sums, totals, out, rows, stride_grad, stride, stride_out, cap, ignore,
    VOCAB: tl.constexpr, CAPPED: tl.constexpr, BOUNDED: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (VOCAB + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    inside = live[:, None] & (col < VOCAB)[None, :]
    z = tl.load(logits + row[:, None] * stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    target = tl.load(targets + row, mask=live, other=0)
    if BOUNDED:
        log2_sum = tl.load(sums + row, mask=live, other=0.0)
        largest = log2_sum  # not used
    else:
        log2_sum = tl.load(sums + 2 * row, mask=live, other=0.0)
        largest = tl.load(sums + 2 * row + 1, mask=live, other=0.0)
    factor = tl.where(target == ignore, 0.0, tl.load(grad + row * stride_grad, mask=live, other=0.0).to(tl.float32))
    if COUNT:
        factor /= tl.maximum(tl.load(totals + 1), 1.0)  # where all are ignored the gradient is zero
    if CAPPED:
        z = _softcap(z, cap, tl.max(tl.max(tl.abs(z), 1), 0))
    back = _gradient(z, largest, log2_sum, col, target, cap, CAPPED, BOUNDED) * factor[:, None]
    tl.store(out + row[:, None] * stride_out + col[None, :], back.to(out.dtype.element_ty), mask=inside)


def is_bounded(cap: float) -> bool:
    """Whether capped logits lie so close to zero that a log-sum-exp is one number."""
    return 0 < cap <= BOUNDED_CAP


def sums_shape(targets: Tensor, cap: float) -> tuple[int, ...]:
    """The shape of the tensor with the log-sum-exp of every target."""
    return (*targets.shape, 1 if is_bounded(cap) else 2)


def launch_losses(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    sums: Tensor,
    cap: float,
    ignore_index: int,
    counted: Tensor | None = None,
) -> None:
    """Fills losses (rows,) and sums (rows, numbers of `sums_shape`) from logits (rows, V) and targets (rows,); counted: 1
    where a target is not ignored."""
    rows, vocab = logits.shape
    launch = configs.choose("softcap_cross_entropy", vocab, logits.device)
    with on_device(logits.device):
        _loss_forward_kernel[(triton.cdiv(rows, launch.blocks["BLOCK_ROWS"]),)](
            logits, targets, losses, counted, sums, rows, logits.stride(0), cap, ignore_index,
            VOCAB=vocab, CAPPED=cap > 0, BOUNDED=is_bounded(cap), COUNT=counted is not None, **launch.kwargs(),
        )  # fmt: skip


def launch_gradient(
    grad: Tensor,
    logits: Tensor,
    targets: Tensor,
    sums: Tensor,
    out: Tensor,
    cap: float,
    ignore_index: int,
    totals: Tensor | None = None,
) -> None:
    """Fills out (rows, V) with the gradient of the logits; out may be the logits themselves.

    totals: the sum of the losses and their number. The gradient of a mean is divided by the number.
    """
    rows, vocab = logits.shape
    launch = configs.choose("softcap_cross_entropy_backward", vocab, logits.device)
    programs = triton.cdiv(rows, launch.blocks["BLOCK_ROWS"]) * triton.cdiv(vocab, launch.blocks["BLOCK"])
    with on_device(logits.device):
        _loss_backward_kernel[(programs,)](
            grad, logits, targets, sums, totals, out, rows, grad.stride(0), logits.stride(0), out.stride(0),
            cap, ignore_index, VOCAB=vocab, CAPPED=cap > 0, BOUNDED=is_bounded(cap), COUNT=totals is not None,
            **launch.kwargs(),
        )  # fmt: skip


@operator(
    "softcap_cross_entropy",
    "(Tensor logits, Tensor targets, float cap, int ignore_index) -> (Tensor, Tensor)",
)
def _softcap_cross_entropy(logits: Tensor, targets: Tensor, cap: float, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The losses of every token, in the shape of the targets, and the numbers of its log-sum-exp, both float32."""
    losses = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    sums = torch.empty(sums_shape(targets, cap), dtype=torch.float32, device=logits.device)
    if targets.numel():
        launch_losses(as_rows(logits), targets.contiguous(), losses, sums, cap, ignore_index)
    return losses, sums


@operator(
    "softcap_cross_entropy_mean",
    "(Tensor logits, Tensor targets, float cap, int ignore_index) -> (Tensor, Tensor, Tensor)",
)
def _mean_loss(logits: Tensor, targets: Tensor, cap: float, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, the numbers of every log-sum-exp, and (sum of the losses, their number).

    A separate op, because PyTorch's mean takes half a dozen launches, forward and backward, beside our two.
    """
    parts = torch.empty((2, targets.numel()), dtype=torch.float32, device=logits.device)
    sums = torch.empty(sums_shape(targets, cap), dtype=torch.float32, device=logits.device)
    if targets.numel():
        launch_losses(as_rows(logits), targets.contiguous(), parts[0], sums, cap, ignore_index, parts[1])
    totals = parts.sum(1)
    return totals[0] / totals[1], sums, totals


@operator(
    "softcap_cross_entropy_backward",
    "(Tensor grad, Tensor logits, Tensor targets, Tensor sums, float cap, int ignore_index, Tensor? totals=None)"
    " -> Tensor",
)
def _softcap_cross_entropy_backward(
    grad: Tensor,
    logits: Tensor,
    targets: Tensor,
    sums: Tensor,
    cap: float,
    ignore_index: int,
    totals: Tensor | None = None,
) -> Tensor:
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if targets.numel():
        flat = out.view(-1, logits.shape[-1])
        grad = grad.reshape(-1)
        launch_gradient(grad, as_rows(logits), targets.contiguous(), sums, flat, cap, ignore_index, totals)
    return out


@fake(_softcap_cross_entropy)
def _(logits: Tensor, targets: Tensor, cap: float, ignore_index: int) -> tuple[Tensor, Tensor]:
    losses, sums = (logits.new_empty(shape, dtype=torch.float32) for shape in (targets.shape, sums_shape(targets, cap)))
    return losses, sums


@fake(_mean_loss)
def _(logits: Tensor, targets: Tensor, cap: float, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    mean, sums, totals = (
        logits.new_empty(shape, dtype=torch.float32) for shape in ((), sums_shape(targets, cap), (2,))
    )
    return mean, sums, totals


@fake(_softcap_cross_entropy_backward)
def _(grad: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, ctx.cap, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, targets, output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None
    logits, targets, sums = ctx.saved_tensors
    return _softcap_cross_entropy_backward(grad, logits, targets, sums, ctx.cap, ctx.ignore_index), None, None, None


def _save_mean(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, ctx.cap, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, targets, *output[1:])
    ctx.set_materialize_grads(False)


def _differentiate_mean(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None
    logits, targets, sums, totals = ctx.saved_tensors
    every = grad.expand(targets.shape)
    back = _softcap_cross_entropy_backward(every, logits, targets, sums, ctx.cap, ctx.ignore_index, totals)
    return back, None, None, None


torch.library.register_autograd(_softcap_cross_entropy, _differentiate, setup_context=_save)
torch.library.register_autograd(_mean_loss, _differentiate_mean, setup_context=_save_mean)
torch.library.register_autograd(_softcap_cross_entropy_backward, refuse_double_backward("softcap_cross_entropy"))


def softcap_cross_entropy(
    logits: Tensor, targets: Tensor, cap: float = 0.0, ignore_index: int = IGNORED, reduction: str = "mean"
) -> Tensor:
    """Cross-entropy of cap*tanh(logits/cap), in one pass each way. A cap of 0 leaves the logits as they are.

    logits (..., V), targets (...) of int64. reduction: mean, sum or none. "none" keeps the shape of the targets, with
    zeros for ignored targets. A target outside the vocabulary gives a loss of NaN where the kernel runs.
    """
    check_loss("softcap_cross_entropy", logits, targets, cap, reduction)
    if not takes_kernel(logits):
        return reference.softcap_cross_entropy(logits, targets, cap, ignore_index, reduction)
    if reduction == "mean":
        return _mean_loss(logits, targets, cap, ignore_index)[0]
    losses, _ = _softcap_cross_entropy(logits, targets, cap, ignore_index)
    return losses if reduction == "none" else losses.sum()


def reduce_losses(losses: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (targets != ignore_index).sum()


def check_loss(op: str, rows: Tensor, targets: Tensor, cap: float, reduction: str) -> None:
    """Checks the arguments of both losses; rows is (..., anything) beside targets (...)."""
    if reduction not in ("mean", "sum", "none"):
        raise ParbankError(f"{op}: unknown reduction {reduction!r}; use mean, sum or none")
    if rows.dim() == 0 or rows.shape[:-1] != targets.shape or rows.shape[-1] == 0:
        raise ParbankError(
            f"{op}: the input is {tuple(rows.shape)} and the targets {tuple(targets.shape)}; the targets must have the "
            "input's shape without its last dimension, which must not be empty"
        )
    if targets.dtype != torch.int64 or not rows.dtype.is_floating_point:
        raise ParbankError(
            f"{op}: targets are {targets.dtype} and the input {rows.dtype}; use int64 and a floating type"
        )
    if not 0 <= cap < math.inf:  # nor is a NaN
        raise ParbankError(f"{op}: cap is {cap}; it must be positive and finite, or 0 for none")
    same_device(op, rows, targets)
