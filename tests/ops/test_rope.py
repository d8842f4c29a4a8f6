"""Per-head norm, rotation and gain, held against the reference."""

import pytest
import torch
from aot import Job, build
from checking import assert_as_exact_as_torch, assert_end_matches, assert_matches, assert_same_bits
from torch import Tensor

from parbank.errors import ParbankError
from parbank.ops import configs, qk_norm_rope, reference
from parbank.ops.rope import MAX_TILE


def tables(time: int, half: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = torch.rand(time, half, device=device) * 6
    return angles.cos(), angles.sin()


def pair(op, cos: Tensor, sin: Tensor):
    """The op as a function of what it has gradients for; the tables follow the inputs' precision."""

    def call(q: Tensor, k: Tensor, gain: Tensor | None) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        return op(q, k, gain, cos.to(wide), sin.to(wide))

    return call


def check(q: Tensor, k: Tensor, gain: Tensor | None, half: int, how=assert_matches) -> None:
    cos, sin = tables(q.shape[1], half, q.device)
    how(pair(qk_norm_rope, cos, sin), pair(reference.qk_norm_rope, cos, sin), [q, k, gain])


@pytest.mark.parametrize(
    ("batch", "time", "heads", "kv", "width", "half"),
    [(1, 1, 1, 1, 1, 0), (2, 7, 3, 1, 12, 3), (1, 5, 4, 2, 16, 8), (1, 127, 2, 1, 8, 2), (2, 0, 2, 1, 8, 2)],
)
def test_matches_the_reference(batch, time, heads, kv, width, half, dtype, device, poison):
    q = torch.randn(batch, time, heads, width, device=device).to(dtype)
    k = torch.randn(batch, time, kv, width, device=device).to(dtype)
    check(q, k, torch.randn(heads, device=device), half)


def test_without_gain(device, poison):
    check(torch.randn(2, 3, 2, 8, device=device), torch.randn(2, 3, 1, 8, device=device), None, 2)


def test_views_of_one_product_and_transposed_gradients(device, poison):
    """q and k as slices of one tensor; gradients as attention returns them, with time inside the heads."""
    cos, sin = tables(5, 3, device)
    gain = torch.randn(4, device=device)

    def through(op):
        def call(qkv: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
            wide = torch.float64 if qkv.dtype == torch.float64 else torch.float32
            q, k, _ = qkv.split([4, 2, 2], dim=2)
            q, k = op(q, k, gain, cos.to(wide), sin.to(wide))
            return q.transpose(1, 2), k.transpose(1, 2)

        return call

    assert_matches(
        through(qk_norm_rope), through(reference.qk_norm_rope), [torch.randn(2, 5, 8, 8, device=device), gain]
    )


def test_a_gain_that_is_a_column_of_a_parameter(device):
    gains = torch.randn(2, 3, device=device)
    cos, sin = tables(4, 2, device)
    q, k = torch.randn(1, 4, 2, 8, device=device), torch.randn(1, 4, 1, 8, device=device)

    def through(op):
        return lambda q, k, g: pair(op, cos, sin)(q, k, g[:, 1])

    assert_matches(through(qk_norm_rope), through(reference.qk_norm_rope), [q, k, gains])


def test_strided_channels_are_copied(device):
    q, k = torch.randn(1, 3, 2, 16, device=device)[..., ::2], torch.randn(1, 3, 1, 16, device=device)[..., ::2]
    cos, sin = tables(3, 2, device)
    torch.testing.assert_close(qk_norm_rope(q, k, None, cos, sin), reference.qk_norm_rope(q, k, None, cos, sin))


def test_a_gradient_for_the_tables_takes_the_reference(device):
    q, k = torch.randn(1, 3, 2, 8, device=device), torch.randn(1, 3, 1, 8, device=device)
    cos, sin = (t.requires_grad_() for t in tables(3, 2, device))
    new_q, new_k = qk_norm_rope(q, k, None, cos, sin)
    assert torch.autograd.grad(new_q.sum() + new_k.sum(), cos)[0].any()


def test_too_many_channels_take_the_reference(device):
    q = torch.randn(1, 1, 2, MAX_TILE, device=device)
    cos, sin = tables(1, 2, device)
    torch.testing.assert_close(qk_norm_rope(q, q, None, cos, sin), reference.qk_norm_rope(q, q, None, cos, sin))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k": (1, 4, 1, 8)}, "must be .B, T, H, D."),
        ({"cos": (3, 5), "sin": (3, 5)}, r"here \(3, at most 4\)"),
        ({"sin": (3, 1)}, "both must be"),
        ({"gain": (3,)}, r"one value per query head, \(2,\)"),
    ],
)
def test_wrong_arguments_are_named(change, said, device):
    shapes = {"q": (1, 3, 2, 8), "k": (1, 3, 1, 8), "gain": (2,), "cos": (3, 2), "sin": (3, 2)} | change
    with pytest.raises(ParbankError, match=said):
        qk_norm_rope(*(torch.randn(shape, device=device) for shape in shapes.values()))


