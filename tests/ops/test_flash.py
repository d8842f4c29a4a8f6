"""Causal attention through FlashAttention 3: on a GPU the library itself, elsewhere a definition put in its place, which shows
that the ops around it hand over the right things and take back the right gradients."""

import os
import subprocess
import sys
from itertools import pairwise

import flash_stand_in
import pytest
import torch
import torch.nn.functional as F
from aot import ROOT
from checking import assert_as_exact_as_torch, assert_matches, assert_same_bits
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd import forward_ad

from parbank.errors import ParbankError
from parbank.ops import backend, causal_attention, flash, reference


def made(batch: int, length: int, heads: int, kv_heads: int, width: int, device, dtype=torch.float16) -> list[Tensor]:
    return [torch.randn(batch, length, n, width, device=device).to(dtype) for n in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 8), (2, 7, 4, 2, 16), (1, 127, 3, 1, 64), (2, 33, 8, 4, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_matches_the_reference(shape, dtype, installed):
    assert_matches(causal_attention, reference.attention, made(*shape, installed, dtype))


LIMITS = {
    "documents": (
        [0, 4, 4, 5, 9, 14, 18, 18, 18],
        0,
    ),  # of two rows of 9: one is empty, one has one token, then padding
    "a window": (None, 3),
    "documents and a window": ([0, 1, 9, 18], 2),
    "a window of one": ([0, 9, 18], 1),
    "a window longer than a row": ([0, 9, 12, 18, 18], 50),
}


@pytest.fixture(params=LIMITS)
def limits(request) -> tuple[list[int] | None, int]:
    return LIMITS[request.param]


def limited(op, limits: tuple[list[int] | None, int]):
    """`op` with these limits, as a function of q, k and v."""
    lengths, window = limits
    return lambda q, k, v: op(
        q, k, v, None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=q.device), window
    )


def one_by_one(q: Tensor, k: Tensor, v: Tensor, limits: tuple[list[int] | None, int]) -> Tensor:
    """The definition: every document alone."""
    lengths, window = limits
    places = [0, 9, 18] if lengths is None else lengths
    parts = []
    for a, b in pairwise(places):
        place = torch.arange(b - a, device=q.device)
        behind = place[:, None] - place
        mask = (behind >= 0) & (behind < (window or 99))
        if a < b:
            parts.append(reference.attention(*(x.flatten(0, 1)[None, a:b] for x in (q, k, v)), mask)[0])
    return torch.cat(parts).view(q.shape)


def test_documents_and_windows_by_definition(limits, device):
    """In float64, both directions."""
    tensors = made(2, 9, 4, 2, 8, device, torch.float64)
    found, expected = ([x.requires_grad_() for x in (t.clone() for t in tensors)] for _ in range(2))
    y, definition = limited(causal_attention, limits)(*found), one_by_one(*expected, limits)
    dy = torch.randn_like(y)
    torch.testing.assert_close(y, definition, rtol=1e-12, atol=1e-12)
    grads = (torch.autograd.grad(out, leaves, dy) for out, leaves in ((y, found), (definition, expected)))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=["two calls", "one call"])
def test_documents_and_windows_through_the_library(limits, heads, installed, poison):
    tensors = made(2, 9, *heads, 16, installed)
    assert_matches(limited(causal_attention, limits), limited(reference.causal_attention, limits), tensors)


def test_documents_and_windows_compile_once(installed):
    torch._dynamo.reset()
    counters.clear()
    leaves = [x.requires_grad_() for x in made(2, 9, 4, 2, 16, installed)]
    compiled = torch.compile(causal_attention, fullgraph=True, backend="aot_eager")
    for places in ([0, 4, 9, 18, 18], [0, 9, 10, 11, 18]):
        lengths = torch.tensor(places, dtype=torch.int32, device=installed)
        y = compiled(*leaves, lengths, 3)
        torch.autograd.grad(y.sum(), leaves)
        torch.testing.assert_close(y, causal_attention(*leaves, lengths, 3), rtol=2e-3, atol=2e-3)
    assert counters["stats"]["unique_graphs"] == 1


