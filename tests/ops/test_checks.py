"""What every op asks of its tensors, whatever runs it: one device, floating numbers, offsets that 32 bits hold; and what takes
the reference."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from parbank import ops
from parbank.errors import ParbankError
from parbank.ops import backend, reference
from parbank.ops.checks import is_near, near

Call = tuple[dict[str, Tensor], dict[str, Any]]


def calls(device: torch.device) -> dict[str, Call]:
    """Every op's tensors and its other arguments, by name."""

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    rows = {name: made(4, 8) for name in ("x", "y", "x0", "skip")}
    channels = {name: made(8) for name in ("a", "b", "gain")}
    square = made(3, 3)
    square = square + square.mT
    targets = torch.tensor([0, 4, -100, 2], device=device)
    tables = {"cos": made(4, 2), "sin": made(4, 2)}
    keys = {name: made(1, 4, 1, 16) for name in ("past_k", "past_v", "k", "v")}
    documents = {"lengths": torch.tensor([0, 1, 4], dtype=torch.int32, device=device)}
    weights = {"w_query": made(16, 8), "w_key": made(8, 8), "w_value": made(8, 8)}
    return {
        "xxt": ({"x": made(3, 5)}, {}),
        "ba_plus_caa": ({"a": square}, {"b": 0.5, "c": 2.0}),
        "symmetric_product": ({"a": square, "b": square.clone(), "c": square.clone()}, {"beta": 0.5}),
        "ax_plus_bx": ({"x": made(3, 5), "b": square}, {"a": 0.5}),
        "rms_norm": ({"x": made(4, 8), "weight": made(8)}, {}),
        "add_rms_norm": ({"x": made(4, 8), "y": made(4, 8)}, {}),
        "mix_rms_norm": ({"x": made(4, 8), "x0": made(4, 8), "a": made(8), "b": made(8)}, {}),
        "add_mix_rms_norm": (rows | channels, {}),
        "smear": ({"x": made(2, 4, 8), "gate": made(8), "starts": made(2, 4) > 0}, {}),
        "leaky_relu_squared": ({"x": made(4, 8)}, {"slope": 0.5}),
        "mlp": ({"x": made(4, 8), "w_up": made(16, 8), "w_down": made(8, 16)}, {"slope": 0.5}),
        "softcap_cross_entropy": ({"logits": made(4, 5), "targets": targets}, {"cap": 30.0}),
        "linear_softcap_cross_entropy": ({"x": made(4, 8), "weight": made(5, 8), "targets": targets}, {"cap": 30.0}),
        "qk_norm_rope": ({"q": made(1, 4, 2, 8), "k": made(1, 4, 1, 8), "gain": made(2), **tables}, {}),
        "qkv_norm_rope": ({"x": made(1, 4, 8), **weights, "gain": made(2), **tables}, {"heads": 2}),
        "remove_own_value": ({"y": made(1, 4, 2, 8), "v": made(1, 4, 1, 8)}, {}),
        "stream_qkv": ({"x": made(1, 4, 8), **weights, "gain": made(2), **tables}, {"heads": 2}),
        "stream_attention": ({"x": made(1, 4, 8), **weights, "gain": made(2), **tables, **documents}, {"heads": 2}),
        "fan_out": ({"x": made(4, 8)}, {"copies": 3}),
        "add_linear": ({"c": made(4, 8), "x": made(4, 5), "w": made(8, 5)}, {}),
        "residual_mlp": ({"x": made(4, 8), "w_up": made(16, 8), "w_down": made(8, 16)}, {"slope": 0.5}),
        "causal_attention": ({"q": made(1, 4, 2, 16), "k": made(1, 4, 1, 16), "v": made(1, 4, 1, 16), **documents}, {}),
        "window_attention": ({"q": made(1, 4, 2, 16), **keys, "low": torch.zeros_like(targets)}, {"window": 3}),
    }


NAMES = list(calls(torch.device("cpu")))


@pytest.fixture(params=["triton", "reference"])
def either_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with backend.use_backend(request.param):
        yield


def first(found: Tensor | tuple[Tensor, ...]) -> Tensor:
    return found if isinstance(found, Tensor) else found[0]


def test_every_op_is_here() -> None:
    assert sorted(NAMES) == sorted(ops.__all__)


@pytest.mark.usefixtures("either_backend")
@pytest.mark.parametrize("name", NAMES)
def test_tensors_on_two_devices_are_refused(name: str, device: torch.device) -> None:
    tensors, rest = calls(device)[name]
    getattr(ops, name)(**tensors, **rest)
    for moved in tensors if len(tensors) > 1 else ():
        with pytest.raises(ParbankError, match="meta"):
            getattr(ops, name)(**tensors | {moved: tensors[moved].to("meta")}, **rest)