def test_reference_gradients():
    q, k = (torch.randn(1, 3, heads, 6, dtype=torch.float64, requires_grad=True) for heads in (2, 1))
    gain = torch.randn(2, dtype=torch.float64, requires_grad=True)
    cos, sin = (t.double() for t in tables(3, 2, torch.device("cpu")))
    assert torch.autograd.gradcheck(lambda q, k, g: reference.qk_norm_rope(q, k, g, cos, sin), (q, k, gain))


@pytest.mark.slow
def test_every_config_compiles_without_spills():
    wide = ("x", "y", "dy", "dx", "passed", "dpassed", "more", "extra", "dextra")
    signature = dict.fromkeys(wide, "*bf16") | {"eps": "fp32", "scale": "fp32"}
    signature |= dict.fromkeys(("gain", "cos", "sin", "inverse", "partial"), "*fp32")
    strides = [f"{name}_{axis}" for name in ("stride", "x", "dy", "dx", "dp", "more") for axis in "bth"]
    signature |= dict.fromkeys(("tokens", "time", "dy_p", "dp_p", *strides), "i32")
    plain = {"FACTORED": False, "PARTS": 1, "HAS_MORE": False, "HAS_EXTRA": False}
    # as residual.py has them: attention's gradients in parts, those of values with one more from elsewhere
    late = {"FACTORED": True, "PARTS": 2, "HAS_MORE": False, "HAS_EXTRA": False}
    most = {"FACTORED": True, "PARTS": 2, "HAS_MORE": True, "HAS_EXTRA": True}
    jobs = []
    for arch, capability in configs.ARCHITECTURES.items():
        for op, kernel in (
            ("qk_norm_rope", "_rope_forward_kernel"),
            ("qk_norm_rope_backward", "_rope_backward_kernel"),
            ("qk_norm_rope_parts_backward", "_rope_backward_kernel"),
        ):
            for limit, launch in configs.tables()[op][arch]:
                for heads, width, half, passed in ((8, 64, 8, 0), (8, 64, 8, 4), (16, 64, 32, 0), (32, 128, 64, 0)):
                    if heads * width > limit:
                        continue  # another row's
                    for variant in (plain, late, most) if passed else (plain, late | {"PARTS": 1}):
                        constexprs = {"HEADS": heads, "WIDTH": width, "HALF": half, "VECTOR": 8}
                        constexprs |= {"HAS_GAIN": not passed, "PASSED": passed, **variant}
                        if "forward" in kernel:
                            constexprs = {k: v for k, v in constexprs.items() if k not in ("PARTS", "HAS_MORE")}
                        tokens = max(1, launch.blocks["TILE"] // (heads * width))
                        constexprs |= {"BLOCK_T": tokens, "BLOCK_H": heads, "BLOCK_D": width}
                        jobs.append(
                            Job(f"parbank.ops.rope:{kernel}", signature, constexprs, capability, launch.num_warps, 1)
                        )
    for job, built in zip(jobs, build(jobs), strict=True):
        assert job.capability != 90 or built.stack == 0, job


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_as_exact_as_torch(dtype, device):
    q = torch.randn(3, 501, 8, 64, device=device).to(dtype)
    k = torch.randn(3, 501, 4, 64, device=device).to(dtype)
    check(q, k, torch.randn(8, device=device), 8, assert_as_exact_as_torch)


@pytest.mark.gpu
def test_same_bits_every_time(device):
    q, k = (torch.randn(4, 2048, heads, 64, device=device, dtype=torch.bfloat16) for heads in (8, 4))
    cos, sin = tables(2048, 8, device)
    assert_same_bits(pair(qk_norm_rope, cos, sin), [q, k, torch.randn(8, device=device)])
    assert_same_bits(pair(qk_norm_rope, cos, sin), [q, k, None])


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    q, k = (torch.randn(2**11 + 1, 2048, 8, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    cos, sin = tables(2048, 8, device)
    ours, theirs = (pair(op, cos, sin) for op in (qk_norm_rope, reference.qk_norm_rope))
    assert_end_matches(ours, theirs, [q, k, torch.randn(8, device=device)], 1)