def test_pytorchs_own_is_told_the_same(limits, monkeypatch):
    """On tensors without memory: PyTorch accepts the arguments, and gives gradients of the right shapes."""
    monkeypatch.setattr(flash, "takes_varlen", lambda x, width: True)
    monkeypatch.setattr(flash, "AVAILABLE", False)
    tensors = [x.requires_grad_() for x in made(2, 9, 4, 2, 16, torch.device("meta"))]
    y = limited(causal_attention, limits)(*tensors)
    assert y.shape == tensors[0].shape
    found = torch.autograd.grad(y, tensors, torch.empty_like(y))
    assert [x.shape for x in found] == [x.shape for x in tensors]


def test_wrong_limits_are_named(device):
    tensors = made(1, 6, 4, 2, 8, device)
    with pytest.raises(ParbankError, match="a window of -1 keys"):
        causal_attention(*tensors, window=-1)
    for wrong in (torch.tensor([0, 6]), torch.tensor([[0, 6]]).int(), torch.tensor([6]).int()):
        with pytest.raises(ParbankError, match=r"lengths is .* it must be a contiguous int32"):
            causal_attention(*tensors, wrong.to(device))
    with pytest.raises(ParbankError, match="move them to one device"):
        causal_attention(*tensors, torch.tensor([0, 6]).int().to("meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("library", [False, True], ids=["PyTorch's", "the library's"])
@pytest.mark.parametrize("window", [0, 100])
def test_documents_at_length_on_a_gpu(library, window, monkeypatch):
    """Against the mask in float64, with rounding of bfloat16, and as a CUDA graph that is given other documents."""
    if library and not flash.AVAILABLE:
        pytest.skip("needs FlashAttention 3")
    monkeypatch.setattr(flash, "AVAILABLE", library)
    cuda = torch.device("cuda")
    leaves = [x.requires_grad_() for x in made(4, 512, 8, 4, 64, cuda, torch.bfloat16)]
    dy = torch.randn(4, 512, 8, 64, device=cuda, dtype=torch.bfloat16)
    rows = [0, 512, 1024, 1536]
    many = [sorted([*rows, 5, 6, 700, 701]), sorted([*rows, 100, 1500, 2000, 2047])]
    lengths = [torch.tensor([*places, 2048, 2048], dtype=torch.int32, device=cuda) for places in many]
    held = lengths[0].clone()

    def both_ways() -> tuple[Tensor, ...]:
        y = causal_attention(*leaves, held, window)
        return (y, *torch.autograd.grad(y, leaves, dy))

    both_ways()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both_ways()
    for places in lengths:
        held.copy_(places)
        graph.replay()
        exact = [x.detach().double().requires_grad_() for x in leaves]
        y = reference.causal_attention(*exact, places, window)
        expected = (y, *torch.autograd.grad(y, exact, dy.double()))
        for a, b in zip(found, expected, strict=True):
            assert (a.double() - b).norm() < 0.01 * b.norm()


def test_a_query_sees_no_later_key(installed):
    q, k, v = made(1, 20, 2, 1, 16, installed)
    before = causal_attention(q, k, v)
    k[:, 12:], v[:, 12:] = 5.0, -3.0
    after = causal_attention(q, k, v)
    torch.testing.assert_close(after[:, :12], before[:, :12], rtol=0, atol=0)
    assert not torch.equal(after[:, 12:], before[:, 12:])


def test_any_strides(installed):
    """Heads cut out of one product, and channels that are not neighbours."""
    whole = torch.randn(2, 9, 4 * 16 + 2 * 16, device=installed).half()
    q, k = whole[..., :64].unflatten(-1, (4, 16)), whole[..., 64:].unflatten(-1, (2, 16))
    v = torch.randn(2, 9, 16, 2, device=installed).half().transpose(2, 3)
    assert_matches(causal_attention, reference.attention, [q, k, v])


def test_any_alignment(installed):
    """Starts and steps that no copy engine addresses: odd offsets, odd rows, and odd steps of a single batch."""
    wide = [torch.randn(3, 9, n, 21, device=installed).half() for n in (4, 2, 2)]
    assert_matches(causal_attention, reference.attention, [x[..., 3:19] for x in wide])
    long = torch.randn(3, 9 * 2 * 16 + 1, device=installed).half()
    single = long[1:2, :-1].view(1, 9, 2, 16)
    assert_matches(causal_attention, reference.attention, [single] * 3)


def test_an_unaligned_gradient(installed):
    leaves = [x.requires_grad_() for x in made(1, 10, 2, 2, 8, installed)]
    dy = torch.randn(1, 10, 2, 11, device=installed).half()[..., 1:9]
    found = torch.autograd.grad(causal_attention(*leaves), leaves, dy)
    expected = torch.autograd.grad(reference.attention(*leaves), leaves, dy)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=5e-3)


def test_a_gradient_of_any_layout(installed):
    leaves = [x.requires_grad_() for x in made(1, 10, 2, 2, 8, installed)]
    dy = torch.randn(1, 10, 8, 2, device=installed).half().transpose(2, 3)
    found = torch.autograd.grad(causal_attention(*leaves), leaves, dy)
    expected = torch.autograd.grad(reference.attention(*leaves), leaves, dy)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=5e-3)