@pytest.mark.usefixtures("either_backend")
@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_not_floating_are_refused(name: str, device: torch.device) -> None:
    tensors, rest = calls(device)[name]
    floating = {key: tensor for key, tensor in tensors.items() if tensor.is_floating_point()}
    for dtype in (torch.int64, torch.complex64):
        wrong = [{key: tensor.to(dtype)} for key, tensor in floating.items()]
        for change in [*wrong, {key: tensor.to(dtype) for key, tensor in floating.items()}]:
            with pytest.raises(ParbankError, match=str(dtype)):
                getattr(ops, name)(**tensors | change, **rest)


# Attention is chosen among fused ones, which have none and say so: test_flash.py
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("causal_attention", "stream_attention")])
def test_forward_mode_takes_the_reference(name: str, device: torch.device) -> None:
    tensors, rest = calls(device)[name]
    changed = next(key for key, tensor in tensors.items() if tensor.is_floating_point())
    tangent = torch.randn_like(tensors[changed])

    def along(op: Callable[..., Any]) -> Tensor | None:
        with (
            forward_ad.dual_level(),
            sdpa_kernel(SDPBackend.MATH),
        ):  # the only attention of PyTorch's with this derivative
            dual = forward_ad.make_dual(tensors[changed], tangent)
            return forward_ad.unpack_dual(first(op(**tensors | {changed: dual}, **rest))).tangent

    found, expected = (along(getattr(module, name)) for module in (ops, reference))
    assert expected is not None
    torch.testing.assert_close(found, expected)


def far_apart(shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> Tensor:
    """Random numbers with more than 2^31 others, never touched, between the first and the last."""
    steps = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    view = torch.empty(steps + 1, dtype=torch.float16, device=device).as_strided(shape, strides)
    return view.copy_(torch.randn(shape, device=device))


def test_rows_far_apart_in_memory(device: torch.device) -> None:
    x = far_apart((40, 16), (2**31 // 38, 1), device)
    b, up, down = (torch.randn(shape, device=device).half() / 4 for shape in ((40, 40), (16, 16), (16, 16)))
    close = {"rtol": 5e-3, "atol": 5e-3}
    torch.testing.assert_close(ops.xxt(x), reference.xxt(x.contiguous()), **close)
    torch.testing.assert_close(ops.ax_plus_bx(x, b, 2.0), reference.ax_plus_bx(x.contiguous(), b, 2.0), **close)
    torch.testing.assert_close(ops.mlp(x, up, down, 0.5), reference.mlp(x.contiguous(), up, down, 0.5), **close)


def test_heads_far_apart_in_memory(device: torch.device) -> None:
    far = far_apart((1, 4, 6, 16), (64, 16, 2**31 // 5 + 7, 1), device)
    other = torch.randn(1, 4, 6, 16, device=device).half()
    past, low = other[:, :0], torch.zeros(4, dtype=torch.int64, device=device)
    for q, k, v in ((far, other, other), (other, far, other), (other, other, far)):
        expected = reference.window_attention(q.contiguous(), past, past, k.contiguous(), v.contiguous(), low, 4)
        torch.testing.assert_close(ops.window_attention(q, past, past, k, v, low, 4), expected, rtol=3e-3, atol=3e-3)


def test_own_values_far_apart_in_memory(device: torch.device) -> None:
    far = far_apart((1, 4, 6, 16), (64, 16, 2**31 // 5 + 7, 1), device)
    other = torch.randn(1, 4, 6, 16, device=device).half()
    found = [ops.remove_own_value(far, other), ops.remove_own_value(other, far)]
    found += torch.ops.parbank.remove_own_value_backward(far, other, other, True, True)
    found += torch.ops.parbank.remove_own_value_backward(other, far, other, True, True)
    found += torch.ops.parbank.remove_own_value_backward(other, other, far, True, True)
    far = far.contiguous()
    expected = [reference.remove_own_value(far, other), reference.remove_own_value(other, far)]
    for dz, y, v in ((far, other, other), (other, far, other), (other, other, far)):
        expected += torch.func.vjp(reference.remove_own_value, y, v)[1](dz)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-3, atol=3e-3)


def test_what_is_near() -> None:
    gaps = torch.empty(8, device="meta").as_strided((4, 2), (2**23, 1))
    assert near(gaps, {0: 256, 1: 256}).stride() == (2, 1)
    assert near(gaps, {0: 200, 1: 256}) is gaps
    assert is_near(2**22, 5)
    assert not is_near(5, 2**23)
