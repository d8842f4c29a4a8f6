"""What every op asks of its tensors, whatever runs it: one device, and floating numbers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from parbank import ops
from parbank.errors import ParbankError
from parbank.ops import backend

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
        "window_attention": ({"q": made(1, 4, 2, 16), **keys, "low": torch.zeros_like(targets)}, {"window": 3}),
    }


NAMES = list(calls(torch.device("cpu")))


@pytest.fixture(params=["triton", "reference"])
def either_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with backend.use_backend(request.param):
        yield


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