def test_compiles_whole_and_once(installed):
    counters.clear()
    leaves = [x.requires_grad_() for x in made(2, 12, 4, 2, 16, installed)]
    compiled = torch.compile(causal_attention, fullgraph=True)
    for _ in range(3):
        y = compiled(*leaves)
        torch.autograd.grad(y.sum(), leaves)
    torch.testing.assert_close(y, causal_attention(*leaves), rtol=2e-3, atol=2e-3)
    assert counters["stats"]["unique_graphs"] == 1


def test_evaluation_is_one_graph(installed):
    torch._dynamo.reset()
    counters.clear()
    tensors = made(2, 12, 4, 2, 16, installed)
    with torch.no_grad():
        found = torch.compile(causal_attention, fullgraph=True)(*tensors)
        torch.testing.assert_close(found, causal_attention(*tensors), rtol=2e-3, atol=2e-3)
    assert counters["stats"]["unique_graphs"] == 1


def test_function_transforms_take_the_reference(installed, monkeypatch):
    q, k, v = made(1, 6, 4, 2, 8, installed)
    monkeypatch.setattr(flash, "_attention", None)
    found, expected = (
        torch.func.grad(lambda q: f(q, k, v).float().square().sum())(q)  # noqa: B023
        for f in (causal_attention, reference.attention)
    )
    torch.testing.assert_close(found, expected)


def test_forward_mode_is_refused_and_not_dropped(installed):
    """By PyTorch, whose fused attention has no such derivative: the library's op would return no tangent."""
    q, k, v = made(1, 6, 4, 2, 8, installed)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward AD"):
        causal_attention(forward_ad.make_dual(q, torch.randn_like(q)), k, v)


def test_registered_as_pytorch_wants_it(installed):
    tensors = [x.requires_grad_() for x in made(2, 6, 4, 2, 8, installed)]
    torch.library.opcheck(flash._attention, tensors)
    q, k, v = (x.detach() for x in tensors)
    y, lse = flash._attention(q, k, v)
    torch.library.opcheck(flash._backward, (torch.randn_like(y), q, k, v, y, lse))


def test_no_second_derivative(installed):
    leaves = [x.requires_grad_() for x in made(1, 6, 2, 2, 8, installed)]
    (dq,) = torch.autograd.grad(causal_attention(*leaves).sum(), leaves[:1], create_graph=True)
    with pytest.raises(ParbankError, match=r"causal_attention has no second derivative.*PyTorch's own.*none either"):
        torch.autograd.grad(dq.sum(), leaves[1:])


@pytest.mark.parametrize("inside", [False, True], ids=["PyTorch's", "the library's"])
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda q, k, v: causal_attention(q, k[:, :4], v[:, :4]), "do not fit"),
        (lambda q, k, v: causal_attention(q, k, v[:, :4]), "do not fit"),
        (lambda q, k, v: causal_attention(q, k[..., :4], v[..., :4]), "do not fit"),
        (lambda q, k, v: causal_attention(q[:, :, :3], k, v), "heads a multiple of kv_heads"),
        (lambda q, k, v: causal_attention(q, k[:, :, :0], v[:, :, :0]), "do not fit"),
        (lambda q, k, v: causal_attention(q, *(x.expand(2, -1, -1, -1) for x in (k, v))), "do not fit"),
        (lambda q, k, v: causal_attention(q[0], k[0], v[0]), "do not fit"),
        (lambda q, k, v: causal_attention(q.int(), k.int(), v.int()), "q is torch.int32; it must be floating"),
        (lambda q, k, v: causal_attention(q, k.float(), v), "cast them to one type"),
        (lambda q, k, v: causal_attention(q, k.to("meta"), v.to("meta")), "move them to one device"),
    ],
)
def test_wrong_arguments_are_named(call, said, inside, installed, monkeypatch):
    """The same, and in the same words, whichever of the two would be taken."""
    monkeypatch.setattr(flash, "AVAILABLE", inside)
    with pytest.raises(ParbankError, match=said):
        call(*made(1, 6, 4, 2, 8, installed))


