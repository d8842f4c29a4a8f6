"""The symmetric products: interpreter against reference, the compiler's view of them, and what the GPU must hold."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from aot import Job, build
from checking import assert_as_exact_as_torch, assert_same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from parbank import ops
from parbank.errors import ParbankError
from parbank.ops import configs, reference, symmetric
from parbank.ops.backend import use_backend

OPS = [name + suffix for name in ("symmetric", "product") for suffix in ("", "_plain")]
# Tiles small enough that the interpreter is quick and every size has whole, cut, diagonal and off-diagonal ones.
SMALL = [
    symmetric._launch_config(32, 32, 16, 4, 2),
    symmetric._launch_config(16, 32, 32, 4, 2),
    symmetric._launch_config(16, 32, 16, 4, 2, "tma", "early_c"),
]
SIZES = [(1, 1), (7, 33), (40, 16), (64, 48), (127, 5), (16, 1)]


@contextlib.contextmanager
def forced(launch: configs.Launch) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for op in OPS:
            stack.enter_context(configs.force(op, launch))
        yield


@pytest.fixture(params=SMALL, ids=["square", "wide", "tma"])
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    with forced(request.param):
        yield


def symmetric_matrix(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    x = torch.randn(*shape, dtype=torch.float64, device=device)
    return ((x + x.mT) / (2 * shape[-1] ** 0.5)).to(dtype)


def commuting(m: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Three polynomials of one symmetric matrix, three matrices each."""
    base = symmetric_matrix(3, m, m, dtype=torch.float64, device=device)
    square = base @ base
    return base.to(dtype), (square + base).to(dtype), (square - base).to(dtype)


def assert_near(got: Tensor, exact: Tensor) -> None:
    """To one rounding of the result's dtype (and of a float32 sum), relative to the largest element."""
    assert got.shape == exact.shape
    if exact.numel():
        scale = max(exact.abs().max().item(), 1e-3)
        assert (got.double() - exact).abs().max().item() <= 2 * torch.finfo(got.dtype).eps * scale


