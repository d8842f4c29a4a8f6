"""A head's rows: rare tokens must not become likely by rounding."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parbank.artifact.pack import pack_solved, unpack_tensors
from parbank.quant.bank import solve_exponential
from parbank.quant.calibration import Calibration
from parbank.quant.config import QuantConfig
from parbank.quant.solver import CannotFit

TOKENS, WIDTH = 600, 64
NAME = "head.weight"


def test_solves_the_exponential_equation() -> None:
    a = torch.logspace(-12, 12, 97, dtype=torch.float64)
    u = solve_exponential(a)
    torch.testing.assert_close(u * torch.exp(u), a, rtol=1e-9, atol=0)
    assert solve_exponential(torch.tensor([1e-9])).item() == pytest.approx(1e-9)


@pytest.fixture(scope="module")
def head() -> tuple[Tensor, Tensor]:
    """A head and its inputs, in which token r has about the share (1 + r)^-2, by all columns together."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(WIDTH, generator=generator).sign()
    rare = -2.0 * torch.log(1 + torch.arange(TOKENS).float())
    weight = 0.2 * torch.randn(TOKENS, WIDTH, generator=generator) + rare[:, None] * mean / WIDTH
    return weight, mean + torch.randn(4000, WIDTH, generator=generator)


def lost(
    head: tuple[Tensor, Tensor], cap: int, *, logits: bool, config: QuantConfig | None = None
) -> tuple[float, int]:
    """Nats a token that rounding to a cap costs, and how many rows became zero."""
    weight, x = head
    likely = torch.softmax(x @ weight.T, 1)
    calibration = Calibration(
        hessians={NAME: x.T @ x / len(x)},
        sensitivity={NAME: (likely * (1 - likely)).mean(0)},
        logits=frozenset([NAME] if logits else []),
        tokens=len(x),
    )
    packed = pack_solved({NAME: weight}, config or QuantConfig(), calibration, max_bytes=cap)
    assert 0.99 * cap <= packed.size <= cap
    found = unpack_tensors(packed.artifact)[NAME].float()
    before, after = (torch.log_softmax((x @ w.T).double(), 1) for w in (weight, found))
    return float((before.exp() * (before - after)).sum(1).mean()), int((~found.any(1)).sum())


@pytest.mark.parametrize(("cap", "share", "most"), [(24_000, 1.1, 2e-4), (12_000, 0.3, 6e-3), (8_000, 0.2, 0.1)])
def test_the_exponential_of_a_logit_counts(head: tuple[Tensor, Tensor], cap: int, share: float, most: float) -> None:
    """With many bits the second order is right, and nothing changes. With few bits it lets rows of rare tokens go."""
    (second_order, dropped), (found, kept) = (lost(head, cap, logits=flag) for flag in (False, True))
    assert found <= most
    assert found <= share * second_order
    assert kept == 0
    assert dropped > 0 or cap > 8_000


@pytest.mark.parametrize("cap", [12_000, 8_000])
def test_a_rotation_of_logits_is_chosen_by_the_exponential(head: tuple[Tensor, Tensor], cap: int) -> None:
    """With few bits the second order prefers a rotation that costs far more."""
    plain, _ = lost(head, cap, logits=True, config=QuantConfig(rotation=False))
    chosen, _ = lost(head, cap, logits=True)
    assert chosen <= 1.1 * plain


def test_a_file_that_only_fits_without_such_rows_is_still_made(head: tuple[Tensor, Tensor]) -> None:
    """`check_fits` promises a file in which every row is zero."""
    weight, _ = head
    calibration = Calibration(
        hessians={NAME: torch.eye(WIDTH)}, sensitivity={NAME: torch.full((TOKENS,), 1e-6)}, tokens=1
    )
    with pytest.raises(CannotFit) as failure:
        pack_solved({NAME: weight}, QuantConfig(), calibration, max_bytes=100)
    least = failure.value.smallest
    flagged = replace(calibration, logits=frozenset([NAME]))
    packed = pack_solved({NAME: weight}, QuantConfig(), flagged, max_bytes=least)
    assert packed.size == least
    assert not unpack_tensors(packed.artifact)[NAME].any()
