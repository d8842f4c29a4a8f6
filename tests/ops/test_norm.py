"""RMS norm, alone and behind the residual sum and the residual mix, held against the reference."""

import pytest
import torch
from aot import Job, build
from checking import assert_as_exact_as_torch, assert_end_matches, assert_matches, assert_same_bits

from parbank.errors import ParbankError
from parbank.ops import add_mix_rms_norm, add_rms_norm, configs, mix_rms_norm, reference, rms_norm
from parbank.ops.mix import MAX_WIDTH as MAX_MIX_WIDTH
from parbank.ops.norm import MAX_WIDTH, fit_stages

SHAPES = [(1, 1), (7, 127), (2, 3, 7), (1, 1023), (0, 8), (13,)]


def mix_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    x, x0 = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    return [x, x0, *(torch.randn(shape[-1], device=device) for _ in range(2))]


def add_mix_inputs(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, skipped: bool = True
) -> list[torch.Tensor | None]:
    """x, y, x0, a, b, skip, gain."""
    x, x0, a, b = mix_inputs(shape, dtype, device)
    y, skip, gain, _ = mix_inputs(shape, dtype, device)
    return [x, y, x0, a, b, skip, gain] if skipped else [x, y, x0, a, b, None, None]


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
@pytest.mark.parametrize("skipped", [False, True])
def test_mix_behind_the_sum_matches_the_reference(shape, skipped, dtype, device, poison):
    inputs = add_mix_inputs(shape, dtype, device, skipped)
    assert_matches(
        lambda *i: add_mix_rms_norm(*i, scale=0.7), lambda *i: reference.add_mix_rms_norm(*i, scale=0.7), inputs
    )