@pytest.mark.usefixtures("tiles", "poison")
class TestAgainstReference:
    @pytest.mark.parametrize(("m", "k"), SIZES)
    def test_xxt(self, m: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        x = (torch.randn(2, m, k, device=device) / k**0.5).to(dtype)
        for view in (x, x.mT.contiguous().mT):  # rows contiguous, columns contiguous
            got = ops.xxt(view)
            assert_near(got, reference.xxt(x.double()))
            assert torch.equal(got, got.mT)

    @pytest.mark.parametrize("m", [1, 16, 33, 80])
    def test_ba_plus_caa(self, m: int, dtype: torch.dtype, device: torch.device) -> None:
        a = symmetric_matrix(2, m, m, dtype=dtype, device=device)
        for view in (a, a.mT):
            got = ops.ba_plus_caa(view, -4.775, 2.0315)
            assert_near(got, reference.ba_plus_caa(a.double(), -4.775, 2.0315))
            assert torch.equal(got, got.mT)

    @pytest.mark.parametrize("m", [1, 33, 80])
    def test_symmetric_product(self, m: int, dtype: torch.dtype, device: torch.device) -> None:
        a, b, c = commuting(m, dtype, device)
        # The upper half is the reference's; the lower one mirrors it, though rounded factors no longer quite commute.
        upper = reference.symmetric_product(a.double(), b.double(), c.double(), 0.5, -2.0).triu()
        got = ops.symmetric_product(a, b, c, alpha=0.5, beta=-2.0)
        assert_near(got.triu(), upper)
        assert torch.equal(got, got.mT)
        assert_near(ops.symmetric_product(a, b).triu(), (a.double() @ b.double()).triu())

    @pytest.mark.parametrize(("m", "n"), SIZES)
    def test_ax_plus_bx(self, m: int, n: int, dtype: torch.dtype, device: torch.device) -> None:
        x = torch.randn(2, m, n, device=device).to(dtype)
        b = (torch.randn(2, m, m, device=device) / m**0.5).to(dtype)
        exact = reference.ax_plus_bx(x.double(), b.double(), 3.4445)
        assert_near(ops.ax_plus_bx(x, b, 3.4445), exact)
        assert_near(ops.ax_plus_bx(x.mT.contiguous().mT, b.mT.contiguous().mT, 3.4445), exact)


@pytest.mark.usefixtures("poison")
class TestShapes:
    @pytest.mark.parametrize("shape", [(0, 4, 4), (3, 0, 0), (2, 0, 5, 3)])
    def test_nothing_in_nothing_out(self, shape: tuple[int, ...], device: torch.device) -> None:
        assert ops.xxt(torch.empty(shape, device=device)).shape == (*shape[:-1], shape[-2])

    @pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
    def test_one_matrix_of_nothing(self, shape: tuple[int, int], device: torch.device) -> None:
        x = torch.empty(shape, device=device)
        square = torch.randn(shape[0], shape[0], device=device)
        assert torch.equal(ops.xxt(x), reference.xxt(x))
        assert torch.equal(ops.ax_plus_bx(x, square, 2.0), x)
        assert ops.ba_plus_caa(x.new_empty(0, 0), 1.0, 2.0).shape == (0, 0)
        assert ops.symmetric_product(x.new_empty(0, 0), x.new_empty(0, 0)).shape == (0, 0)

    def test_empty_sum_is_zero(self, device: torch.device) -> None:
        assert torch.equal(ops.xxt(torch.empty(2, 5, 0, device=device)), torch.zeros(2, 5, 5, device=device))

    @pytest.mark.parametrize("shape", [(20, 8), (2, 3, 20, 8)])
    def test_any_number_of_leading_dimensions(self, shape: tuple[int, ...], device: torch.device) -> None:
        x = torch.randn(shape, device=device)
        assert_near(ops.xxt(x), reference.xxt(x.double()))

    def test_views(self, device: torch.device) -> None:
        x = torch.randn(4, 40, 60, device=device)
        for view in (x[::2, ::3, ::2], x.transpose(0, 1), x[:, 1:, 1:], x[0].expand(3, 40, 60)):
            assert_near(ops.xxt(view), reference.xxt(view.double()))

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(m=st.integers(1, 70), k=st.integers(1, 40), ratio=st.sampled_from([1, 2]))
    def test_every_element_is_written_once(self, m: int, k: int, ratio: int, device: torch.device) -> None:
        x = torch.randn(1, m, k, device=device)
        with forced(symmetric._launch_config(16, 16 * ratio, 16, 4, 2)):
            assert_near(ops.xxt(x), reference.xxt(x.double()))

    @pytest.mark.parametrize(("blocks", "count"), [((128, 128), 10), ((128, 256), 6), ((64, 64), 36)])
    def test_tile_counts(self, blocks: tuple[int, int], count: int) -> None:
        assert symmetric.count_tiles(512, 512, *blocks, True) == count


def test_wrong_input_is_refused(device: torch.device) -> None:
    square, wide = torch.zeros(4, 4, device=device), torch.zeros(4, 6, device=device)
    with pytest.raises(ParbankError, match=r"\(4,\)"):
        ops.xxt(torch.zeros(4, device=device))
    with pytest.raises(ParbankError, match=r"square.*\(4, 6\)"):
        ops.ba_plus_caa(wide, 1.0, 1.0)
    with pytest.raises(ParbankError, match="one shape, dtype and device"):
        ops.symmetric_product(square, square.half())
    with pytest.raises(ParbankError, match=r"ax_plus_bx.*\(6, 4\)"):
        ops.ax_plus_bx(wide.mT, square, 1.0)


# --- autograd and the compiler ---------------------------------------------------------------------------------------

CALLS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], int]] = {
    "xxt": (ops.xxt, reference.xxt, 1),
    "ba_plus_caa": (lambda a: ops.ba_plus_caa(a, -0.5, 2.0), lambda a: reference.ba_plus_caa(a, -0.5, 2.0), 1),
    "symmetric_product": (
        lambda a, b, c: ops.symmetric_product(a, b, c, 0.5, 2.0),
        lambda a, b, c: reference.symmetric_product(a, b, c, 0.5, 2.0),
        3,
    ),
    "ax_plus_bx": (lambda x, b: ops.ax_plus_bx(x, b, 1.5), lambda x, b: reference.ax_plus_bx(x, b, 1.5), 2),
}


def inputs_of(op: str, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.requires_grad_() for x in commuting(24, dtype, device)[: CALLS[op][2]]]


@pytest.mark.parametrize("op", CALLS)
def test_gradients_match_autograd_of_the_reference(op: str, device: torch.device) -> None:
    ours, plain, _ = CALLS[op]
    inputs = inputs_of(op, device)
    weight = torch.randn(3, 24, 24, device=device)  # not symmetric: the formulas must not lean on it
    got = torch.autograd.grad((ours(*inputs) * weight).sum(), inputs)
    expected = torch.autograd.grad((plain(*inputs) * weight).sum(), inputs)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", CALLS)
