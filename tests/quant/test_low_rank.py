"""The correction is the best of its rank in the norm that counts."""

import torch

from parbank.quant.low_rank import correct


def weighted(error: torch.Tensor, hessian: torch.Tensor, sensitivity: torch.Tensor) -> float:
    return float((sensitivity * ((error @ hessian) * error).sum(1)).sum())


def test_the_correction_is_the_truncated_svd_of_the_weighted_error() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 24, generator=generator) @ torch.randn(24, 24, generator=generator)
    hessian, sensitivity = x.T @ x / 200, torch.rand(16, generator=generator) + 0.1
    error = torch.randn(16, 24, generator=generator)
    tall, flat = correct(error[None], hessian[None], sensitivity[None], 4)
    assert tall.shape == (1, 16, 4)
    assert flat.shape == (1, 4, 24)
    assert tall.dtype == torch.float16
    left = weighted(error - tall[0].float() @ flat[0].float(), hessian, sensitivity)
    root = torch.linalg.cholesky(hessian.double())
    values = torch.linalg.svdvals(sensitivity.double().sqrt()[:, None] * error.double() @ root)
    best = float(values[4:].square().sum())
    assert best <= left <= 1.02 * best
    again = correct(error[None], hessian[None], sensitivity[None], 4)
    assert torch.equal(tall, again[0])
    assert torch.equal(flat, again[1])


def test_degenerate_errors_give_finite_factors() -> None:
    for error, hessian in ((torch.zeros(1, 8, 8), torch.eye(8)), (torch.ones(1, 8, 8), torch.zeros(8, 8))):
        tall, flat = correct(error, hessian[None], torch.zeros(1, 8), 3)
        assert tall.isfinite().all()
        assert flat.isfinite().all()
