"""Smear, held against the reference."""

import pytest
import torch
from aot import Job, build
from checking import assert_as_exact_as_torch, assert_end_matches, assert_matches, assert_same_bits

from parbank.errors import ParbankError
from parbank.ops import configs, reference, smear
from parbank.ops.norm import fit_stages
from parbank.ops.smear import MAX_WIDTH


def made(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """x, gate, and starts of which a third are marked."""
    x, gate = torch.randn(shape, device=device).to(dtype), torch.rand(shape[-1], device=device)
    return [x, gate, torch.rand(shape[:2], device=device) < 0.3]


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 7, 5), (3, 1, 8), (1, 33, 127), (2, 3, 1023), (0, 4, 8), (2, 0, 8)])
def test_matches_the_reference(shape, dtype, device, poison):
    assert_matches(smear, reference.smear, made(shape, dtype, device))


def test_rows_are_split_over_programs(device, poison):
    """More rows than programs hold at once, windows that end inside a tile, and no start but the first of each."""
    x, gate, starts = made((7, 13, 24), torch.float32, device)
    assert_matches(smear, reference.smear, [x, gate, starts])
    assert_matches(smear, reference.smear, [x, gate, torch.zeros_like(starts)])
    first = (torch.arange(13, device=device) == 0).expand(7, 13)  # as the model makes it: rows that share their memory
    assert_matches(smear, reference.smear, [x, gate, first])


def test_non_contiguous_input(device):
    x, gate, starts = made((3, 6, 32), torch.float32, device)
    for part, rows in ((slice(0, 16), slice(0, 6)), (slice(0, 32, 2), slice(1, 6))):
        marks = starts[:, rows]
        assert_matches(
            lambda x, g: smear(x[:, rows, part], g, marks),  # noqa: B023
            lambda x, g: reference.smear(x[:, rows, part], g, marks),  # noqa: B023
            [x, gate[:16]],
        )


def test_what_it_computes(device):
    x = torch.tensor([1.0, 2.0, 4.0, 8.0], device=device).view(1, 4, 1)
    starts = torch.tensor([[False, False, True, False]], device=device)
    found = smear(x, torch.tensor([0.25], device=device), starts)
    torch.testing.assert_close(found.flatten().cpu(), torch.tensor([0.75, 1.75, 3.0, 7.0]))


def test_rows_too_long_for_registers_take_the_reference(device):
    inputs = made((1, 3, MAX_WIDTH + 1), torch.float32, device)
    torch.testing.assert_close(smear(*inputs), reference.smear(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, g, s: smear(x, g[:3], s), r"gate has shape \(3,\)"),
        (lambda x, g, s: smear(x[0], g, s), "must be"),
        (lambda x, g, s: smear(x, g, s[:, 1:]), "must be"),
        (lambda x, g, s: smear(x, g, s.float()), "starts torch.float32"),
    ],
)
def test_wrong_arguments_are_named(call, said, device):
    with pytest.raises(ParbankError, match=said):
        call(*made((2, 4, 8), torch.float32, device))


def test_reference_gradients():
    x, gate, starts = made((2, 4, 3), torch.float64, torch.device("cpu"))
    gate = gate.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, g: reference.smear(x, g, starts), (x.requires_grad_(), gate))


@pytest.mark.slow
def test_every_config_compiles_without_spills():
    signature = {"gate": "*fp32", "partial": "*fp32", "starts": "*u8"}
    signature |= dict.fromkeys(("rows", "time", "stride_x", "stride_dy"), "i32")
    jobs = [
        Job(
            f"parbank.ops.smear:_smear_{way}_kernel",
            signature | dict.fromkeys(("x", "y", "dy", "dx"), f"*{kind}"),
            {"WIDTH": width * 3 // 4, **(fit_stages(launch, 4 * size, arch) if way == "backward" else launch).blocks},
            configs.ARCHITECTURES[arch],
            launch.num_warps,
            launch.num_stages,
        )
        for way, op in (("forward", "smear"), ("backward", "smear_backward"))
        for arch in configs.ARCHITECTURES
        for width, launch in configs.tables()[op][arch]
        for kind, size in (("bf16", 2), ("fp32", 4))
    ]
    for job, built in zip(jobs, build(jobs), strict=True):
        assert built.shared <= configs.SHARED_LIMIT[f"sm{job.capability}"], job
        assert job.capability != 90 or built.stack == 0, job


@pytest.mark.gpu
def test_as_exact_as_torch(dtype, device):
    assert_as_exact_as_torch(smear, reference.smear, made((8, 512, 512), dtype, device))


@pytest.mark.gpu
def test_same_bits_every_time(device):
    assert_same_bits(smear, made((8, 1024, 512), torch.bfloat16, device))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    x = torch.randn(2**11 + 1, 2048, 512, device=device, dtype=torch.bfloat16)
    gate, starts = torch.rand(512, device=device), torch.rand(x.shape[:2], device=device) < 0.3
    assert_end_matches(smear, reference.smear, [x, gate, starts], 1)
