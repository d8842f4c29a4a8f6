"""One tensor for several readers: its gradients are added up in one pass, in float32."""

import sys

import pytest
import torch
from checking import assert_matches, assert_same_bits

from parbank import ops
from parbank.errors import ParbankError
from parbank.ops import reference

module = sys.modules["parbank.ops.fan_out"]  # the package shows the op under this name


def read_all(copies):
    """A function of x that reads every copy differently, so that a lost or doubled gradient shows."""

    def function(op):
        def run(x):
            return sum((n + 1.0) * y for n, y in enumerate(op(x, copies)))

        return run

    return function(ops.fan_out), function(reference.fan_out)


@pytest.mark.parametrize("copies", [1, 2, 12, 17, 40])
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 2049), (0, 4)])
def test_values_and_gradients_are_those_of_the_definition(copies, shape, dtype, device, poison):
    assert_matches(*read_all(copies), [torch.randn(shape, device=device, dtype=dtype)])


def test_the_sum_is_rounded_once(device):
    """In float16, 1 + sixteen times 2^-11 in pairs stays 1: each addend is lost. In one pass nothing is."""
    x = torch.ones(5, device=device, dtype=torch.float16, requires_grad=True)
    copies = ops.fan_out(x, 9)
    small = torch.full_like(x, 2.0**-12)
    (grad,) = torch.autograd.grad(copies, x, [torch.ones_like(x), *[small] * 8])
    assert torch.equal(grad, torch.full_like(x, 1 + 2.0**-9))


def test_copies_that_nobody_reads_cost_nothing(device):
    x = torch.randn(4, device=device, requires_grad=True)
    _, second, _ = ops.fan_out(x, 3)
    (grad,) = torch.autograd.grad(second.sum(), x)
    assert torch.equal(grad, torch.ones_like(x))


def test_a_second_derivative_is_right(device):
    x = torch.randn(4, device=device, requires_grad=True)
    first, second = ops.fan_out(x, 2)
    (grad,) = torch.autograd.grad((first**3 + second**2).sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(twice, 6 * x.detach() + 2)


def test_gradients_in_any_layout(device):
    x = torch.randn(6, 8, device=device, requires_grad=True)
    copies = ops.fan_out(x, 3)
    heads = [
        torch.randn(8, 6, device=device).t(),
        torch.randn(1, 8, device=device).expand(6, 8),
        torch.randn(6, 8).to(device),
    ]
    (grad,) = torch.autograd.grad(copies, x, heads)
    torch.testing.assert_close(grad, heads[0] + heads[1] + heads[2])


def test_many_terms_take_few_launches(device, monkeypatch):
    """17 gradients are two launches: 16 at once, then what is left with their sum."""
    launches = []
    monkeypatch.setattr(module, "on_device", lambda place, real=module.on_device: launches.append(place) or real(place))
    terms = [torch.randn(100, device=device) for _ in range(17)]
    torch.testing.assert_close(module.sum_tensors(list(terms)), torch.stack(terms).sum(0))
    assert len(launches) == 2


def test_bad_arguments_are_named(device):
    with pytest.raises(ParbankError, match="fan_out: copies is 0"):
        ops.fan_out(torch.zeros(2, device=device), 0)
    with pytest.raises(ParbankError, match="fan_out: x is torch"):
        ops.fan_out(torch.zeros(2, device=device, dtype=torch.int64), 2)


@pytest.mark.gpu
def test_same_bits_every_time(device):
    assert_same_bits(read_all(12)[0], [torch.randn(300, 512, device=device, dtype=torch.bfloat16)], backward=True)
