"""The ops inside the compiler: whole graphs, no recompilation, and what is said where something cannot work."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checking import evaluate
from torch import Tensor, nn
from torch._dynamo.utils import counters

from parbank import ops
from parbank.errors import ParbankError
from parbank.ops import backend, reference

COMPILER = "inductor" if torch.cuda.is_available() else "aot_eager"  # the interpreter is Python: nothing to generate

Case = tuple[Callable[..., Any], Callable[..., Any], list[Tensor]]


def cases(device: torch.device) -> dict[str, Case]:
    """Every op as a function of tensors, its reference, and small inputs."""
    torch.manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    targets = torch.tensor([0, 4, -100, 2], device=device)
    cos, sin = made(4, 2).cos(), made(4, 2).sin()
    arguments: dict[str, tuple[list[Tensor], tuple[Any, ...]]] = {
        "rms_norm": ([made(4, 8), made(8)], (0.5,)),
        "add_rms_norm": ([made(4, 8), made(4, 8)], (0.5,)),
        "mix_rms_norm": ([made(4, 8), made(4, 8), made(8), made(8)], (0.5,)),
        "add_mix_rms_norm": ([*(made(4, 8) for _ in range(3)), made(8), made(8)], ()),
        "add_mix_rms_norm, skipped": ([*(made(4, 8) for _ in range(3)), made(8), made(8), made(4, 8), made(8)], (0.5,)),
        "smear": ([made(2, 4, 8), made(8)], (made(2, 4) > 0,)),
        "leaky_relu_squared": ([made(4, 8)], (0.5,)),
        "mlp": ([made(4, 8), made(16, 8), made(8, 16)], (0.5,)),
        "softcap_cross_entropy": ([made(4, 5)], (targets, 30.0)),
        "linear_softcap_cross_entropy": ([made(4, 8), made(5, 8)], (targets, 30.0)),
        "qk_norm_rope": ([made(1, 4, 2, 8), made(1, 4, 1, 8), made(2)], (cos, sin)),
        "remove_own_value": ([made(1, 4, 4, 8), made(1, 4, 2, 8)], ()),
        "qkv_norm_rope": ([made(1, 4, 8), made(16, 8), made(8, 8), made(8, 8)], (2, made(2).detach(), cos, sin)),
        "stream_qkv": ([made(1, 4, 8), made(16, 8), made(8, 8), made(8, 8)], (2, made(2).detach(), cos, sin)),
        "add_linear": ([made(4, 8), made(4, 5), made(8, 5)], ()),
        "residual_mlp": ([made(4, 8), made(16, 8), made(8, 16)], (0.5,)),
    }

    def bound(module: Any, name: str, rest: tuple[Any, ...]) -> Callable[..., Any]:
        def call(*tensors: Tensor) -> Any:
            wide = [t.to(tensors[0].dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in rest]
            return getattr(module, name.split(",", maxsplit=1)[0])(*tensors, *wide)

        return call

    return {name: (bound(ops, name, rest), bound(reference, name, rest), i) for name, (i, rest) in arguments.items()}


NAMES = list(cases(torch.device("cpu")))


@pytest.fixture(params=NAMES)
def case(request, device) -> Case:
    torch._dynamo.reset()
    counters.clear()
    return cases(device)[request.param]


def test_training_is_one_graph_and_compiled_once(case):
    fn, _, inputs = case
    compiled = torch.compile(fn, fullgraph=True, backend=COMPILER)
    for step in range(3):
        moved = [x + step for x in inputs]
        for found, expected in zip(evaluate(compiled, moved), evaluate(fn, moved), strict=True):
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_evaluation_is_one_graph(case):
    fn, _, inputs = case
    with torch.no_grad():
        found = torch.compile(fn, fullgraph=True, backend=COMPILER)(*inputs)
        torch.testing.assert_close(found, fn(*inputs))
    assert counters["stats"]["unique_graphs"] == 1


def test_a_second_derivative_is_refused_in_words(case):
    fn, plain, inputs = case

    def twice(f: Callable[..., Any]) -> None:
        leaves = [x.clone().requires_grad_() for x in inputs]
        found = f(*leaves)
        outputs = [found] if isinstance(found, Tensor) else list(found)
        first = torch.autograd.grad(sum((y * y).sum() for y in outputs), leaves, create_graph=True)
        torch.autograd.grad(sum((g * g).sum() for g in first), leaves)

    twice(plain)
    with pytest.raises(ParbankError, match=r"no second derivative.*use_backend"):
        twice(fn)


def test_autocast_around_an_op_breaks_no_gradient(case, device):
    """Kernels compute in the dtype they are given; a product of PyTorch's inside an op must not be cast behind its back."""
    fn, _, inputs = case

    def cast(*leaves: Tensor) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return fn(*leaves)

    for found, expected in zip(evaluate(cast, inputs), evaluate(fn, inputs), strict=True):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.float(), b, rtol=0.05, atol=0.05 * b.abs().max().item())


