"""Exclusive self-attention's projection, held against the reference."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from aot import Job, build
from checking import assert_as_exact_as_torch, assert_end_matches, assert_matches, assert_same_bits
from torch import Tensor

from parbank.errors import ParbankError
from parbank.ops import configs, reference, remove_own_value
from parbank.ops.exclusive import MAX_WIDTH


def made(
    batch: int, time: int, kv: int, group: int, width: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """y and v."""
    return [torch.randn(batch, time, heads, width, device=device).to(dtype) for heads in (kv * group, kv)]


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 1, 1),
        (2, 7, 1, 3, 12),
        (3, 33, 2, 2, 64),
        (1, 127, 3, 1, 8),
        (2, 5, 5, 3, 80),
        (1, 3, 1, 8, 1023),
        (1, 2, 2, 2, MAX_WIDTH),
        (2, 0, 2, 2, 8),
        (0, 3, 2, 2, 8),
        (2, 3, 2, 0, 8),
        (2, 3, 2, 2, 0),
    ],
)
def test_matches_the_reference(sizes, dtype, device, poison):
    assert_matches(remove_own_value, reference.remove_own_value, made(*sizes, dtype, device))


def test_what_it_computes(device):
    """Two heads and one value: a half of each along it, and what is across it stays."""
    y = torch.tensor([[1.0, 5.0], [-3.0, 2.0]], device=device).view(1, 1, 2, 2)
    v = torch.tensor([2.0, 0.0], device=device).view(1, 1, 1, 2)
    assert remove_own_value(y, v).view(2, 2).tolist() == [[0.0, 5.0], [0.0, 2.0]]


def test_the_share_is_not_rounded_before_it_is_used(device):
    """One rounding, of the result: z is the float64 answer in the dtype, but for the few where float32 falls to the other side."""
    y, v = made(2, 50, 2, 2, 64, torch.float16, device)
    exact = reference.remove_own_value(y.double(), v.double()).half()
    for op in (remove_own_value, reference.remove_own_value):
        assert (op(y, v) == exact).float().mean() > 0.99


def test_views_with_gaps_and_transposed_gradients(device, poison):
    """The values as the last heads of a packed row; y and the gradient as attention has them, with time inside the heads."""

    def through(op):
        def call(row: Tensor, y: Tensor) -> Tensor:
            return op(y.transpose(1, 2), row[:, :, 3:]).transpose(1, 2)

        return call

    row, y = torch.randn(2, 5, 5, 8, device=device), torch.randn(2, 6, 5, 8, device=device)
    assert_matches(through(remove_own_value), through(reference.remove_own_value), [row, y])


def test_strided_channels_are_copied(device, poison):
    def through(op):
        return lambda y, v: op(y[:, 1:, :, ::2], v[:, 1:, :, ::2]).permute(3, 2, 1, 0)

    assert_matches(
        through(remove_own_value), through(reference.remove_own_value), made(2, 4, 2, 3, 12, torch.float32, device)
    )


def test_a_gradient_that_is_one_number(device):
    y, v = made(1, 3, 2, 2, 8, torch.float32, device)
    found, expected = (
        torch.autograd.grad(op(*leaves).sum(), leaves)
        for op in (remove_own_value, reference.remove_own_value)
        for leaves in [[y.clone().requires_grad_(), v.clone().requires_grad_()]]
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("wanted", [0, 1])
def test_only_the_gradient_that_is_asked_for(wanted, dtype, device, poison):
    inputs = made(1, 5, 2, 2, 8, dtype, device)
    of = inputs[wanted]

    def through(op):
        return lambda leaf: op(*(leaf if x is of else x.to(leaf.dtype) for x in inputs))

    assert_matches(through(remove_own_value), through(reference.remove_own_value), [of])


def test_zero_values_take_nothing_out(dtype, device, poison):
    y, v = made(2, 5, 2, 2, 8, dtype, device)
    v[:, ::2] = 0
    assert_matches(remove_own_value, reference.remove_own_value, [y, v])
    leaves = [y.requires_grad_(), v.requires_grad_()]
    z = remove_own_value(*leaves)
    assert torch.equal(z[:, ::2], y[:, ::2])
    dy, dv = torch.autograd.grad(z.sum(), leaves)
    assert torch.equal(dy[:, ::2], torch.ones_like(dy[:, ::2]))
    assert dv.isfinite().all()
    assert not dv[:, ::2].any()


def test_values_under_the_floor(device, poison):
    """Shorter than the floor's root, the squared length has no gradient: the term of it would be as large as the others."""
    y, v = made(2, 5, 2, 2, 8, torch.float32, device)
    v[:, ::2] = 3e-7 * v[:, ::2].sign()
    assert_matches(remove_own_value, reference.remove_own_value, [y, v])


