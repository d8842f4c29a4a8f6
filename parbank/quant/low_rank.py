"""Low-rank factors in float16 (LQER, Zhang et al. 2024): the directions of weights, or of a quantisation error, that
cost the most loss.
"""

import torch
from torch import Tensor

_EXTRA = 8  # directions carried beside those kept: subspace iteration converges by the gap behind them
_ROUNDS = 6  # each squares the ratio of kept to dropped singular values


def correct(
    error: Tensor, hessians: Tensor, sensitivity: Tensor, rank: int, *, damping: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Factors (N, rows, r), (N, r, cols) in float16 whose product is nearest to the error W - W_hat (N, rows, cols) in

        sum_r g_r e_r H e_r^T = | diag(sqrt(g)) E S |^2,      H = S S^T.

    The best product is the truncated SVD of diag(sqrt(g)) E S, carried back by the inverses of both weights. Its leading
    directions come from subspace iteration from a fixed start: the same factors every time.
    """
    n, rows, cols = error.shape
    rank = min(rank, rows, cols)
    wide = hessians.double()
    level = wide.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(torch.float32).tiny)
    damped = wide + damping * level[:, None, None] * torch.eye(cols, dtype=wide.dtype, device=wide.device)
    root = torch.linalg.cholesky(damped)
    weight = sensitivity.double().clamp(min=torch.finfo(torch.float32).tiny).sqrt()[:, :, None]
    weighted = weight * error.double() @ root
    width = min(rank + _EXTRA, rows, cols)
    start = torch.randn(cols, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(error.device)
    basis = start.expand(n, cols, width)
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(weighted.mT @ (weighted @ basis)).Q
    left, values, right = torch.linalg.svd(weighted @ basis, full_matrices=False)
    tall = left[:, :, :rank] * values[:, None, :rank] / weight
    flat = torch.linalg.solve_triangular(root, right[:, :rank] @ basis.mT, upper=False, left=False)
    # both sides of a direction get the same largest value: far from float16's limits
    tiny = torch.finfo(torch.float64).tiny
    balance = (flat.abs().amax(2) / tall.abs().amax(1).clamp(min=tiny)).sqrt()
    live = (tall.abs().amax(1) > 0) & (balance > 0) & balance.isfinite()  # an error of rank below r leaves zeros
    balance = torch.where(live, balance, 1.0)
    flat = torch.where(live[:, :, None], flat / balance[:, :, None], 0.0)
    return _to_half(tall * (balance * live)[:, None, :]), _to_half(flat)


def _to_half(x: Tensor) -> Tensor:
    limit = torch.finfo(torch.float16).max
    return x.clamp(-limit, limit).half()
