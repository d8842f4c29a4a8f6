"""What scoring uses of the ops, without gradients; and that a choice of backend ends with its block."""

import dataclasses

import pytest
import torch

from parbank.ops import backend, linear_softcap_cross_entropy, reference, softcap_cross_entropy


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_losses_without_a_gradient_leave_ignored_tokens_out(reduction: str, device: torch.device) -> None:
    """A path of its own: there is no gradient to make in passing."""
    x, weight = torch.randn(2, 5, 8, device=device), torch.randn(33, 8, device=device)
    targets = torch.randint(33, (2, 5), device=device)
    targets[0, 1:4] = -100
    with torch.no_grad():
        found = linear_softcap_cross_entropy(x, weight, targets, 15.0, reduction=reduction)
        plain = softcap_cross_entropy(x @ weight.T, targets, 15.0, reduction=reduction)
        expected = reference.linear_softcap_cross_entropy(x, weight, targets, 15.0, reduction=reduction)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["triton", "reference"])
def test_everything_is_as_it_was_after_a_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the kernels run by default, and a tensor they do not take falls back without an error."""
    monkeypatch.setattr(backend, "_state", backend._State(active="triton", strict=False))
    before = dataclasses.replace(backend._state)
    with backend.use_backend(name):
        assert backend._state != before
    assert backend._state == before
    assert not backend.use_triton(torch.zeros(2, dtype=torch.float64))