def test_heads_too_wide_for_registers_take_the_reference(device):
    y, v = made(1, 2, 1, 2, MAX_WIDTH + 1, torch.float32, device)
    torch.testing.assert_close(remove_own_value(y, v), reference.remove_own_value(y, v), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("y", "v"),
    [
        ((2, 3, 4), (2, 3, 2, 8)),
        ((2, 3, 4, 8), (2, 3, 8)),
        ((2, 3, 4, 8), (2, 3, 3, 8)),
        ((2, 3, 4, 8), (2, 3, 8, 8)),
        ((2, 3, 4, 8), (2, 3, 0, 8)),
        ((2, 3, 4, 8), (2, 3, 2, 4)),
        ((2, 3, 4, 8), (2, 4, 2, 8)),
        ((2, 3, 4, 8), (1, 3, 2, 8)),
    ],
)
def test_wrong_shapes_are_named(y, v, device):
    with pytest.raises(ParbankError, match="heads a multiple of kv_heads") as caught:
        remove_own_value(torch.randn(y, device=device), torch.randn(v, device=device))
    assert str(y) in str(caught.value)
    assert str(v) in str(caught.value)


def test_two_dtypes_are_named(device):
    y, v = made(2, 3, 2, 2, 8, torch.float32, device)
    with pytest.raises(ParbankError, match=r"y is torch.float32 .* v torch.float16 .* of one dtype"):
        remove_own_value(y, v.half())


def test_reference_gradients():
    y, v = (x.requires_grad_() for x in made(1, 3, 2, 2, 3, torch.float64, torch.device("cpu")))
    assert torch.autograd.gradcheck(reference.remove_own_value, (y, v))
    assert torch.autograd.gradgradcheck(reference.remove_own_value, (y, v))


@pytest.mark.slow
def test_every_config_compiles_without_spills():
    strides = [f"{name}_{axis}" for name in ("dz", "y", "v") for axis in "bth"]
    counts = dict.fromkeys(("tokens", "time", *strides), "i32") | {"floor": "fp32"}
    ways = {"remove_own_value": {}, "remove_own_value_backward": {"FOR_Y": True, "FOR_V": True}}
    jobs = []
    for op, arch, kind in product(ways, configs.ARCHITECTURES, ("bf16", "fp32")):
        rows = configs.tables()[op][arch]
        for block in (64, *(limit for limit, _ in rows)):
            launch = next(launch for limit, launch in rows if block <= limit)
            tile = {"WIDTH": block, "BLOCK_D": block, "ROWS": max(1, launch.blocks["TILE"] // block)}
            job = Job(
                f"parbank.ops.exclusive:_{op}_kernel",
                dict.fromkeys(("y", "v", "z", "dz", "dy", "dv"), f"*{kind}") | counts,
                {"KV_HEADS": 4, "GROUP": 2, **tile, **ways[op]},
                configs.ARCHITECTURES[arch],
                launch.num_warps,
                launch.num_stages,
            )
            jobs.append(job)
            if arch == "sm90":  # more heads, and sizes and starts that divide by nothing
                jobs.append(replace(job, constexprs={**job.constexprs, "GROUP": 5, "WIDTH": block - 1}, aligned=()))
    for job, built in zip(jobs, build(jobs), strict=True):
        assert built.shared <= configs.SHARED_LIMIT[f"sm{job.capability}"], job
        assert job.capability != 90 or built.stack == 0, job


@pytest.mark.gpu
def test_as_exact_as_torch(dtype, device):
    for sizes in ((3, 501, 4, 2, 64), (2, 101, 3, 3, 80)):
        assert_as_exact_as_torch(remove_own_value, reference.remove_own_value, made(*sizes, dtype, device))


@pytest.mark.gpu
def test_same_bits_every_time(device):
    assert_same_bits(remove_own_value, made(4, 2048, 4, 2, 64, torch.bfloat16, device))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    inputs = [torch.randn(2**11 + 1, 2048, heads, 64, device=device, dtype=torch.bfloat16) for heads in (16, 8)]
    assert_end_matches(remove_own_value, reference.remove_own_value, inputs, 1)