@pytest.mark.parametrize("squared", [True, False])
def test_a_second_derivative_of_one_input_is_right_or_refused(case, squared):
    """What forward keeps has no history: where one gradient alone is asked for, or what reaches the backward is a constant, a
    derivative through that must not go missing without a word."""
    fn, plain, inputs = case
    heads: list[Tensor] = []

    def twice(f: Callable[..., Any], index: int) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        found = f(*leaves)
        outputs = [found] if isinstance(found, Tensor) else list(found)
        heads.extend(torch.randn_like(y) for y in outputs[len(heads) :])
        loss = sum((y * y if squared else y * head).sum() for y, head in zip(outputs, heads, strict=True))
        (first,) = torch.autograd.grad(loss, leaves[index], create_graph=True)
        if not first.requires_grad:
            return [torch.zeros_like(x) for x in leaves]
        return list(torch.autograd.grad((first * first).sum(), leaves, materialize_grads=True))

    for index in range(len(inputs)):
        expected = twice(plain, index)
        try:
            found = twice(fn, index)
        except ParbankError as error:
            if "no second derivative" not in str(error):
                raise
            continue
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_function_transforms_take_the_reference(case):
    fn, plain, inputs = case

    def total(f: Callable[..., Any]) -> Callable[..., Tensor]:
        def call(x: Tensor) -> Tensor:
            found = f(x, *inputs[1:])
            return found.sum() if isinstance(found, Tensor) else found[0].sum() + found[1].sum()

        return call

    torch.testing.assert_close(torch.func.grad(total(fn))(inputs[0]), torch.func.grad(total(plain))(inputs[0]))


def opcheck_arguments(device: torch.device) -> dict[str, tuple[Any, ...]]:
    def made(*shape: int, grad: bool = True) -> Tensor:
        return torch.randn(shape, device=device, requires_grad=grad)

    targets = torch.tensor([0, 4, -100, 2], device=device)
    cos, sin = made(4, 2, grad=False), made(4, 2, grad=False)
    signs = torch.zeros(4, 8, dtype=torch.uint8, device=device)
    q, k, back_q, back_k = (
        made(1, 4, 2, 8),
        made(1, 4, 1, 8),
        made(1, 4, 2, 8, grad=False),
        made(1, 4, 1, 8, grad=False),
    )
    flat, row = made(4, 8, grad=False), made(4, grad=False)
    x, w = made(4, 8), made(5, 8)
    return {
        "rms_norm": (x, made(8), 0.5, 1e-6),
        "rms_norm_backward": (flat, flat, None, row, 0.5),
        "add_rms_norm": (x, made(4, 8), 0.5, 1e-6),
        "add_rms_norm_backward": (flat, flat, flat, row, 0.5),
        "add_rms_norm_backward, norm alone": (None, flat, flat, row, 0.5),
        "mix_rms_norm": (x, None, None, made(4, 8), None, made(8), made(8), 0.5, 1e-6, False),
        "mix_rms_norm, added": (x, made(4, 8), None, made(4, 8), None, made(8), made(8), 0.5, 1e-6, False),
        "mix_rms_norm, skipped": (x, made(4, 8), made(4, 8), made(4, 8), made(8), made(8), made(8), 0.5, 1e-6, False),
        "mix_rms_norm, late": (flat, None, flat, flat, flat[2], flat[0], flat[1], 0.5, 1e-6, True),
        "row_norms": (flat, 1e-6),
        "row_norms_backward": (flat, flat, flat, row),
        "mlp_up": (flat, made(16, 8, grad=False), row, 0.5, 0.5),
        "mix_rms_norm_backward": (None, flat, flat, flat, None, flat, None, flat[0], flat[1], row, 0.5, False),
        "mix_rms_norm_backward, skipped": (
            flat,
            flat,
            flat,
            flat,
            flat,
            flat,
            flat[2],
            flat[0],
            flat[1],
            row,
            0.5,
            False,
        ),
        "smear": (made(2, 4, 8), made(8), targets.view(2, 2).repeat(1, 2) > 0),
        "smear_backward": (flat[None], flat[None], flat[0], targets[None] > 0),
        "leaky_relu_squared": (x, 0.5),
        "leaky_relu_squared_backward": (flat, flat, 0.5),
        "mlp": (x, made(16, 8), made(8, 16), 0.5),
        "mlp_down_backward": (flat, made(8, 16, grad=False), made(4, 16, grad=False).abs(), signs, None, 1.0, 0.5),
        "mlp_down_backward, late": (flat, made(8, 16, grad=False), made(4, 16, grad=False).abs(), signs, row, 0.5, 0.5),
        "softcap_cross_entropy": (made(4, 5), targets, 30.0, -100),
        "softcap_cross_entropy_mean": (made(4, 5), targets, 30.0, -100),
        "softcap_cross_entropy_backward": (row, made(4, 5, grad=False), targets, row, 30.0, -100),
        "linear_softcap_losses": (x, w, targets, 30.0, -100),
        "linear_softcap_losses_backward": (row, flat, w.detach(), targets, row, 30.0, -100, True, True),
        "linear_softcap_loss_sum": (x, w, targets, row[0].abs().clone(), 30.0, -100, True, True),
        "qk_norm_rope": (q, k, made(2), cos, sin, 1e-6),
        "qk_norm_rope_backward": (back_q, back_k, q.detach(), k.detach(), flat[0, :2], cos, sin, 1e-6),
        "remove_own_value": (q, k),
        "remove_own_value_backward": (back_q, q.detach(), k.detach(), True, True),
        "remove_own_value_backward, y alone": (back_q, q.detach(), k.detach(), True, False),
        "remove_own_value_backward, v alone": (back_q, q.detach(), k.detach(), False, True),
        "split_qkv_norm_rope": (made(1, 4, 32), 2, 1, made(2), cos, sin, None, None, 1.0, 1e-6),
        "split_qkv_norm_rope_backward": (
            *(back_q, back_k[None], back_k[None].clone(), back_k.clone(), made(1, 4, 32).detach(), 2, 1, flat[0, :2]),
            *(cos, sin, row[None], back_k.clone(), 0.5, 1e-6),
        ),
    }