@pytest.mark.parametrize("skipped", [False, True])
def test_the_sum_is_that_of_adding_first(skipped, dtype, device):
    """The kernel's sum is rounded once, and the mix is that of the rounded sum: backward makes it again from there."""
    x, y, x0, a, b, skip, gain = add_mix_inputs((37, 48), dtype, device, skipped)
    total, mixed, normed = add_mix_rms_norm(x, y, x0, a, b, skip, gain, 0.7)
    wide = x.float() + y.float() + (gain * skip.float() if skipped else 0.0)
    torch.testing.assert_close(total, wide.to(dtype))
    for found, expected in zip((mixed, normed), mix_rms_norm(total, x0, a, b, 0.7), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_sum_matches_the_reference(shape, dtype, device, poison):
    inputs = [torch.randn(shape, device=device).to(dtype) for _ in range(2)]
    assert_matches(lambda *i: add_rms_norm(*i, 0.7), lambda *i: reference.add_rms_norm(*i, 0.7), inputs)


def test_rows_are_split_over_programs(device, poison):
    """More rows than programs hold at once: each walks several tiles, the last one partly filled."""
    inputs = [torch.randn(101, 24, device=device), torch.randn(24, device=device)]
    assert_matches(rms_norm, reference.rms_norm, inputs)
    assert_matches(mix_rms_norm, reference.mix_rms_norm, mix_inputs((101, 24), torch.float32, device))
    for skipped in (False, True):
        inputs = add_mix_inputs((101, 24), torch.float32, device, skipped)
        assert_matches(add_mix_rms_norm, reference.add_mix_rms_norm, inputs)


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
    parts = [slice(0, 16), slice(16, 32), slice(32, 48), slice(48, 64)]

    def of_parts(op):
        def call(x, a, b, gain):
            first, second, third, fourth = (x[:, part] for part in parts)
            return op(first, second, third, a, b, fourth, gain)

        return call

    vectors = [torch.randn(16, device=device) for _ in range(3)]
    assert_matches(of_parts(add_mix_rms_norm), of_parts(reference.add_mix_rms_norm), [wide, *vectors])


def test_gains_that_are_columns_of_a_parameter(device):
    gains = torch.randn(16, 2, device=device)
    x, x0 = torch.randn(5, 16, device=device), torch.randn(5, 16, device=device)
    assert_matches(lambda x, g: rms_norm(x, g[:, 1]), lambda x, g: reference.rms_norm(x, g[:, 1]), [x, gains])
    assert_matches(
        lambda x, y, g: mix_rms_norm(x, y, g[:, 0], g[:, 1]),
        lambda x, y, g: reference.mix_rms_norm(x, y, g[:, 0], g[:, 1]),
        [x, x0, gains],
    )
    assert_matches(
        lambda x, y, g: add_mix_rms_norm(x, y, y, g[:, 0], g[:, 1], x, g[:, 1]),
        lambda x, y, g: reference.add_mix_rms_norm(x, y, y, g[:, 0], g[:, 1], x, g[:, 1]),
        [x, x0, gains],
    )


@pytest.mark.parametrize("used", [(1,), (2,), (0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("skipped", [False, True])
def test_some_of_the_three_results_may_go_unused(used, skipped, device):
    """A sum that only its own mix reads is the common case: then no gradient reaches it from elsewhere."""
    inputs = add_mix_inputs((9, 16), torch.float32, device, skipped)
    assert_matches(
        lambda *i: [add_mix_rms_norm(*i)[index] for index in used],
        lambda *i: [reference.add_mix_rms_norm(*i)[index] for index in used],
        inputs,
    )


def test_the_sum_alone_may_be_used(device):
    x, y, x0, a, b, skip, gain = add_mix_inputs((9, 16), torch.float32, device)
    leaves = [t.requires_grad_() for t in (x, y, skip, gain)]
    total, _, _ = add_mix_rms_norm(x, y, x0, a, b, skip, gain)
    weight = torch.randn_like(total)
    found = torch.autograd.grad((weight * total).sum(), leaves)
    for one, expected in zip(found, (weight, weight, gain * weight, (weight * skip).sum(0)), strict=True):
        torch.testing.assert_close(one, expected)


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
    arguments = (x, x, x, vector, vector, x, vector)
    torch.testing.assert_close(add_mix_rms_norm(*arguments), reference.add_mix_rms_norm(*arguments), rtol=0, atol=0)


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
        (lambda x: add_mix_rms_norm(x, x[:2], x, x[0], x[0]), "y is .*must agree"),
        (lambda x: add_mix_rms_norm(x, x, x, x[0], x[0], x.half(), x[0]), "skip is torch.float16"),
        (lambda x: add_mix_rms_norm(x, x, x, x[0], x[0], x, x[0, :3]), r"gain has shape \(3,\)"),
        (lambda x: add_mix_rms_norm(x, x, x, x[0], x[0], x), "skip was given without gain"),
        (lambda x: add_mix_rms_norm(x, x, x, x[0], x[0], None, x[0]), "gain was given without skip"),
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
    y, skip = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gain = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *i: reference.add_mix_rms_norm(*i, scale=0.5), (x, y, x0, a, b))
    assert torch.autograd.gradcheck(lambda *i: reference.add_mix_rms_norm(*i, scale=0.5), (x, y, x0, a, b, skip, gain))


VARIANTS = {
    "rms_norm": (
        "norm:_norm_forward_kernel",
        [{"WEIGHTED": True, "ADDED": False, "LATE": False}, {"WEIGHTED": False, "ADDED": False, "LATE": True}],
    ),
    "rms_norm_backward": ("norm:_norm_backward_kernel", [{"WEIGHTED": True, "ADDED": False, "LATE": False}]),
    "add_rms_norm": ("norm:_norm_forward_kernel", [{"WEIGHTED": False, "ADDED": True, "LATE": False}]),
    "add_rms_norm_backward": (
        "norm:_norm_backward_kernel",
        [
            {"WEIGHTED": False, "ADDED": True, "LATE": False},
            {"WEIGHTED": False, "ADDED": False, "LATE": False},
            {"WEIGHTED": False, "ADDED": True, "LATE": True},
        ],
    ),
    "mix_rms_norm": (
        "mix:_mix_norm_forward_kernel",
        [{"ADDED": False, "SKIPPED": False, "LATE": late} for late in (False, True)],
    ),
    "add_mix_rms_norm": (
        "mix:_mix_norm_forward_kernel",
        [
            {"ADDED": True, "SKIPPED": False, "LATE": False},
            {"ADDED": True, "SKIPPED": True, "LATE": False},
            {"ADDED": False, "SKIPPED": True, "LATE": True},
        ],
    ),
    "mix_rms_norm_backward": (
        "mix:_mix_norm_backward_kernel",
        [{"REACHED": reached, "SKIPPED": False, "LATE": late} for reached in (False, True) for late in (False, True)],
    ),
    "skip_mix_rms_norm_backward": (
        "mix:_mix_norm_backward_kernel",
        [{"REACHED": reached, "SKIPPED": True, "LATE": late} for reached in (False, True) for late in (False, True)],
    ),
}
"""Table -> its kernel, and the constants in which the launchers set it off."""


READ = {"norm:_norm_backward_kernel": 2, "mix:_mix_norm_backward_kernel": 4}
"""How many rows a loop reads ahead at a time; each of REACHED and SKIPPED is one more."""


def fitted(kernel: str, launch: configs.Launch, variant: dict[str, bool], kind: str, arch: str) -> configs.Launch:
    if "STAGES" not in launch.blocks:
        return launch
    operands = READ[kernel] + variant.get("REACHED", False) + variant.get("SKIPPED", False)
    return fit_stages(launch, operands * (4 if kind == "fp32" else 2), arch)


def norm_jobs(arch: str, kind: str, cut: int) -> list[Job]:
    """For rows of three quarters of a block, or, of those that read ahead and are long, `cut` channels less than a whole one."""
    wide = ("x", "y", "dy", "dx", "x0", "dx0", "m", "dm", "addend", "straight", "total", "dtotal", "skip", "dskip")
    pointers = dict.fromkeys(wide, f"*{kind}")
    pointers |= dict.fromkeys(("weight", "inverse", "a", "b", "gain", "partial"), "*fp32")
    numbers = {"rows": "i32", "scale": "fp32", "eps": "fp32"}
    numbers |= {f"stride_{name}": "i32" for name in wide}
    return [
        Job(
            f"parbank.ops.{kernel}",
            pointers | numbers,
            {"WIDTH": width - (cut or width // 4), **variant, **fitted(kernel, launch, variant, kind, arch).blocks},
            configs.ARCHITECTURES[arch],
            launch.num_warps,
            launch.num_stages,
        )
        for op, (kernel, variants) in VARIANTS.items()
        for width, launch in configs.tables()[op][arch]
        if not cut or (width > 1024 and "STAGES" in launch.blocks)
        for variant in variants
    ]


@pytest.mark.slow
def test_every_config_compiles_without_spills():
    jobs = [job for arch in configs.ARCHITECTURES for job in norm_jobs(arch, "bf16", 0)]
    # What rows take of shared memory goes by their bytes, and by whether they can be copied there at all: long ones, the odd too
    jobs += [job for kind, cut in (("fp32", 0), ("fp32", 2), ("bf16", 2)) for job in norm_jobs("sm80", kind, cut)]
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
    for skipped in (False, True):
        inputs = add_mix_inputs(shape, dtype, device, skipped)
        assert_as_exact_as_torch(add_mix_rms_norm, reference.add_mix_rms_norm, inputs)


@pytest.mark.gpu
def test_same_bits_every_time(device):
    inputs = mix_inputs((8192, 512), torch.bfloat16, device)
    assert_same_bits(mix_rms_norm, inputs)
    for skipped in (False, True):
        assert_same_bits(add_mix_rms_norm, add_mix_inputs((8192, 512), torch.bfloat16, device, skipped))
    assert_same_bits(add_rms_norm, inputs[:2])
    assert_same_bits(rms_norm, inputs[:1])
    assert_same_bits(rms_norm, [inputs[0], inputs[2]])


FAR = (2**22 + 3, 512)
"""Past 2^31 elements, 4 GiB a tensor in bfloat16."""


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
def test_norm_of_more_than_two_to_the_31_elements(weighted, device):
    x = torch.randn(FAR, device=device, dtype=torch.bfloat16)
    weight = torch.randn(FAR[1], device=device) if weighted else None
    assert_end_matches(rms_norm, reference.rms_norm, [x, weight], 3)


@pytest.mark.gpu
def test_sum_and_mix_of_more_than_two_to_the_31_elements(device):
    x, x0 = (torch.randn(FAR, device=device, dtype=torch.bfloat16) for _ in range(2))
    a, b = torch.randn(2, FAR[1], device=device)
    assert_end_matches(add_rms_norm, reference.add_rms_norm, [x, x0], 3)
    assert_end_matches(mix_rms_norm, reference.mix_rms_norm, [x, x0, a, b], 3)


@pytest.mark.gpu
@pytest.mark.parametrize("skipped", [False, True])
def test_mix_behind_the_sum_of_more_than_two_to_the_31_elements(skipped, device):
    """One tensor is all of x, y, x0 and skip, because the results and gradients alone are 36 GiB: each is still read through
    its own pointer, and where that wraps the row is another."""
    x = torch.randn(FAR, device=device, dtype=torch.bfloat16)
    a, b, gain = torch.randn(3, FAR[1], device=device)
    more = [x, gain] if skipped else [None, None]
    assert_end_matches(add_mix_rms_norm, reference.add_mix_rms_norm, [x, x, x, a, b, *more], 3)
