"""The MLP with its activation inside the products, held against the reference."""

import contextlib
import importlib
from collections.abc import Iterator

import pytest
import torch
from aot import Job, build
from checking import assert_as_exact_as_torch, assert_matches, assert_same_bits
from torch import Tensor

from parbank.errors import ParbankError
from parbank.ops import backend, configs, mlp, reference

module = importlib.import_module("parbank.ops.mlp")  # the package's attribute of that name is the function
TABLES = ("mlp_up", "mlp_down_backward", "mlp_up_float32", "mlp_down_backward_float32")


@contextlib.contextmanager
def forced(launch: configs.Launch) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for table in TABLES:
            stack.enter_context(configs.force(table, launch))
        yield


def weights(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    *rows, width, hidden = shape
    x = torch.randn(*rows, width, device=device)
    up, down = torch.randn(hidden, width, device=device), torch.randn(width, hidden, device=device)
    return [x.to(dtype), (up / max(width, 1) ** 0.5).to(dtype), (down / max(hidden, 1) ** 0.5).to(dtype)]


def check(inputs: list[Tensor], slope: float = 0.5, how=assert_matches) -> None:
    how(lambda *i: mlp(*i, slope), lambda *i: reference.mlp(*i, slope), inputs)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 7, 127), (5, 16, 64), (1, 24, 1023), (0, 8, 16), (3, 0, 5)])
def test_matches_the_reference(shape, dtype, device, poison):
    check(weights(shape, dtype, device))


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("per_sm", [0, 1])
@pytest.mark.parametrize("early", [False, True])
def test_every_way_to_launch(tma, split, per_sm, early, device, poison):
    """Several tiles each way, the last ones partly filled; through descriptors where the strides allow."""
    with forced(module.launch_config(64, 64 * split, 16, 4, 2, tma=tma, split=split, per_sm=per_sm, early=early)):
        check(weights((100, 24, 168), torch.float32, device))


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_whole_tiles(tma, early, device, poison):
    with forced(module.launch_config(64, 128, 16, 4, 2, tma=tma, split=2, early=early)):
        check(weights((128, 32, 256), torch.float16, device))


@pytest.mark.parametrize("slope", [0.0, -0.5, 1.0])
def test_any_slope(slope, device):
    check(weights((6, 8, 70), torch.float32, device), slope)


@pytest.mark.parametrize("tma", [False, True])
def test_transposed_weights_are_read_in_place(tma, device, poison):
    def transposed(op):
        return lambda x, up, down: op(x, up.t(), down.t(), 0.5)

    x, up, down = weights((20, 16, 72), torch.float32, device)
    with forced(module.launch_config(64, 64, 16, 4, 2, tma=tma)):
        assert_matches(transposed(mlp), transposed(reference.mlp), [x, up.t().contiguous(), down.t().contiguous()])


def test_gradients_come_in_the_layout_of_the_weight(device):
    x, up, down = weights((4, 8, 16), torch.float32, device)
    bank = down.t().contiguous().requires_grad_()
    seen: list[tuple[int, ...]] = []
    view = bank.t()
    view.register_hook(lambda grad: seen.append(grad.stride()))
    mlp(x, up, view, 0.5).sum().backward()
    assert seen == [view.stride()]


@pytest.mark.parametrize("cut", [lambda t: t[:, :8], lambda t: t[:, 4:20:2], lambda t: t.t()[:8].t()])
def test_strided_input(cut, device):
    _, up, down = weights((6, 8, 16), torch.float32, device)
    wide = torch.randn(6, 20, device=device)

    def through(op):
        return lambda w, u, d: op(cut(w), u, d, 0.5)

    assert_matches(through(mlp), through(reference.mlp), [wide, up, down])


def test_only_what_is_asked_for_is_computed(device):
    x, up, down = weights((6, 8, 16), torch.float32, device)
    down.requires_grad_()
    mlp(x, up, down, 0.5).sum().backward()
    exact = reference.mlp(x, up, down, 0.5)
    torch.testing.assert_close(down.grad, torch.autograd.grad(exact.sum(), down)[0])


def test_what_is_kept_for_backward(device):
    """x, the weights, the activation, and one bit per element of it."""
    x, up, down = (t.requires_grad_() for t in weights((64, 32, 128), torch.float16, device))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        mlp(x, up, down, 0.5)
    inputs = {x.data_ptr(), up.data_ptr(), down.data_ptr()}
    own = [t for t in kept if t.data_ptr() not in inputs]
    assert sum(t.nbytes for t in own) == 64 * 128 * 2 + 64 * 128 // 8


def test_float32_is_left_to_cublas_unless_asked_for(device, monkeypatch):
    inputs = weights((4, 8, 16), torch.float32, device)
    monkeypatch.setattr(backend._state, "strict", False)
    assert torch.equal(mlp(*inputs, 0.5), reference.mlp(*inputs, 0.5))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"up": (16, 7)}, "do not fit"),
        ({"down": (8, 15)}, "do not fit"),
        ({"up": (16,)}, "they must be"),
    ],
)
def test_wrong_shapes_are_named(change, said, device):
    shapes = {"x": (4, 8), "up": (16, 8), "down": (8, 16)} | change
    with pytest.raises(ParbankError, match=said):
        mlp(*(torch.randn(shape, device=device) for shape in shapes.values()), 0.5)


