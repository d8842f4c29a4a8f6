"""LeakyReLU squared, held against the reference."""

import pytest
import torch
from aot import Job, build
from checking import assert_as_exact_as_torch, assert_end_matches, assert_matches, assert_same_bits

from parbank.errors import ParbankError
from parbank.ops import configs, leaky_relu_squared, reference


def ours(x: torch.Tensor) -> torch.Tensor:
    return leaky_relu_squared(x, 0.3)


def plain(x: torch.Tensor) -> torch.Tensor:
    return reference.leaky_relu_squared(x, 0.3)


@pytest.mark.parametrize("shape", [(), (1,), (7, 127), (3, 1023), (2, 0)])
def test_matches_the_reference(shape, dtype, device, poison):
    assert_matches(ours, plain, [torch.randn(shape, device=device).to(dtype)])


def test_several_programs_and_strides(device, poison):
    assert_matches(ours, plain, [torch.randn(9001, device=device)])
    assert_matches(lambda x: ours(x.t()[::2]), lambda x: plain(x.t()[::2]), [torch.randn(6, 10, device=device)])


def test_zero_has_no_slope(device):
    x = torch.tensor([0.0, -0.0], device=device, requires_grad=True)
    assert torch.autograd.grad(ours(x).sum(), x)[0].tolist() == [0.0, 0.0]


def test_one_tensor_is_saved(device):
    x = torch.randn(64, device=device, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours(x)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


def test_integers_are_refused(device):
    with pytest.raises(ParbankError, match=r"int64.*floating point"):
        ours(torch.ones(3, dtype=torch.int64, device=device))


def test_reference_gradients():
    x = torch.randn(20, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(plain, (x,))


@pytest.mark.slow
def test_every_config_compiles_without_spills():
    jobs = []
    for arch, capability in configs.ARCHITECTURES.items():
        for op, kernel in (
            ("leaky_relu_squared", "_leaky_forward_kernel"),
            ("leaky_relu_squared_backward", "_leaky_backward_kernel"),
        ):
            for _, launch in configs.tables()[op][arch]:
                signature = dict.fromkeys(("x", "y", "dy", "dx"), "*bf16") | {"count": "i64", "slope": "fp32"}
                jobs.append(
                    Job(f"parbank.ops.activation:{kernel}", signature, launch.blocks, capability, launch.num_warps)
                )
    for job, built in zip(jobs, build(jobs), strict=True):
        assert built.stack == 0, job


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_as_exact_as_torch(dtype, device):
    assert_as_exact_as_torch(ours, plain, [torch.randn(3000, 1023, device=device).to(dtype)])


@pytest.mark.gpu
def test_same_bits_every_time(device):
    assert_same_bits(ours, [torch.randn(1 << 20, device=device)])


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    assert_end_matches(ours, plain, [torch.randn(2**31 + 77, device=device, dtype=torch.bfloat16)], 77)
