"""One product for queries, keys and values, held against three."""

import pytest
import torch
from checking import assert_as_exact_as_torch, assert_end_matches, assert_matches, assert_same_bits
from torch import Tensor

from parbank.errors import ParbankError
from parbank.ops import qkv_norm_rope, reference


def inputs(
    batch: int, time: int, width: int, heads: int, kv: int, channels: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    x = torch.randn(batch, time, width, device=device).to(dtype)
    weights = [torch.randn(n * channels, width, device=device).div(width**0.5).to(dtype) for n in (heads, kv, kv)]
    return [x, *weights, torch.randn(heads, device=device)]


def through(op, heads: int, time: int, half: int, device: torch.device):
    angles = torch.rand(time, half, device=device) * 6

    def call(x: Tensor, query: Tensor, key: Tensor, value: Tensor, gain: Tensor | None = None):
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return op(x, query, key, value, heads, gain, angles.cos().to(wide), angles.sin().to(wide))

    return call


def both(heads: int, time: int, half: int, device: torch.device):
    torch.manual_seed(0)
    ours = through(qkv_norm_rope, heads, time, half, device)
    torch.manual_seed(0)
    return ours, through(reference.qkv_norm_rope, heads, time, half, device)


@pytest.mark.parametrize(
    ("batch", "time", "width", "heads", "kv", "channels", "half"),
    [
        (1, 1, 1, 1, 1, 1, 0),
        (2, 7, 12, 3, 1, 12, 3),
        (1, 5, 16, 4, 2, 8, 4),
        (1, 127, 8, 2, 1, 8, 2),
        (2, 0, 8, 2, 1, 8, 2),
    ],
)
def test_matches_the_reference(batch, time, width, heads, kv, channels, half, dtype, device, poison):
    made = inputs(batch, time, width, heads, kv, channels, device, dtype)
    assert_matches(*both(heads, time, half, device), made)
    assert_matches(*both(heads, time, half, device), made[:4])


def test_weights_that_are_slices_and_transposed_views(device):
    bank = torch.randn(3, 16, 16, device=device)
    x = torch.randn(1, 5, 16, device=device)
    ours, theirs = both(4, 5, 2, device)

    def sliced(op):
        return lambda x, bank: op(x, bank[0], bank[1, :8], bank[2].mT[:8])

    assert_matches(sliced(ours), sliced(theirs), [x, bank])


@pytest.mark.parametrize("index", [0, 1, 2])
def test_any_of_the_three_may_go_unused(index, device):
    x, *weights = inputs(1, 3, 8, 2, 1, 8, device, torch.float32)

    def one(op):
        return lambda x: op(x, *(w.to(x.dtype) for w in weights))[index]

    ours, theirs = both(2, 3, 2, device)
    assert_matches(one(ours), one(theirs), [x])


@pytest.mark.parametrize(
    ("shapes", "heads"),
    [
        (((1, 3, 8), (16, 7), (8, 8), (8, 8)), 2),
        (((3, 8), (16, 8), (8, 8), (8, 8)), 2),
        (((1, 3, 8), (16, 8), (8, 8), (16, 8)), 2),
        (((1, 3, 8), (16, 8), (9, 8), (9, 8)), 2),
        (((1, 3, 8), (16, 8), (8, 8), (8, 8)), 3),
    ],
)
def test_wrong_shapes_are_named(shapes, heads, device):
    cos = torch.ones(3, 2, device=device)
    with pytest.raises(ParbankError, match=r"with \d query heads; x must be \(B, T, width\)"):
        qkv_norm_rope(*(torch.randn(shape, device=device) for shape in shapes), heads, None, cos, cos)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gain": torch.ones(1)}, r"gain is \(1,\); it must have one value per query head, \(2,\)"),
        ({"gain": torch.ones(3)}, r"gain is \(3,\)"),
        ({"cos": torch.ones(2, 2), "sin": torch.ones(2, 2)}, r"here \(3, at most 4\)"),
        ({"cos": torch.ones(3, 6), "sin": torch.ones(3, 6)}, r"here \(3, at most 4\)"),
        ({"sin": torch.ones(3, 1)}, "both must be"),
        ({"cos": torch.ones(3), "sin": torch.ones(3)}, "both must be"),
        ({"w_query": torch.ones(16, 8, dtype=torch.float16)}, r"weights torch.float16.*cast"),
    ],
)
def test_wrong_arguments_are_named(change, said, device):
    shapes = {"x": (1, 3, 8), "w_query": (16, 8), "w_key": (8, 8), "w_value": (8, 8)}
    shapes |= {"gain": (2,), "cos": (3, 2), "sin": (3, 2)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()} | change
    with pytest.raises(ParbankError, match=said):
        qkv_norm_rope(**{name: tensor.to(device) for name, tensor in tensors.items()}, heads=2)


def test_reference_gradients():
    made = [t.double().requires_grad_() for t in inputs(1, 3, 5, 2, 1, 4, torch.device("cpu"), torch.float32)]
    assert torch.autograd.gradcheck(through(reference.qkv_norm_rope, 2, 3, 2, torch.device("cpu")), made)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_as_exact_as_torch(dtype, device):
    made = inputs(3, 501, 512, 8, 4, 64, device, dtype)
    # Going back, one product of the joined gradients adds in float32 what three products round before they are added.
    assert_as_exact_as_torch(*both(8, 501, 8, device), made)


@pytest.mark.gpu
def test_same_bits_every_time(device):
    ours, _ = both(8, 1024, 8, device)
    assert_same_bits(ours, inputs(4, 1024, 512, 8, 4, 64, device, torch.bfloat16))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    """In the queries too, which are half of the row."""
    made = inputs(2**11 + 1, 2048, 16, 8, 4, 64, device, torch.bfloat16)
    assert_end_matches(*both(8, 2048, 8, device), made, 1)
