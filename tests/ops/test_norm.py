"""RMS norm, alone and behind the residual sum and the residual mix, held against the reference."""

import pytest
import torch
from aot import Job, build
from checking import assert_as_exact_as_torch, assert_matches, assert_same_bits

from parbank.errors import ParbankError
from parbank.ops import add_rms_norm, configs, mix_rms_norm, reference, rms_norm
from parbank.ops.mix import MAX_WIDTH as MAX_MIX_WIDTH
from parbank.ops.norm import MAX_WIDTH

SHAPES = [(1, 1), (7, 127), (2, 3, 7), (1, 1023), (0, 8), (13,)]


def mix_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    x, x0 = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    return [x, x0, *(torch.randn(shape[-1], device=device) for _ in range(2))]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_norm_matches_the_reference(shape, weighted, dtype, device, poison):
    x = torch.randn(shape, device=device).to(dtype)
    weight = torch.randn(shape[-1], device=device) if weighted else None
    assert_matches(lambda x, w: rms_norm(x, w, 0.7), lambda x, w: reference.rms_norm(x, w, 0.7), [x, weight])


@pytest.mark.parametrize("shape", SHAPES)
def test_mix_matches_the_reference(shape, dtype, device, poison):
    inputs = mix_inputs(shape, dtype, device)
    assert_matches(lambda *i: mix_rms_norm(*i, 0.7), lambda *i: reference.mix_rms_norm(*i, 0.7), inputs)


@pytest.mark.parametrize("shape", SHAPES)
def test_sum_matches_the_reference(shape, dtype, device, poison):
    inputs = [torch.randn(shape, device=device).to(dtype) for _ in range(2)]
    assert_matches(lambda *i: add_rms_norm(*i, 0.7), lambda *i: reference.add_rms_norm(*i, 0.7), inputs)


def test_rows_are_split_over_programs(device, poison):
    """More rows than programs hold at once: each walks several tiles, the last one partly filled."""
    inputs = [torch.randn(101, 24, device=device), torch.randn(24, device=device)]
    assert_matches(rms_norm, reference.rms_norm, inputs)
    assert_matches(mix_rms_norm, reference.mix_rms_norm, mix_inputs((101, 24), torch.float32, device))


def test_non_contiguous_input(device):
    wide = torch.randn(5, 64, device=device)
    assert_matches(lambda x: rms_norm(x[:, ::2]), lambda x: reference.rms_norm(x[:, ::2]), [wide])
    assert_matches(lambda x: rms_norm(x[:, :31]), lambda x: reference.rms_norm(x[:, :31]), [wide])
    assert_matches(lambda x: rms_norm(x.t()), lambda x: reference.rms_norm(x.t()), [wide])
    assert_matches(
        lambda x: add_rms_norm(x[:, :32], x[:, 32:]), lambda x: reference.add_rms_norm(x[:, :32], x[:, 32:]), [wide]
    )
    assert_matches(
        lambda x, a, b: mix_rms_norm(x[:, :32], x[:, 32:], a, b),
        lambda x, a, b: reference.mix_rms_norm(x[:, :32], x[:, 32:], a, b),
        [wide, torch.randn(32, device=device), torch.randn(32, device=device)],
    )


def test_gains_that_are_columns_of_a_parameter(device):
    gains = torch.randn(16, 2, device=device)
    x, x0 = torch.randn(5, 16, device=device), torch.randn(5, 16, device=device)
    assert_matches(lambda x, g: rms_norm(x, g[:, 1]), lambda x, g: reference.rms_norm(x, g[:, 1]), [x, gains])
    assert_matches(
        lambda x, y, g: mix_rms_norm(x, y, g[:, 0], g[:, 1]),
        lambda x, y, g: reference.mix_rms_norm(x, y, g[:, 0], g[:, 1]),
        [x, x0, gains],
    )


@pytest.mark.parametrize("index", [0, 1])
def test_one_of_the_two_results_may_go_unused(index, device):
    inputs = mix_inputs((9, 16), torch.float32, device)
    assert_matches(lambda *i: mix_rms_norm(*i)[index], lambda *i: reference.mix_rms_norm(*i)[index], inputs)
    assert_matches(lambda *i: add_rms_norm(*i)[index], lambda *i: reference.add_rms_norm(*i)[index], inputs[:2])