def test_mixed_dtypes_are_named(device):
    x, up, down = weights((4, 8, 16), torch.float32, device)
    with pytest.raises(ParbankError, match=r"w_up torch.float16.*cast"):
        mlp(x, up.half(), down, 0.5)


def test_reference_gradients():
    inputs = [t.double().requires_grad_() for t in weights((3, 4, 5), torch.float64, torch.device("cpu"))]
    assert torch.autograd.gradcheck(lambda *i: reference.mlp(*i, 0.5), inputs)


def job(
    arch: str,
    table: str,
    launch: configs.Launch,
    *,
    k_major: bool,
    even: bool = False,
    odd: tuple[str, ...] = (),
    factored: bool = False,
) -> Job:
    """`odd`: sizes that are no multiples of 16; `factored`: rows are multiplied by what a norm left to do."""
    kind = "fp32" if table.endswith("float32") else "bf16"
    backward = "down" in table
    tma = launch.blocks["TMA"]
    m, n, k = (launch.blocks[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    part = [m, n // launch.blocks["SPLIT"]]
    shapes = {"left": [m, k], "right": [n, k] if k_major else [k, n], "out": part, "a": part}
    constexprs = {"K_MAJOR": k_major, "BACKWARD": backward, "EVEN": even, "FACTORED": factored, **launch.blocks}
    constexprs["stride_k" if k_major else "stride_n"] = 1
    if not backward:
        constexprs["a"] = None
        del shapes["a"]
    signature = {name: f"tensordesc<{kind}{block}>" if tma else f"*{kind}" for name, block in shapes.items()}
    if backward and launch.blocks["EARLY"]:
        signature["a"] = f"*{kind}"
    signature |= dict.fromkeys(("rows", "cols", "depth", "stride_l", "stride_n" if k_major else "stride_k"), "i32")
    signature |= {"signs": "*u8", "slope": "fp32", "inverse": "*fp32", "scale": "fp32"}
    return Job(
        "parbank.ops.mlp:_mlp_product_kernel",
        signature,
        constexprs,
        configs.ARCHITECTURES[arch],
        launch.num_warps,
        launch.num_stages,
        launch.options,
        [name for name, kind in signature.items() if (kind[0] == "*" or kind == "i32") and name not in odd],
    )


@pytest.mark.slow
def test_every_config_compiles_without_spills():
    jobs = []
    for arch in configs.ARCHITECTURES:
        for table in TABLES:
            # A weight of a bank is stored either way round; w_up comes with its depth contiguous, w_down with either.
            for k_major in (True, False) if table == "mlp_down_backward" else (True,):
                for _, launch in configs.tables()[table][arch]:
                    if "PINGPONG" in launch.blocks:  # another kernel: test_mlp_hopper.py
                        continue
                    jobs.append(job(arch, table, launch, k_major=k_major, even=True))
                    jobs.append(job(arch, table, launch, k_major=k_major, even=True, factored=True))
                    if launch.blocks["EARLY"]:  # columns are multiples of 16, or it is not early
                        jobs.append(job(arch, table, launch, k_major=k_major, odd=("rows", "depth")))
                    late = module.without_early(launch) if launch.blocks["EARLY"] else launch
                    if late.blocks["TMA"]:
                        jobs.append(job(arch, table, late, k_major=k_major, odd=("rows", "cols", "depth")))
            # Where the copy engine cannot read the operands, every architecture falls back on sm80's table. (Columns that are
            # no multiple of 16 make it spill: the activation and its signs are then read a number at a time.)
            plain = configs.tables()[table]["sm80"][-1][1]
            jobs.append(job(arch, table, plain, k_major=True))
    for each, built in zip(jobs, build(jobs), strict=True):
        assert built.shared <= configs.SHARED_LIMIT[f"sm{each.capability}"], each
        described = each.constexprs["TMA"]
        assert built.stack == 0 or (each.capability != 90 and not described), each


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 512, 1536), (999, 128, 1000), (127, 1023, 77)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_as_exact_as_torch(shape, dtype, device):
    """Not in float32: there the kernel adds up in one chain and is less exact than cuBLAS (3.7x at depth 1023), one more
    reason why float32 takes the reference unless the kernel is asked for by name."""
    check(weights(shape, dtype, device), how=assert_as_exact_as_torch)


@pytest.mark.gpu
def test_as_exact_as_torch_with_a_transposed_weight(device):
    x, up, down = weights((2048, 512, 1536), torch.bfloat16, device)
    assert_as_exact_as_torch(
        lambda x, u, d: mlp(x, u, d.t(), 0.5),
        lambda x, u, d: reference.mlp(x, u, d.t(), 0.5),
        [x, up, down.t().contiguous()],
    )


@pytest.mark.gpu
def test_same_bits_every_time(device):
    inputs = weights((4096, 512, 1536), torch.bfloat16, device)
    assert_same_bits(lambda *i: mlp(*i, 0.5), inputs)


@pytest.mark.gpu
def test_more_than_two_to_the_31_activations(device):
    x, up, down = weights((2**20 + 5, 64, 2056), torch.bfloat16, device)
    torch.testing.assert_close(mlp(x, up, down, 0.5)[-5:], reference.mlp(x[-5:], up, down, 0.5), rtol=3e-2, atol=3e-2)
