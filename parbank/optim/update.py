"""The element-wise parts of a Muon step, in plain PyTorch: before Newton-Schulz, and after it.

These functions define the update. `parbank.optim.kernels` does the same in fewer passes over memory where Triton
runs.

Nothing here waits for the device. `Control` holds, on the device, whether the step is taken and the factor on
gradients (clip, mean over ranks, loss scale). A skipped step runs the same arithmetic with momentum 1, gradient 0 and
learning rate 0, which changes no bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parbank.optim.hyper import DECAY, LR, MOMENTUM, ROW_BETA
from parbank.optim.layout import Batch, Member, Piece
from parbank.optim.master import join_master, split_master, wide_dtype
from parbank.optim.newton_schulz import NORM_EPS, normalize, working_dtype


@dataclass(frozen=True)
class Control:
    """Tensors on the device that the whole step shares."""

    values: Tensor
    """(2,) float32: 1 or 0 for a step that is taken or skipped, and the factor on every gradient."""
    hyper: Tensor
    """The table of hyperparameters, one row a group."""
    active: Tensor
    """(matrix parameters,) float32: above 0 where some rank has a gradient."""

    def taken(self, piece: Piece) -> Tensor:
        """Whether this step changes the blocks of a piece: it is not skipped, and some rank has a gradient."""
        return self.taken_by(piece.member.index)

    def taken_by(self, index: int) -> Tensor:
        """The same, by the number of the matrix parameter."""
        return (self.values[0] * self.active[index]) > 0


def prepare(
    batch: Batch, pieces: Sequence[Piece], grads: Sequence[Tensor], buffers: Sequence[Tensor], control: Control
) -> Tensor:
    """Updates the momentum and returns the normalised updates, (local blocks, rows, cols), in the working dtype.

    grads and buffers hold the blocks (count, rows, cols) of each piece, as stored.
    """
    local = sum(piece.count for piece in pieces)
    device = control.values.device
    X = torch.empty(local, batch.rows, batch.cols, dtype=wide_dtype(batch.dtype), device=device)
    for piece, grad, buffer in zip(pieces, grads, buffers):
        block = X[piece.local : piece.local + piece.count]
        update = _move(piece, grad, buffer, control, torch.empty_like(buffer) if piece.member.flipped else block)
        if batch.options.nesterov:
            update.addcmul_(buffer, control.hyper[piece.member.group, MOMENTUM])
        else:
            update.copy_(buffer)
        if piece.member.flipped:
            block.copy_(update.mT)
        if batch.options.equilibrate:
            equilibrate(X, piece)
    return normalize(X, working_dtype(X), overwrite=True) if local else X.to(working_dtype(X))


def follow(pieces: Sequence[Piece], grads: Sequence[Tensor], buffers: Sequence[Tensor], control: Control) -> None:
    """Updates the momentum as `prepare` does, for blocks that other ranks own."""
    for piece, grad, buffer in zip(pieces, grads, buffers):
        _move(piece, grad, buffer, control, torch.empty_like(buffer))


def _move(piece: Piece, grad: Tensor, buffer: Tensor, control: Control, out: Tensor) -> Tensor:
    """Updates the momentum of a piece. Returns the scaled gradient, in `out`."""
    taken = control.taken(piece)
    out.copy_(grad).mul_(control.values[1]).masked_fill_(~taken, 0.0)
    buffer.mul_(torch.where(taken, control.hyper[piece.member.group, MOMENTUM], 1.0)).add_(out)
    return out


def equilibrate(X: Tensor, piece: Piece) -> None:
    """MuonEq-R (2026), in place: divides each neuron's row of the update by its norm, so that all weigh the same in the
    polar factor. A row of zeros stays."""
    for start, count, dim in _runs(piece):
        block = X[piece.local + start : piece.local + start + count]
        block.div_(torch.linalg.vector_norm(block, dim=dim, keepdim=True) + NORM_EPS)


def normalize_rows(X: Tensor, pieces: Sequence[Piece], moments: Sequence[Tensor], control: Control) -> None:
    """NorMuon (Li et al. 2025), in place: divides each neuron's update by the root of its running mean square, and keeps
    the block's norm.

    A neuron is a row of the logical matrix. The norm cancels the mean of the moments, so that no bias correction is
    needed.
    """
    for piece, moment in zip(pieces, moments):
        for start, count, dim in _runs(piece):
            block = X[piece.local + start : piece.local + start + count]
            neurons = block.shape[-1] if dim == -2 else block.shape[-2]
            rows = moment[start : start + count, :neurons]
            block.copy_(divide_by_moment(block, rows, find_row_beta(piece.member, control), dim))


def find_row_beta(member: Member, control: Control) -> Tensor:
    """The decay of NorMuon's moments; 1 where the step is skipped."""
    return torch.where(control.taken_by(member.index), control.hyper[member.group, ROW_BETA], 1.0)


def divide_by_moment(
    block: Tensor, rows: Tensor, beta: Tensor, dim: int, sum_over_ranks: Callable[[Tensor], None] = lambda squares: None
) -> Tensor:
    """Updates the moments (count, neurons) of blocks, in place, and returns the normalised blocks, in the moments' dtype.

    If a rank has some of the neurons only, `sum_over_ranks` sums squared norms in place.
    """
    wide = block.to(rows.dtype)
    squares = wide.square().mean(dim=dim, keepdim=True)
    rows.copy_(torch.lerp(squares.view_as(rows), rows, beta))
    scaled = wide * (rows.view_as(squares) + 1e-10).rsqrt()  # 1e-10: a neuron that never moved stays at zero
    norms = torch.stack([(tensor * tensor).sum(dim=(-2, -1), keepdim=True) for tensor in (wide, scaled)])
    sum_over_ranks(norms)
    before, after = norms.sqrt()
    return scaled * (before / (after + 1e-10))


def _runs(piece: Piece) -> list[tuple[int, int, int]]:
    """(start, count, dimension to average over) for neighbouring blocks of a piece whose neurons have the same
    orientation."""
    runs: list[tuple[int, int, int]] = []
    for number in range(piece.count):
        # Stored upright, a neuron is a row, and its elements run along the last dimension.
        dim = -2 if piece.member.flipped != piece.member.transposed[piece.block + number] else -1
        if runs and runs[-1][2] == dim:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, dim)
        else:
            runs.append((number, 1, dim))
    return runs


def apply(
    batch: Batch,
    updates: Tensor,
    params: Sequence[Tensor],
    low_bits: Sequence[Tensor | None],
    scales: Tensor,
    control: Control,
) -> None:
    """Decays the weights and subtracts the updates (all slots, rows, cols). params are blocks (count, rows, cols), as stored."""
    for member, param, low in zip(batch.members, params, low_bits):
        lr = torch.where(control.taken_by(member.index), control.hyper[member.group, LR], 0.0)
        rate = lr * control.hyper[member.group, DECAY]
        update = updates[member.first : member.first + member.count]
        update = (update.mT if member.flipped else update).to(wide_dtype(param.dtype))
        weight = param if low is None else join_master(param, low)
        if batch.cautious:
            weight.sub_(weight * (rate * (update * weight > 0)))
        else:
            weight.mul_(1 - rate)
        weight.addcmul_(update, lr * scales[member.first : member.first + member.count].view(-1, 1, 1), value=-1)
        if low is not None:
            split_master(weight, param, low)
