"""Softcapped cross-entropy, from logits and from the head's inputs, held against the reference."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from aot import Job, build
from checking import assert_as_exact_as_torch, assert_matches, assert_same_bits, evaluate
from torch import Tensor

from parbank.errors import ParbankError
from parbank.ops import backend, configs, linear_softcap_cross_entropy, reference, softcap_cross_entropy

KERNELS = ("softcap_cross_entropy", "softcap_cross_entropy_backward", "softcap_loss_and_gradient")


@contextlib.contextmanager
def forced(block_rows: int, block: int, chunk: int) -> Iterator[None]:
    """Small blocks, so that a small vocabulary is walked in several, and chunks of a few rows."""
    with contextlib.ExitStack() as stack:
        for table in KERNELS:
            stack.enter_context(configs.force(table, configs.Launch({"BLOCK_ROWS": block_rows, "BLOCK": block})))
        stack.enter_context(configs.force("linear_softcap_cross_entropy", configs.Launch({"CHUNK": chunk})))
        yield


def targets_for(rows: tuple[int, ...], vocab: int, device: torch.device) -> Tensor:
    targets = torch.randint(vocab, rows, device=device)
    if targets.numel() > 2:
        targets.view(-1)[1] = -100
    return targets


def check(logits: Tensor, cap: float, reduction: str, how=assert_matches) -> None:
    targets = targets_for(logits.shape[:-1], logits.shape[-1], logits.device)
    how(
        lambda x: softcap_cross_entropy(x, targets, cap, reduction=reduction),
        lambda x: reference.softcap_cross_entropy(x, targets, cap, reduction=reduction),
        [logits],
    )


def check_linear(shape: tuple[int, ...], cap: float, reduction: str, dtype, device, how=assert_matches) -> None:
    *rows, width, vocab = shape
    targets = targets_for(tuple(rows), vocab, device)
    how(
        lambda x, w: linear_softcap_cross_entropy(x, w, targets, cap, reduction=reduction),
        lambda x, w: reference.linear_softcap_cross_entropy(x, w, targets, cap, reduction=reduction),
        [torch.randn(*rows, width, device=device).to(dtype), torch.randn(vocab, width, device=device).to(dtype)],
    )


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 2, 127), (2, 1023)])
@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_matches_the_reference(shape, cap, dtype, device, poison):
    check((3 * torch.randn(shape, device=device)).to(dtype), cap, "none")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reductions(reduction, device):
    check(torch.randn(5, 33, device=device), 15.0, reduction)
    check_linear((5, 8, 33), 15.0, reduction, torch.float32, device)


@pytest.mark.parametrize(("cap", "spread"), [(5.0, 0.5), (5.0, 5.0), (5.0, 1000.0), (90.0, 100.0), (0.0, 1000.0)])
def test_small_and_large_logits_walked_in_blocks(cap, spread, device, poison):
    """Both forms of tanh, shifts by a bound and by the maximum, several blocks with a ragged last one."""
    with forced(2, 16, 1):
        check(spread * torch.randn(3, 41, device=device), cap, "none")


@pytest.mark.parametrize(("cap", "block"), [(30.0, 16), (30.0, 64), (0.0, 16), (60.0, 16)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_linear_in_chunks(cap, block, reduction, device, poison):
    with forced(2, block, 3 * 41):
        check_linear((2, 4, 12, 41), cap, reduction, torch.float32, device)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 5)])
def test_linear_in_every_dtype(shape, dtype, device, poison):
    for reduction in ("none", "sum"):
        check_linear(shape, 30.0, reduction, dtype, device)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_single_token(reduction, device, poison):
    check(torch.randn(5, device=device), 30.0, reduction)
    check_linear((7, 5), 30.0, reduction, torch.float32, device)


@pytest.mark.parametrize("cap", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["triton", "reference"])
def test_a_cap_is_positive_and_finite(cap, name, device):
    x, targets = torch.randn(3, 5, device=device), torch.tensor([0, 1, 2], device=device)
    with backend.use_backend(name):
        for call in (softcap_cross_entropy, lambda *rest: linear_softcap_cross_entropy(x, *rest)):
            with pytest.raises(ParbankError, match=r"cap is .*positive and finite, or 0"):
                call(x, targets, cap)


def test_tanh_has_no_seam(device):
    """The polynomial meets the exponential form at 0.7 * cap: the capped logit goes on rising across it."""
    cap = 10.0
    x = torch.linspace(6.9, 7.1, 64, device=device)
    logits = torch.stack([x, torch.zeros_like(x)], 1)
    targets = torch.zeros(64, dtype=torch.int64, device=device)
    losses = softcap_cross_entropy(logits, targets, cap, reduction="none")
    exact = reference.softcap_cross_entropy(logits.double(), targets, cap, reduction="none")
    torch.testing.assert_close(losses.double(), exact, rtol=0, atol=2e-6)


def test_infinite_logits_are_impossible_tokens(device):
    logits = torch.randn(2, 5, device=device)
    logits[:, 3] = -torch.inf
    targets = torch.tensor([0, 4], device=device)
    torch.testing.assert_close(softcap_cross_entropy(logits, targets), reference.softcap_cross_entropy(logits, targets))


@pytest.mark.parametrize(("size", "block"), [(1e4, 64), (1e6, 16), (1e9, 64), (1e30, 16)])
def test_large_logits_cost_what_they_cost_in_float64(size, block, device, poison):
    """log(sum) must not be added to a large number: as one float32, equal logits of 1e9 cost 0 instead of log(41)."""
    equal = torch.tensor([[size], [-size]], device=device).expand(2, 41)
    others = size + size / 1000 * torch.randint(-1, 2, (2, 41), device=device)
    targets = torch.randint(41, (4,), device=device)
    check_each(torch.cat([equal, others]), targets, 0.0, block)
    if size < 1e19:  # the square of a larger cap is no float32
        check_each(equal.contiguous(), targets[:2], 3 * size, block)


def check_each(logits: Tensor, targets: Tensor, cap: float, block: int) -> None:
    """Every loss and gradient by itself: beside the largest of a tensor, a wrong small one would not show."""
    rows, head = torch.eye(len(logits), device=logits.device), logits.t().contiguous()
    exact = evaluate(lambda x: reference.softcap_cross_entropy(x, targets, cap, reduction="none"), [logits.double()])
    # Columns beyond the vocabulary may overflow: the kernels leave them out.
    with forced(2, block, 3 * logits.shape[1]), np.errstate(over="ignore"):
        plain = evaluate(lambda x: softcap_cross_entropy(x, targets, cap, reduction="none"), [logits])
        linear = evaluate(lambda w: linear_softcap_cross_entropy(rows, w, targets, cap, reduction="none"), [head])
        summed = evaluate(lambda w: linear_softcap_cross_entropy(rows, w, targets, cap, reduction="sum"), [head])
    torch.testing.assert_close(torch.stack([plain[0][0], linear[0][0]]).double(), exact[0][0].expand(2, -1))
    torch.testing.assert_close(summed[0][0].double(), exact[0][0].sum())
    torch.testing.assert_close(torch.stack([plain[1][0], linear[1][0].t()]).double(), exact[1][0].expand(2, -1, -1))
    ones = evaluate(lambda x: reference.softcap_cross_entropy(x, targets, cap, reduction="sum"), [logits.double()])
    torch.testing.assert_close(summed[1][0].t().double(), ones[1][0])


def test_another_ignore_index(device):
    logits, targets = torch.randn(3, 5, device=device), torch.tensor([0, 2, 2], device=device)
    ours, plain = (op(logits, targets, 30.0, 2) for op in (softcap_cross_entropy, reference.softcap_cross_entropy))
    torch.testing.assert_close(ours, plain)


def test_the_mean_of_nothing_but_ignored_tokens(device):
    """NaN with a gradient of zero, as PyTorch has it: a batch of padding must not spoil the weights."""
    logits = torch.randn(3, 5, device=device, requires_grad=True)
    loss = softcap_cross_entropy(logits, torch.full((3,), -100, device=device), 30.0)
    assert loss.isnan()
    assert not torch.autograd.grad(loss, logits)[0].any()


def test_nothing_to_score(device):
    targets = torch.full((2,), -100, device=device)
    logits = torch.randn(2, 5, device=device, requires_grad=True)
    assert softcap_cross_entropy(logits, targets, 30.0).isnan()
    loss = softcap_cross_entropy(logits, targets, 30.0, reduction="sum")
    assert loss == 0
    assert not torch.autograd.grad(loss, logits)[0].any()
    empty = softcap_cross_entropy(logits[:0], targets[:0], reduction="none")
    assert empty.shape == (0,)
    x, w = torch.randn(0, 4, device=device, requires_grad=True), torch.randn(5, 4, device=device, requires_grad=True)
    grads = torch.autograd.grad(linear_softcap_cross_entropy(x, w, targets[:0], reduction="sum"), (x, w))
    assert [g.shape for g in grads] == [(0, 4), (5, 4)]
    assert not grads[1].any()


def test_a_target_outside_the_vocabulary_shows(device):
    losses = softcap_cross_entropy(
        torch.randn(3, 5, device=device), torch.tensor([1, 5, -1], device=device), reduction="none"
    )
    assert losses.isnan().tolist() == [False, True, True]


def test_strided_logits_and_gradients(device):
    wide, targets = torch.randn(4, 12, device=device), torch.tensor([0, 1, 2, 3], device=device)
    for cut in (lambda x: x[:, :6], lambda x: x[:, ::2]):
        assert_matches(
            lambda x: softcap_cross_entropy(cut(x), targets, 30.0),  # noqa: B023
            lambda x: reference.softcap_cross_entropy(cut(x), targets, 30.0),  # noqa: B023
            [wide],
        )


def test_strided_targets(device):
    targets = torch.tensor([0, 9, 2, 9, 4, 9], device=device)[::2]
    logits, x, w = (torch.randn(shape, device=device) for shape in ((3, 5), (3, 8), (5, 8)))
    torch.testing.assert_close(softcap_cross_entropy(logits, targets), reference.softcap_cross_entropy(logits, targets))
    for reduction in ("mean", "none"):
        assert_matches(
            lambda x, w: linear_softcap_cross_entropy(x, w, targets, 30.0, reduction=reduction),  # noqa: B023
            lambda x, w: reference.linear_softcap_cross_entropy(x, w, targets, 30.0, reduction=reduction),  # noqa: B023
            [x, w],
        )


def test_gradients_wanted_for_one_side_only(device):
    x, w = torch.randn(4, 6, device=device), torch.randn(9, 6, device=device)
    targets = torch.tensor([0, 1, 2, 3], device=device)
    for reduction in ("mean", "none"):
        for leaf in (x, w):
            leaf.requires_grad_()
            ours, plain = (
                torch.autograd.grad(op(x, w, targets, 30.0, reduction=reduction).sum(), leaf)[0]
                for op in (linear_softcap_cross_entropy, reference.linear_softcap_cross_entropy)
            )
            torch.testing.assert_close(ours, plain)
            leaf.requires_grad_(False)


def test_a_factor_from_above(device):
    """Gradients kept from forward are scaled by what backward brings, here a third on top of the mean."""
    x, w = torch.randn(5, 6, device=device), torch.randn(9, 6, device=device)
    targets = targets_for((5,), 9, device)
    assert_matches(
        lambda x, w: linear_softcap_cross_entropy(x, w, targets, 30.0) / 3,
        lambda x, w: reference.linear_softcap_cross_entropy(x, w, targets, 30.0) / 3,
        [x, w],
    )


def test_backward_twice_gives_the_same(device):
    x, w = torch.randn(4, 6, device=device, requires_grad=True), torch.randn(9, 6, device=device)
    loss = linear_softcap_cross_entropy(x, w, torch.tensor([0, 1, 2, 3], device=device), 30.0)
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, t: softcap_cross_entropy(x, t, reduction="max"), "unknown reduction 'max'"),
        (lambda x, t: softcap_cross_entropy(x, t[:2]), r"targets \(2,\)"),
        (lambda x, t: softcap_cross_entropy(x, t.int()), "targets are torch.int32"),
        (lambda x, t: linear_softcap_cross_entropy(x, x[:, :3], t), r"weight must be \(vocabulary, 5\)"),
        (lambda x, t: linear_softcap_cross_entropy(x, x.half(), t), "weight is torch.float16"),
    ],
)
def test_wrong_arguments_are_named(call, said, device):
    with pytest.raises(ParbankError, match=said):
        call(torch.randn(3, 5, device=device), torch.tensor([0, 1, 2], device=device))


def test_reference_gradients():
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, -100, 6])
    for reduction in ("mean", "none"):
        assert torch.autograd.gradcheck(
            lambda x: reference.softcap_cross_entropy(x, targets, 2.0, reduction=reduction),  # noqa: B023
            (logits,),
        )


@pytest.mark.slow
def test_every_config_compiles_without_spills():
    signature = {
        "grad": "*fp32",
        "logits": "*bf16",
        "out": "*bf16",
        "targets": "*i64",
        "losses": "*fp32",
        "sums": "*fp32",
        "counted": "*fp32",
        "totals": "*fp32",
    }
    signature |= {"share": "*fp32"}
    signature |= {
        "rows": "i32",
        "stride": "i32",
        "stride_grad": "i32",
        "stride_out": "i32",
        "cap": "fp32",
        "ignore": "i32",
    }
    kernels = ("loss:_loss_forward_kernel", "loss:_loss_backward_kernel", "linear_loss:_linear_loss_kernel")
    jobs = []
    for arch, capability in configs.ARCHITECTURES.items():
        for table, kernel in zip(KERNELS, kernels, strict=True):
            for limit, launch in configs.tables()[table][arch]:
                vocab = min(limit, 50304)
                for capped, bounded in ((True, True), (True, False), (False, False)):  # caps of 30, 50 and 0
                    constexprs = {"VOCAB": vocab, "CAPPED": capped, "BOUNDED": bounded, **launch.blocks}
                    if not kernel.startswith("linear"):
                        constexprs["COUNT"] = True
                    jobs.append(Job(f"parbank.ops.{kernel}", signature, constexprs, capability, launch.num_warps, 1))
    for job, built in zip(jobs, build(jobs), strict=True):
        assert job.capability != 90 or built.stack == 0, job


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(4096, 1024), (999, 8192), (77, 50257)])
@pytest.mark.parametrize("spread", [2.0, 20.0])
def test_as_exact_as_torch(shape, spread, dtype, device):
    check((spread * torch.randn(shape, device=device)).to(dtype), 30.0, "none", assert_as_exact_as_torch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_linear_as_exact_as_torch(reduction, dtype, device):
    with configs.force("linear_softcap_cross_entropy", configs.Launch({"CHUNK": 1000 * 1024})):
        check_linear((4096, 128, 1024), 30.0, reduction, dtype, device, assert_as_exact_as_torch)


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_same_bits_every_time(reduction, device):
    logits = torch.randn(4096, 1024, device=device, dtype=torch.bfloat16)
    targets = targets_for((4096,), 1024, device)
    x, w = (torch.randn(n, 256, device=device, dtype=torch.bfloat16) for n in (4096, 1024))
    assert_same_bits(lambda x: softcap_cross_entropy(x, targets, 30.0, reduction=reduction), [logits])
    with configs.force("linear_softcap_cross_entropy", configs.Launch({"CHUNK": 1000 * 1024})):  # several, unevenly
        assert_same_bits(lambda x, w: linear_softcap_cross_entropy(x, w, targets, 30.0, reduction=reduction), [x, w])


@pytest.mark.gpu
def test_more_than_two_to_the_31_logits(device):
    logits = torch.randn(2**21 + 3, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = targets_for((2**21 + 3,), 1024, device)
    losses = softcap_cross_entropy(logits, targets, 30.0, reduction="none")
    grad = torch.autograd.grad(losses.sum(), logits)[0][-3:]
    tail = logits.detach()[-3:].requires_grad_()
    exact = reference.softcap_cross_entropy(tail, targets[-3:], 30.0, reduction="none")
    torch.testing.assert_close(losses[-3:], exact)
    torch.testing.assert_close(grad, torch.autograd.grad(exact.sum(), tail)[0])


@pytest.mark.gpu
def test_the_full_logits_are_never_in_memory(device):
    x, w = (torch.randn(n, 256, device=device, dtype=torch.bfloat16, requires_grad=True) for n in (65536, 4096))
    targets = targets_for((65536,), 4096, device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_softcap_cross_entropy(x, w, targets, 30.0).backward()
    full = 65536 * 4096 * 2
    assert torch.cuda.max_memory_allocated() - before < full / 2
