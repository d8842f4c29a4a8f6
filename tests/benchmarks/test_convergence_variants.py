"""AdaMuon and SOAP-Muon of the benchmark follow their definitions, and QK-clip acts there."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn

from parbank import orthogonalize


@pytest.fixture
def variants(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("convergence_variants")


def _steps(optimizer: torch.optim.Optimizer, param: nn.Parameter, count: int) -> list[torch.Tensor]:
    grads = [torch.randn(param.shape, generator=torch.Generator().manual_seed(n)) for n in range(count)]
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return grads


def test_adamuon_follows_its_definition(variants: ModuleType) -> None:
    param = nn.Parameter(torch.zeros(6, 10))
    grads = _steps(variants.AdaMuon([param], 0.1), param, 3)
    weight, mean, square = torch.zeros(6, 10), torch.zeros(6, 10), torch.zeros(6, 10)
    for grad in grads:
        mean = 0.95 * mean + grad
        polar = orthogonalize(mean.sign())
        square = 0.95 * square + 0.05 * polar**2
        update = polar / square.sqrt()
        weight -= 0.1 * 0.2 * (6 * 10) ** 0.5 * update / update.norm()  # 0.2 per number
    torch.testing.assert_close(param.detach(), weight, rtol=1e-4, atol=1e-5)


def test_soap_muon_orthogonalises_adam_in_the_eigenbases(variants: ModuleType) -> None:
    param = nn.Parameter(torch.zeros(5, 5))  # square: bases of full rank are unique up to signs
    first, second = _steps(variants.SoapMuon([param], 0.1), param, 2)
    left, right = (torch.linalg.eigh(square).eigenvectors for square in (first @ first.T, first.T @ first))
    mean = 0.95 * 0.05 * first + 0.05 * second
    square = 0.05 * (left.T @ second @ right) ** 2
    turned = (left.T @ mean @ right) / square.sqrt()
    expected = -0.1 * 0.2 * 5**0.5 * orthogonalize(left @ turned @ right.T)
    torch.testing.assert_close(param.detach(), expected, rtol=1e-3, atol=1e-4)


def test_the_clip_bounds_the_logits_that_are_reported(variants: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    text = torch.arange(3000) % 7
    monkeypatch.setattr(variants, "read_text", lambda files: text)
    monkeypatch.setitem(variants.VARIANTS, "low", variants.Variant(threshold=1e-3, factor=1.0))
    free, clipped = (variants.train(name, "tiny", 0.1, 0.01, 0) for name in ("Muon", "low"))
    assert 0.0 < clipped[1] < free[1]
    assert variants.train("AdaMuon", "tiny", 0.1, 0.01, 0)[1] == 0.0
