"""The head product and its softcapped cross-entropy in chunks of rows. The full logits are never in memory.
(Liger-Kernel; Cut Cross-Entropy.)

For a mean or a sum, the gradient of each token's loss is known up to one factor. So forward does all the work while a
chunk's logits are in the L2 cache: product, loss, gradient written over the logits, and the two products that carry
it to x and to the weight. Backward only multiplies by the factor. For a mean the factor is 1 / tokens. Its mantissa
is applied forward, before rounding, and its power of two backward, where it rounds nothing. So float16 does not
underflow, and a gradient of 1 or a power of two costs no second rounding. The weight's gradient is summed in float32.

Per-token losses (reduction "none") need their gradients before anything can be summed, so backward computes each
chunk's logits again. The kernel is that of loss.py, applied to a chunk. Memory beyond the results is one chunk of
logits.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parbank.errors import ParbankError
from parbank.gpu import on_device
from parbank.ops import configs, reference
from parbank.ops.backend import tl, triton
from parbank.ops.checks import as_rows, fake, refuse_double_backward, same_device, takes_kernel
from parbank.ops.configs import ANY, Launch
from parbank.ops.loss import (
    _exp,
    _gradient,
    _launch,
    _log_sum_exp,
    _loss,
    _pair,
    _scores,
    check_loss,
    is_bounded,
    launch_gradient,
    launch_losses,
    reduce_losses,
    sums_shape,
)
from parbank.ops.register import operator

# By vocabulary. CHUNK is in logits: 2^24 of them are 32 MiB in bfloat16 and stay in an H200's L2; with a large vocabulary
# the weight's float32 gradient, read and written once a chunk, asks for fewer chunks.
configs.register(
    "linear_softcap_cross_entropy", sm80=[(2048, Launch({"CHUNK": 1 << 25})), (ANY, Launch({"CHUNK": 1 << 26}))]
)


configs.register(
    "softcap_loss_and_gradient",
    sm80=[
        (1024, _launch(1, 1024, 1)),
        (4096, _launch(1, 4096, 4)),
        (ANY, _launch(1, 8192, 8)),
    ],  # 4 warps are faster, but spill registers
)


@triton.jit
def _linear_loss_kernel(
    logits, targets, losses, share, rows, cap, ignore,
    VOCAB: tl.constexpr, CAPPED: tl.constexpr, BOUNDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the losses, and over the logits the gradient of `share` times the loss of their row."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < rows
    start = logits + row * VOCAB
    target = tl.load(targets + row, mask=live, other=0)
    factor = tl.where(target == ignore, 0.0, tl.load(share))[:, None]
    if VOCAB <= BLOCK:
        col = tl.arange(0, BLOCK)
        inside = live[:, None] & (col < VOCAB)[None, :]
        z, top = _scores(start[:, None] + col[None, :], inside, col < VOCAB, cap, CAPPED, BOUNDED)
        none = tl.zeros((BLOCK_ROWS,), tl.float32)
        if BOUNDED:
            power = _exp(z, none, top * 1.4426950408889634, BOUNDED)
        else:
            power = _exp(z, top, none, BOUNDED)
        if VOCAB != BLOCK:
            power = tl.where((col < VOCAB)[None, :], power, 0.0)
        largest, log2_sum = _pair(top, tl.log2(tl.sum(power, 1)), BOUNDED)
        loss = _loss(start, live, target, largest, log2_sum, cap, ignore, VOCAB, CAPPED)
        back = _gradient(z, largest, log2_sum, col, target, cap, CAPPED, BOUNDED) * factor
        tl.debug_barrier()  # the target's logit is read above through another thread than the one that overwrites it
        tl.store(start[:, None] + col[None, :], back.to(logits.dtype.element_ty), mask=inside)
    else:
        largest, log2_sum = _log_sum_exp(start, live, cap, VOCAB, CAPPED, BOUNDED, BLOCK_ROWS, BLOCK)
        loss = _loss(start, live, target, largest, log2_sum, cap, ignore, VOCAB, CAPPED)
        tl.debug_barrier()
        for first in range(0, VOCAB, BLOCK):
            col = first + tl.arange(0, BLOCK)
            inside = live[:, None] & (col < VOCAB)[None, :]
            z, _ = _scores(start[:, None] + col[None, :], inside, col < VOCAB, cap, CAPPED, BOUNDED)
            back = _gradient(z, largest, log2_sum, col, target, cap, CAPPED, BOUNDED) * factor
            tl.store(start[:, None] + col[None, :], back.to(logits.dtype.element_ty), mask=inside)
    tl.store(losses + row, loss, mask=live)


def _chunks(rows: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The rows chunk by chunk with their logits, all in one buffer: a new buffer for each chunk would keep two alive."""
    count, vocab = rows.shape[0], weight.shape[0]
    size = max(1, configs.choose("linear_softcap_cross_entropy", vocab, rows.device).blocks["CHUNK"] // vocab)
    buffer = rows.new_empty(min(size, count), vocab)
    for start in range(0, count, size):
        chunk = slice(start, min(start + size, count))
        logits = buffer[: chunk.stop - start]
        torch.mm(rows[chunk], weight.t(), out=logits)
        yield chunk, logits


def _lose_in_place(
    logits: Tensor, targets: Tensor, losses: Tensor, share: Tensor, cap: float, ignore_index: int
) -> None:
    rows, vocab = logits.shape
    launch = configs.choose("softcap_loss_and_gradient", vocab, logits.device)
    with on_device(logits.device):
        _linear_loss_kernel[(triton.cdiv(rows, launch.blocks["BLOCK_ROWS"]),)](
            logits, targets, losses, share, rows, cap, ignore_index,
            VOCAB=vocab, CAPPED=cap > 0, BOUNDED=is_bounded(cap), **launch.kwargs(),
        )  # fmt: skip


def _add_product(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """total += grad^T x in float32. cuBLAS accumulates in float32 anyway; the result must not be rounded per chunk."""
    if grad.dtype == torch.float32:
        total.addmm_(grad.t(), x)
    elif grad.is_cuda:
        total.add_(torch.mm(grad.t(), x, out_dtype=torch.float32))
    else:
        total.addmm_(grad.t().float(), x.float())


class _Gradients:
    """dx and dweight, filled chunk by chunk; empty where they are not requested."""

    def __init__(self, x: Tensor, weight: Tensor, *, of_x: bool, of_weight: bool) -> None:
        self.weight = weight
        self.dx = torch.empty(x.shape if of_x else 0, dtype=x.dtype, device=x.device)
        self.dweight = torch.zeros(weight.shape if of_weight else 0, dtype=torch.float32, device=x.device)
        self.rows = self.dx.view(-1, x.shape[-1]) if of_x else None
        self.of_weight = of_weight

    def add(self, chunk: slice, grad: Tensor, x: Tensor) -> None:
        if self.rows is not None:
            torch.mm(grad, self.weight, out=self.rows[chunk])
        if self.of_weight:
            _add_product(self.dweight, grad, x)


@operator(
    "linear_softcap_losses",
    "(Tensor x, Tensor weight, Tensor targets, float cap, int ignore_index) -> (Tensor, Tensor)",
)
def _losses(x: Tensor, weight: Tensor, targets: Tensor, cap: float, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The loss of every token and the numbers of its log-sum-exp, without any gradient."""
    losses = torch.empty(targets.shape, dtype=torch.float32, device=x.device)
    sums = torch.empty(sums_shape(targets, cap), dtype=torch.float32, device=x.device)
    rows, flat_targets, flat_losses, flat_sums = (
        as_rows(x),
        targets.contiguous().view(-1),
        losses.view(-1),
        sums.view(-1, sums.shape[-1]),
    )
    for chunk, logits in _chunks(rows, weight):
        launch_losses(logits, flat_targets[chunk], flat_losses[chunk], flat_sums[chunk], cap, ignore_index)
    return losses, sums


@operator(
    "linear_softcap_losses_backward",
    "(Tensor grad, Tensor x, Tensor weight, Tensor targets, Tensor sums, float cap, int ignore_index, "
    "bool of_x, bool of_weight) -> (Tensor, Tensor)",
)
def _losses_backward(
    grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, sums: Tensor,
    cap: float, ignore_index: int, of_x: bool, of_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    gradients = _Gradients(x, weight, of_x=of_x, of_weight=of_weight)
    rows, flat_targets, flat_sums, flat_grad = (
        as_rows(x),
        targets.contiguous().view(-1),
        sums.view(-1, sums.shape[-1]),
        grad.reshape(-1),
    )
    for chunk, logits in _chunks(rows, weight):
        launch_gradient(flat_grad[chunk], logits, flat_targets[chunk], flat_sums[chunk], logits, cap, ignore_index)
        gradients.add(chunk, logits, rows[chunk])
    return gradients.dx, gradients.dweight


@operator(
    "linear_softcap_loss_sum",
    "(Tensor x, Tensor weight, Tensor targets, Tensor share, float cap, int ignore_index, bool of_x, bool of_weight) "
    "-> (Tensor, Tensor, Tensor)",
)
def _loss_sum(
    x: Tensor, weight: Tensor, targets: Tensor, share: Tensor,
    cap: float, ignore_index: int, of_x: bool, of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The sum of the losses, and `share` times its gradients for x and for the weight (float32)."""
    gradients = _Gradients(x, weight, of_x=of_x, of_weight=of_weight)
    rows, flat_targets = as_rows(x), targets.contiguous().view(-1)
    losses = torch.empty(flat_targets.shape, dtype=torch.float32, device=x.device)
    for chunk, logits in _chunks(rows, weight):
        _lose_in_place(logits, flat_targets[chunk], losses[chunk], share, cap, ignore_index)
        gradients.add(chunk, logits, rows[chunk])
    return losses.sum(), gradients.dx, gradients.dweight


@fake(_losses)
def _(x: Tensor, weight: Tensor, targets: Tensor, cap: float, ignore_index: int) -> tuple[Tensor, Tensor]:
    losses, sums = (x.new_empty(shape, dtype=torch.float32) for shape in (targets.shape, sums_shape(targets, cap)))
    return losses, sums


def _fake_gradients(x: Tensor, weight: Tensor, of_x: bool, of_weight: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if of_x else 0), x.new_empty(weight.shape if of_weight else 0, dtype=torch.float32)


@fake(_losses_backward)
def _(
    grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, sums: Tensor,
    cap: float, ignore_index: int, of_x: bool, of_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _fake_gradients(x, weight, of_x, of_weight)


@fake(_loss_sum)
def _(
    x: Tensor, weight: Tensor, targets: Tensor, share: Tensor,
    cap: float, ignore_index: int, of_x: bool, of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return x.new_empty((), dtype=torch.float32), *_fake_gradients(x, weight, of_x, of_weight)


def _save_losses(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, targets, ctx.cap, ctx.ignore_index = inputs
    ctx.save_for_backward(x, weight, targets, output[1])
    ctx.set_materialize_grads(False)


def _differentiate_losses(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, targets, sums = ctx.saved_tensors
    of_x, of_weight = ctx.needs_input_grad[:2]
    if grad is None:
        return (None,) * 5
    dx, dweight = _losses_backward(grad, x, weight, targets, sums, ctx.cap, ctx.ignore_index, of_x, of_weight)
    return dx if of_x else None, dweight.to(weight.dtype) if of_weight else None, None, None, None


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.of_x, ctx.of_weight = inputs[6:]
    ctx.weight_dtype = inputs[1].dtype
    ctx.save_for_backward(*output[1:], inputs[3])
    ctx.set_materialize_grads(False)


def _differentiate_sum(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():  # only with create_graph=True; the saved gradients would pass for constants
        refuse_double_backward("linear_softcap_cross_entropy")(ctx)
    if grad is None:
        return (None,) * 8
    dx, dweight, share = ctx.saved_tensors
    factor = grad / share
    back = (dweight * factor).to(ctx.weight_dtype) if ctx.of_weight else None
    return dx * factor if ctx.of_x else None, back, None, None, None, None, None, None


torch.library.register_autograd(_losses, _differentiate_losses, setup_context=_save_losses)
torch.library.register_autograd(_losses_backward, refuse_double_backward("linear_softcap_cross_entropy"))
torch.library.register_autograd(_loss_sum, _differentiate_sum, setup_context=_save_sum)


def linear_softcap_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, cap: float = 0.0, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """softcap_cross_entropy(x W^T, targets) without storing the logits: x (..., width), weight (V, width)."""
    check_loss("linear_softcap_cross_entropy", x, targets, cap, reduction)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.shape[0] == 0 or weight.dtype != x.dtype:
        raise ParbankError(
            f"linear_softcap_cross_entropy: weight is {weight.dtype} {tuple(weight.shape)} and x {x.dtype} "
            f"{tuple(x.shape)}; weight must be (vocabulary, {x.shape[-1]}) in x's dtype"
        )
    same_device("linear_softcap_cross_entropy", x, weight)
    if not takes_kernel(x, weight):
        return reference.linear_softcap_cross_entropy(x, weight, targets, cap, ignore_index, reduction)
    graded = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if reduction == "none" or not graded:
        losses = _losses(x, weight, targets, cap, ignore_index)[0]
        return reduce_losses(losses, targets, ignore_index, reduction)
    if reduction == "sum":
        share = torch.ones((), dtype=torch.float32, device=x.device)
        return _loss_sum(x, weight, targets, share, cap, ignore_index, x.requires_grad, weight.requires_grad)[0]
    tokens = (targets != ignore_index).sum()
    inverse = 1.0 / tokens.clamp(min=1).float()
    share = inverse / torch.exp2(torch.log2(inverse).floor())
    return _loss_sum(x, weight, targets, share, cap, ignore_index, x.requires_grad, weight.requires_grad)[0] / tokens
