"""The kernel of GPTQ gives the integers and errors of its plain definition, to the last bit."""

import pytest
import torch
from torch import Tensor

from parbank.ops.backend import HAS_TRITON, INTERPRETED, use_backend
from parbank.quant.gptq import factorise, round_bank
from tests.ops.aot import Job, build

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
can_run = pytest.mark.skipif(
    not HAS_TRITON or not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or Triton's interpreter"
)


def make_bank(n: int, rows: int, cols: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights, scales, Hessians and prices: some rows are dropped, and some weights are far beyond the range."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2 * cols, cols, generator=generator) + torch.randn(n, 2 * cols, 1, generator=generator)
    weights = torch.randn(n, rows, cols, generator=generator)
    weights[:, 0, 0] = 1e6
    weights[:, -1] = 0
    scales = 0.1 * torch.rand(n, rows, 1, generator=generator).half()
    scales[:, rows // 2] = 0
    prices = torch.rand(n, rows, 128, generator=generator)
    return weights, scales, x.mT @ x / len(x), prices


@can_run
@pytest.mark.parametrize(("n", "rows", "cols"), [(1, 1, 1), (2, 33, 20), (1, 40, 130)])
@pytest.mark.parametrize("priced", [False, True])
@pytest.mark.parametrize("q", [7, 127])
def test_the_kernel_gives_the_same_bits(n: int, rows: int, cols: int, priced: bool, q: int) -> None:
    weights, scales, hessians, prices = (x.to(DEVICE) for x in make_bank(n, rows, cols, seed=cols))
    factors = factorise(hessians)
    found = []
    for backend in ("reference", "triton"):
        with use_backend(backend):
            found.append(round_bank(weights, scales, q, factors, prices[:, :, : q + 1] if priced else None))
    (values, error), (fused, fused_error) = found
    assert torch.equal(values, fused)
    assert torch.equal(error, fused_error)
    assert rows == 1 or values.unique().numel() > 3


@can_run
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(22, 512, 512), (11, 512, 1536)])
def test_the_kernel_gives_the_same_bits_at_full_size(shape: tuple[int, int, int]) -> None:
    test_the_kernel_gives_the_same_bits(*shape, priced=True, q=127)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_it_compiles_for_every_architecture_without_spills() -> None:
    signature = dict.fromkeys(("work", "errors", "scales", "table", "upper", "curvature"), "*fp32")
    signature |= {"values": "*i8", "q": "fp32"}
    signature |= dict.fromkeys(("rows", "cols", "first", "width", "entries"), "i32")
    constants = {"PRICED": True, "BLOCK": 64, "ROWS": 32}
    name = "parbank.quant.kernels:_round_block_kernel"
    options = {"enable_fp_fusion": False}
    cards = (80, 89, 90, 100, 120)
    for built in build([Job(name, signature, constants, card, options=options) for card in cards]):
        assert built.stack == 0
        assert built.registers <= 168