@pytest.mark.parametrize("name", list(opcheck_arguments(torch.device("cpu"))))
def test_opcheck(name, device):
    op = getattr(torch.ops.parbank, name.split(",")[0])
    torch.library.opcheck(op.default, opcheck_arguments(device)[name])


class Block(nn.Module):
    """A language model of one block in which every op has its place."""

    def __init__(self, vocab: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.embedding = nn.Parameter(torch.randn(vocab, width))
        self.qkv = nn.Parameter(torch.randn(3 * width, width) / width**0.5)
        self.up = nn.Parameter(torch.randn(3 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(3 * width, width) / (3 * width) ** 0.5)
        self.gain = nn.Parameter(torch.full((heads,), 1.5))
        self.mix = nn.Parameter(torch.stack([torch.ones(width), torch.full((width,), 0.1)]))
        angles = torch.arange(64)[:, None] / 10.0 ** torch.arange(2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        batch, time = ids.shape
        start = ops.rms_norm(self.embedding.to(dtype)[ids])
        x, normed = ops.mix_rms_norm(start, start, self.mix[0], self.mix[1])
        qkv = F.linear(normed, self.qkv.to(dtype)).view(batch, time, 3 * self.heads, self.head_width)
        q, k, v = qkv.split(self.heads, dim=2)
        q, k = ops.qk_norm_rope(q, k, self.gain, self.cos[:time], self.sin[:time])
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + ops.mlp(ops.rms_norm(x), self.up.to(dtype), self.down.to(dtype).t(), 0.5)
        return ops.linear_softcap_cross_entropy(ops.rms_norm(x), self.embedding.to(dtype), targets, 30.0)


def train(name: str, device: torch.device, dtype: torch.dtype, size: tuple[int, ...], steps: int) -> list[float]:
    """Losses of a few compiled training steps with the ops on one backend."""
    torch._dynamo.reset()
    counters.clear()
    vocab, width, heads, batch, time = size
    torch.manual_seed(0)
    model = Block(vocab, width, heads).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with backend.use_backend(name):
        compiled = torch.compile(model, fullgraph=True, backend=COMPILER)
        for _ in range(steps):
            tokens = torch.randint(vocab, (batch, time + 1), device=device)
            loss = compiled(tokens[:, :-1], tokens[:, 1:], dtype)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert counters["stats"]["unique_graphs"] == 1
    return losses


def test_a_training_step_with_ops_on_and_off_agrees(device):
    size = (11, 8, 2, 2, 5)
    on, off = (train(name, device, torch.float32, size, 3) for name in ("triton", "reference"))
    assert on == pytest.approx(off, rel=1e-4)


@pytest.mark.gpu
def test_a_training_run_in_bfloat16_with_ops_on_and_off_agrees(device):
    size = (1024, 256, 4, 8, 64)
    on, off = (train(name, device, torch.bfloat16, size, 30) for name in ("triton", "reference"))
    assert on == pytest.approx(off, rel=1e-2)


def test_a_deep_residual_stream_compiles(device):
    """By Inductor itself. Every layer reads both outputs of the one before, so 2^28 paths lead to an op that is met for the
    first time at the end; old versions of PyTorch write them all down (see checks.py) and would not be done this year."""

    def deep(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(28):
            x, y = ops.add_rms_norm(x, y)
        return ops.leaky_relu_squared(x, 0.5), y

    torch._dynamo.reset()
    x, y = (torch.randn(3, 16, device=device) for _ in range(2))
    with (
        backend.use_backend("triton"),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        for found, expected in zip(torch.compile(deep, fullgraph=True)(x, y), deep(x, y)):
            torch.testing.assert_close(found, expected)
