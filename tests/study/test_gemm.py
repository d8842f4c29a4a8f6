"""The product of the study of kernels: right in the interpreter at odd shapes, and built for real cards."""

import pytest
import torch

from parbank.ops.backend import HAS_TRITON, INTERPRETED
from parbank.study.gemm import STAGES, TILES, WARPS, product
from tests.ops.aot import Job, build

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


@pytest.mark.skipif(not INTERPRETED, reason="interprets the kernel; set TRITON_INTERPRET=1")
@pytest.mark.parametrize(("rows", "cols", "depth"), [(1, 1, 1), (128, 256, 64), (300, 270, 130), (1300, 520, 65)])
def test_is_the_product(rows: int, cols: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, depth, generator=generator), torch.randn(cols, depth, generator=generator)
    torch.testing.assert_close(product(x, w), (x.double() @ w.double().T).float(), rtol=1e-4, atol=1e-4)


def test_is_built_for_real_cards() -> None:
    signature = {name: "*bf16" for name in "xwy"} | {name: "i32" for name in ("rows", "cols", "depth")}
    kernel = "parbank.study.gemm:product_kernel"
    jobs = [
        Job(kernel, signature, TILES, capability, num_warps=WARPS, num_stages=STAGES) for capability in (80, 90, 100)
    ]
    for job, built in zip(jobs, build(jobs), strict=True):
        assert built.stack == 0 or job.capability == 80, built  # an A100 has no tensor memory or warp-group products
        assert built.shared <= 163 * 1024, "what a block of the smallest card may take"