def test_double_backward_works(op: str, device: torch.device) -> None:
    seconds = []
    for call in CALLS[op][:2]:
        inputs = inputs_of(op, device)
        first = torch.autograd.grad(call(*inputs).square().sum(), inputs, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))
        torch.manual_seed(0)
    torch.testing.assert_close(seconds[0], seconds[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("op", CALLS)
def test_gradcheck_of_the_reference(op: str) -> None:
    inputs = [torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(CALLS[op][2])]
    assert torch.autograd.gradcheck(CALLS[op][1], inputs)


def test_opcheck(device: torch.device) -> None:
    a, b, c = (x.requires_grad_() for x in commuting(20, torch.float32, device))
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (symmetric._xxt, (torch.randn(2, 20, 12, device=device, requires_grad=True),)),
        (symmetric._ba_plus_caa, (a, -1.0, 2.0)),
        (symmetric._symmetric_product, (a, b, c, 1.0, 0.5)),
        (symmetric._symmetric_product, (a, b, None, 1.0, 0.0)),
        (symmetric._ax_plus_bx, (a, b, 2.0)),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op, arguments)


def step(x: Tensor) -> Tensor:
    """One step of Newton-Schulz: three ops in a row."""
    return ops.ax_plus_bx(x, ops.ba_plus_caa(ops.xxt(x), -4.775, 2.0315), 3.4445)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_compiles_whole_and_once(backend: str, device: torch.device) -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    with use_backend(backend):
        for _ in range(3):
            x = torch.randn(2, 24, 40, device=device).div_(40).requires_grad_()
            y = compiled(x)
            y.sum().backward()
            torch.testing.assert_close(y, step(x), rtol=1e-4, atol=1e-5)
            assert x.grad is not None
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_backend_switch_is_seen_by_compiled_code(device: torch.device) -> None:
    graphs: list[str] = []

    def record(module: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(" ".join(str(node.target) for node in module.graph.nodes))
        return module.forward

    compiled = torch.compile(ops.xxt, fullgraph=True, backend=record)
    x = torch.randn(2, 8, 8, device=device)
    with use_backend("triton"):
        compiled(x)
    with use_backend("reference"):
        compiled(x)
    assert "parbank.xxt" in graphs[0]
    assert "parbank" not in graphs[1]
    torch._dynamo.reset()


# --- ahead of time ---------------------------------------------------------------------------------------------------


def aot_jobs() -> list[tuple[str, Job]]:
    """Every shipped config for its architecture, in its easiest and its hardest use."""
    jobs = []
    for op in OPS:
        for arch in configs.ARCHITECTURES:
            for launch in {repr(row[1]): row[1] for row in configs.tables()[op][arch]}.values():
                jobs += [(arch, job(op, launch, arch, easy=easy)) for easy in (True, False)]
    return jobs


def job(op: str, launch: configs.Launch, arch: str, *, easy: bool) -> Job:
    """Easy: whole tiles, aligned, rows contiguous, float32 where the table serves it. Hard: none of that.

    A sum in the epilogue takes registers, so both have one.
    """
    plain = op.endswith("_plain")
    kind = "fp32" if plain and easy else "bf16"
    is_symmetric = op.startswith("symmetric")
    m, n, k = (launch.blocks[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    b_k_major = is_symmetric and easy
    constexprs: dict[str, Any] = {
        **launch.blocks,
        "A_K_MAJOR": easy,
        "B_K_MAJOR": b_k_major,
        "HAS_C": True,
        "SYMMETRIC": is_symmetric,
        "PRECISION": "ieee",
        "EVEN": easy,
        "c_c": 1,
    }
    signature = dict.fromkeys(("m", "n", "depth", "tiles", "a_b", "b_b", "c_b", "c_r"), "i32")
    signature |= {"alpha": "fp32", "beta": "fp32", "c": f"*{kind}"}
    for name, k_major in (("a", easy), ("b", b_k_major)):
        signature[f"{name}_r" if k_major else f"{name}_k"] = "i32"
        constexprs[f"{name}_k" if k_major else f"{name}_r"] = 1
    for name, block in (("a", [m, k] if easy else [k, m]), ("b", [n, k] if b_k_major else [k, n]), ("out", [m, m])):
        signature[name] = f"tensordesc<{kind}{[1, *block]}>" if launch.blocks["TMA"] else f"*{kind}"
    aligned = (
        [] if plain and not easy else [n for n, t in signature.items() if t[0] == "*" or (t == "i32" and n != "tiles")]
    )
    return Job(
        kernel="parbank.ops.symmetric:_symmetric_product_kernel",
        signature=signature,
        constexprs=constexprs,
        capability=configs.ARCHITECTURES[arch],
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        options=launch.options,
        aligned=aligned,
    )


@pytest.mark.slow
def test_every_shipped_config_compiles_without_spills() -> None:
    pytest.importorskip("triton")
    jobs = aot_jobs()
    for (arch, made), built in zip(jobs, build([made for _, made in jobs])):
        assert built.shared <= configs.SHARED_LIMIT[arch], (made, built)
        if made.capability == 90:
            assert built.stack == 0, (made, built)


# --- on the GPU ------------------------------------------------------------------------------------------------------

BANKS = [(22, 512, 512), (22, 256, 512), (22, 512, 1536), (3, 1023, 130)]  # square, wide, wider, tall and odd


def error(got: Tensor, exact: Tensor) -> float:
    """Root mean square: a maximum over millions of roundings is one of them, and noise."""
    return (got.double() - exact).square().mean().sqrt().item()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", BANKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
class TestOnGpu:
    def test_no_less_exact_than_cublas(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        x = (torch.randn(shape, device="cuda") / shape[-1] ** 0.5).to(dtype)
        a = ops.xxt(x)
        b = ops.ba_plus_caa(a, -4.775, 2.0315)
        wide = x.double()
        poly = reference.ba_plus_caa(a.double(), -4.775, 2.0315)
        cases = [
            ("xxt", a, x @ x.mT, reference.xxt(wide)),
            ("xxt of a view", ops.xxt(x.mT.contiguous().mT), x @ x.mT, reference.xxt(wide)),
            ("ba_plus_caa", b, torch.baddbmm(a, a, a, beta=-4.775, alpha=2.0315), poly),
            ("symmetric_product", ops.symmetric_product(a, a), a @ a, a.double() @ a.double()),
            ("ax_plus_bx", step(x), torch.baddbmm(x, b, x, beta=3.4445), 3.4445 * wide + b.double() @ wide),
        ]
        for name, ours, theirs, exact in cases:
            # 0.2%: in float32 sums of another order round to another error, a little larger or smaller
            assert error(ours, exact) <= 1.002 * error(theirs, exact), name
        assert torch.equal(a, a.mT)
        assert torch.equal(b, b.mT)

    def test_gradients_no_less_exact_than_torch(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """xxt's gradient rounds G + G^T before the one product, PyTorch's rounds two products before their sum: as much, in
        bfloat16 to a thousandth or so either way (simulated on a CPU, products rounded as a GPU does)."""
        batch, m, k = shape
        batch = max(batch, 12)  # fewer elements would leave more to luck
        x = (torch.randn(batch, m, k, device="cuda") / k**0.5).to(dtype)
        assert_as_exact_as_torch(ops.xxt, reference.xxt, [x], luck=0.002)
        assert_as_exact_as_torch(
            lambda a: ops.ba_plus_caa(a, -4.775, 2.0315),
            lambda a: reference.ba_plus_caa(a, -4.775, 2.0315),
            [symmetric_matrix(batch, m, m, dtype=dtype, device=torch.device("cuda"))],
        )

    def test_same_bits_every_time(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        def every(x: Tensor) -> tuple[Tensor, ...]:
            a = ops.xxt(x)
            b = ops.ba_plus_caa(a, -4.775, 2.0315)
            return a, b, ops.symmetric_product(a, b), ops.ax_plus_bx(x, b, 3.4445)

        assert_same_bits(every, [(torch.randn(shape, device="cuda") / shape[-1] ** 0.5).to(dtype)])

    def test_in_a_graph_with_other_kernels_between(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Kernels are launched before the one ahead has ended; none may read or overwrite too early."""
        x = torch.randn(shape, device="cuda")
        x = (x / x.norm(dim=(-2, -1), keepdim=True)).to(
            dtype
        )  # singular values under 1, where the iteration stays bounded

        def chain() -> Tensor:
            y = x
            for _ in range(5):
                y = step(y).mul_(0.9)
            return y

        expected = chain()
        assert torch.isfinite(expected).all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain()
        for _ in range(20):
            got.zero_()
            graph.replay()
            assert torch.equal(got, expected)


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    x = torch.randn(2, 33024, 64, device="cuda", dtype=torch.bfloat16)  # 2 x 1.09e9 results: past 2^31
    got = ops.xxt(x)
    last = x[1, -256:].double()
    assert_near(got[1, -256:, -256:], last @ last.mT)
    assert_near(got[1, :256, -256:], x[1, :256].double() @ last.mT)
    assert torch.equal(got[1, :256, -256:], got[1, -256:, :256].mT)