def refused(device: torch.device) -> list[list[Tensor]]:
    """What the library does not take: float32, a head of seven, no rows, a head wider than 256."""
    return [
        made(1, 5, 2, 1, 8, device, torch.float32),
        made(1, 5, 2, 1, 7, device),
        made(0, 5, 2, 1, 8, device),
        made(1, 5, 2, 1, 264, device),
    ]


@pytest.mark.parametrize("which", range(4))
def test_what_it_does_not_take_goes_to_pytorch(which, installed, monkeypatch):
    tensors = refused(installed)[which]
    monkeypatch.setattr(flash, "_attention", None)
    torch.testing.assert_close(causal_attention(*tensors), reference.attention(*tensors))


def test_the_plain_path_is_pytorchs(installed, monkeypatch):
    monkeypatch.setattr(flash, "_attention", None)
    tensors = made(1, 5, 2, 1, 8, installed)
    with backend.use_backend("reference"):
        torch.testing.assert_close(causal_attention(*tensors), reference.attention(*tensors))
    monkeypatch.setattr(flash, "AVAILABLE", False)
    torch.testing.assert_close(causal_attention(*tensors), reference.attention(*tensors))


def test_a_library_of_another_form_is_not_used(library, caplog):
    assert flash._knows("fwd", {"q", "k", "v"})
    assert not flash._knows("fwd", {"q", "sink"})
    assert "its fwd has no sink" in caplog.text


BROKEN = {
    "half_installed": "import a_library_that_is_not_here",
    "of_another_build": "raise OSError('undefined symbol')",
    "flash_attention_2": "def flash_attn_func(q, k, v): ...",
    "stub": "__spec__ = None",
}


def test_a_library_that_does_not_load_is_left_alone(tmp_path):
    """Files that are not what is needed: a warning each and no error, which the import of parbank would pass on. In a process
    of its own, whose `torch.ops` have no functions of that name, nor a GPU for them."""
    for name, text in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(text)
    script = "from parbank.ops import flash\n" + "".join(
        f"flash.MODULE = {name!r}\nassert not flash._load()\n" for name in ("absent", *BROKEN, *BROKEN)
    )
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("installed but cannot be used") == 2 * len(BROKEN)
    for said in ("a_library_that_is_not_here", "undefined symbol", "_OpNamespace", "__spec__ is None"):
        assert said in run.stderr


def test_exact_definition():
    """PyTorch's own, which the rest is held against, against the sum written out."""
    q, k, v = made(1, 9, 2, 1, 8, torch.device("cpu"), torch.float64)
    s = flash_stand_in.scores(q, k, 8**-0.5).double()
    expected = torch.einsum("bhij,bjhd->bihd", F.softmax(s, -1), v.repeat_interleave(2, 2))
    torch.testing.assert_close(reference.attention(q, k, v), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4, 2048, 8, 4, 64), (2, 1023, 8, 1, 64), (1, 127, 6, 6, 128)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_as_exact_as_torch(shape, dtype, installed):
    """PyTorch's own: cuDNN, on the same input."""
    assert_as_exact_as_torch(causal_attention, reference.attention, made(*shape, installed, dtype))


@pytest.mark.gpu
def test_same_bits_when_asked_for(installed):
    """As with PyTorch's own: the order of the sums of dq is free unless deterministic algorithms are asked for."""
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_bits(causal_attention, made(2, 1024, 8, 4, 64, installed, torch.bfloat16))
    finally:
        torch.use_deterministic_algorithms(False)