def test_a_zero_row_stays_zero(device):
    x = torch.zeros(3, 8, device=device, requires_grad=True)
    y = rms_norm(x)
    assert not y.any()
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def test_rows_too_long_for_registers_take_the_reference(device):
    x = torch.randn(2, MAX_WIDTH + 1, device=device)
    torch.testing.assert_close(rms_norm(x), reference.rms_norm(x), rtol=0, atol=0)
    torch.testing.assert_close(add_rms_norm(x, x), reference.add_rms_norm(x, x), rtol=0, atol=0)
    vector = torch.ones(MAX_MIX_WIDTH + 1, device=device)
    x = x[:, : MAX_MIX_WIDTH + 1]
    torch.testing.assert_close(mix_rms_norm(x, x, vector, vector), reference.mix_rms_norm(x, x, vector, vector))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: rms_norm(x, torch.ones(5, device=x.device)), r"weight has shape \(5,\).*shape \(8,\)"),
        (lambda x: rms_norm(x.long()), "floating point"),
        (lambda x: rms_norm(x.double()), "float64"),
        (lambda x: mix_rms_norm(x, x[:2], x[0], x[0]), "x0 is .*must agree"),
        (lambda x: add_rms_norm(x, x[:2]), "y is .*must agree"),
        (lambda x: mix_rms_norm(x, x.half(), x[0], x[0]), "x0 is torch.float16"),
        (lambda x: mix_rms_norm(x, x, x[0, :3], x[0]), r"a has shape \(3,\)"),
    ],
)
def test_wrong_arguments_are_named(call, said, device):
    with pytest.raises(ParbankError, match=said):
        call(torch.randn(4, 8, device=device))


def test_reference_gradients():
    x, x0 = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    a, b = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, w: reference.rms_norm(x, w, 0.5), (x, a))
    assert torch.autograd.gradcheck(lambda *i: reference.add_rms_norm(*i, 0.5), (x, x0))
    assert torch.autograd.gradcheck(lambda *i: reference.mix_rms_norm(*i, 0.5), (x, x0, a, b))


def norm_jobs(arch: str) -> list[Job]:
    pointers = {"x": "*bf16", "y": "*bf16", "dy": "*bf16", "dx": "*bf16", "weight": "*fp32", "inverse": "*fp32"}
    pointers |= {"x0": "*bf16", "dx0": "*bf16", "m": "*bf16", "dm": "*bf16", "a": "*fp32", "b": "*fp32"}
    pointers |= {"partial": "*fp32", "partial_a": "*fp32", "partial_b": "*fp32"}
    pointers |= {"addend": "*bf16", "straight": "*bf16", "total": "*bf16"}
    numbers = {"rows": "i32", "scale": "fp32", "eps": "fp32"}
    numbers |= {f"stride_{name}": "i32" for name in ("x", "x0", "dy", "dm", "addend", "straight")}
    kernels = {
        "rms_norm": "norm:_norm_forward_kernel",
        "rms_norm_backward": "norm:_norm_backward_kernel",
        "add_rms_norm": "norm:_norm_forward_kernel",
        "add_rms_norm_backward": "norm:_norm_backward_kernel",
        "mix_rms_norm": "mix:_mix_norm_forward_kernel",
        "mix_rms_norm_backward": "mix:_mix_norm_backward_kernel",
    }
    jobs = []
    for op, kernel in kernels.items():
        for width, launch in configs.tables()[op][arch]:
            constexprs = {"WIDTH": width * 3 // 4, **launch.blocks}
            if not op.startswith("mix"):
                constexprs |= {"WEIGHTED": not op.startswith("add"), "ADDED": op.startswith("add")}
            jobs.append(
                Job(
                    f"parbank.ops.{kernel}",
                    pointers | numbers,
                    constexprs,
                    configs.ARCHITECTURES[arch],
                    launch.num_warps,
                    launch.num_stages,
                )
            )
    return jobs


@pytest.mark.slow
def test_every_config_compiles_without_spills():
    jobs = [job for arch in configs.ARCHITECTURES for job in norm_jobs(arch)]
    for job, built in zip(jobs, build(jobs), strict=True):
        assert built.shared <= configs.SHARED_LIMIT[f"sm{job.capability}"], job
        assert job.capability != 90 or built.stack == 0, job


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 512), (999, 1536)])
def test_as_exact_as_torch(shape, dtype, device):
    x = torch.randn(shape, device=device).to(dtype)
    assert_as_exact_as_torch(rms_norm, reference.rms_norm, [x, torch.randn(shape[-1], device=device)])
    assert_as_exact_as_torch(rms_norm, reference.rms_norm, [x, None])
    assert_as_exact_as_torch(mix_rms_norm, reference.mix_rms_norm, mix_inputs(shape, dtype, device))
    assert_as_exact_as_torch(add_rms_norm, reference.add_rms_norm, mix_inputs(shape, dtype, device)[:2])


@pytest.mark.gpu
def test_same_bits_every_time(device):
    inputs = mix_inputs((8192, 512), torch.bfloat16, device)
    assert_same_bits(mix_rms_norm, inputs)
    assert_same_bits(add_rms_norm, inputs[:2])
    assert_same_bits(rms_norm, [inputs[0], inputs[2]])


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    x = torch.randn(2**22 + 3, 512, device=device, dtype=torch.bfloat16)
    y = rms_norm(x)
    torch.testing.assert_close(y[-3:], reference.rms_norm(x[-3:]), rtol=2e-2, atol=2e-2)
