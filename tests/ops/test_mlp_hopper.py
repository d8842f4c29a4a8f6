"""Hopper's own kernel for the MLP's products, held against the reference in float64 and against the Triton kernel."""

import contextlib
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from aot import Job, build
from checking import assert_as_exact_as_torch, assert_matches, assert_same_bits
from torch import Tensor

from parbank.ops import configs, mlp, mlp_hopper, reference
from parbank.ops.configs import Launch

module = importlib.import_module("parbank.ops.mlp")  # the package's attribute of that name is the function
TABLES = ("mlp_up", "mlp_down_backward")
LAUNCHES = {op: [x for _, x in configs.tables()[op]["sm90"] if "PINGPONG" in x.blocks] for op in TABLES}
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not HOPPER or not mlp_hopper.HAS_GLUON, reason="needs a GPU of 9.0 and Triton's Gluon")


@contextlib.contextmanager
def forced() -> Iterator[None]:
    with (
        configs.force("mlp_up", LAUNCHES["mlp_up"][0]),
        configs.force("mlp_down_backward", LAUNCHES["mlp_down_backward"][0]),
    ):
        yield


@contextlib.contextmanager
def by_triton() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for op in TABLES:
            row = next(x for _, x in configs.tables()[op]["sm90"] if "PINGPONG" not in x.blocks)
            stack.enter_context(configs.force(op, row))
        yield


def weights(rows: int, width: int, hidden: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    x, up, down = (torch.randn(*shape, device=device) for shape in ((rows, width), (hidden, width), (width, hidden)))
    return [x.to(dtype), (up / width**0.5).to(dtype), (down / hidden**0.5).to(dtype)]


def test_every_table_of_hopper_has_a_row_of_each_kernel():
    for op in TABLES:
        assert sorted("PINGPONG" in x.blocks for _, x in configs.tables()[op]["sm90"]) == [False, True]
    for arch in ("sm80", "sm100"):
        assert not any("PINGPONG" in x.blocks for op in TABLES for _, x in configs.tables()[op][arch])


@pytest.mark.parametrize("depth", mlp_hopper.DEPTHS)
@pytest.mark.parametrize("op", TABLES)
def test_conditions_under_which_it_cannot_wait_for_ever(op, depth):
    """The kernel asserts them too, but only when it is compiled."""
    for launch in LAUNCHES[op]:
        found = mlp_hopper.constants(launch, depth)
        places = depth // found["STEP"]
        assert found["LAG"] < found["ASK"] <= places <= found["STAGES"]
        assert found["TURN"] <= (places if found["BUFS"] > 1 else found["ASK"])


@pytest.mark.parametrize("depth", mlp_hopper.DEPTHS)
@pytest.mark.parametrize("step", [32, 64, 128])
def test_any_launch_is_cut_down_to_the_depth(step, depth):
    """As tune.py tries them: what a launch asks for may be more than a smaller depth has of places."""
    places = depth // step
    for much in (1, 2, places, 100):
        found = mlp_hopper.constants(mlp_hopper.launch_config(step, 16, 1, turn=much, lag=much - 1, ask=much), depth)
        assert found["LAG"] < found["ASK"] <= places
        assert found["TURN"] <= found["ASK"]
    assert mlp_hopper.constants(mlp_hopper.launch_config(step, 16, 1, turn=0), depth)["TURN"] == 0


@pytest.mark.parametrize("shape", [(128, 256, 128), (100, 24, 168)])
def test_what_it_does_not_take_goes_to_the_triton_kernel(shape, device, poison):
    """Odd sizes anywhere; on anything but Hopper, whole tiles too."""
    with forced():
        inputs = weights(*shape, torch.float16, device)
        assert mlp_hopper.takes(inputs[0], inputs[1]) == (HOPPER and mlp_hopper.HAS_GLUON and shape[0] == 128)
        assert_matches(lambda *i: mlp(*i, 0.5), lambda *i: reference.mlp(*i, 0.5), inputs)


def test_without_gluon_the_triton_kernel_remains():
    """As with a Triton that has moved it: what is called experimental may."""
    code = (
        "import sys, json; sys.modules['triton.experimental.gluon'] = None\n"
        "from parbank.ops import backend, mlp_hopper\n"
        "print(json.dumps([backend.HAS_TRITON, backend.HAS_GLUON, mlp_hopper.DEPTHS]))"
    )
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert json.loads(run.stdout) == [True, False, list(mlp_hopper.DEPTHS)]


def job(launch: Launch, *, backward: bool, k_major: bool, factored: bool, kind: str = "bf16", depth: int = 512) -> Job:
    def described(*block: int) -> str:
        return f"tensordesc<{kind}{list(block)},{mlp_hopper._layout!r}>"

    found = mlp_hopper.constants(launch, depth)
    options = {name: found.pop(name) for name in ("num_warps", "num_stages")}
    step = found["STEP"]
    signature = {"left": described(128, step), "right": described(128, step) if k_major else described(step, 128)}
    signature |= {"out": described(64, 64), "signs": "*i16", "rows": "i32", "slope": "fp32", "scale": "fp32"}
    signature |= ({"a": described(64, 64)} if backward else {}) | ({"inverse": "*fp32"} if factored else {})
    constexprs = {"K_MAJOR": k_major, "BACKWARD": backward, "FACTORED": factored, "DEPTH": depth, "COLS": 1536, **found}
    constexprs |= ({} if backward else {"a": None}) | ({} if factored else {"inverse": None})
    return Job("parbank.ops.mlp_hopper:_mlp_pingpong_kernel", signature, constexprs, 90, **options)


@pytest.mark.slow
def test_every_launch_compiles_without_spills():
    jobs = []
    for op in TABLES:
        for launch in LAUNCHES[op]:
            backward = op == "mlp_down_backward"
            for k_major in (True, False):
                for factored in (True, False):
                    jobs.append(job(launch, backward=backward, k_major=k_major, factored=factored))
            jobs.append(job(launch, backward=backward, k_major=not backward, factored=True, kind="fp16"))
            jobs += [job(launch, backward=backward, k_major=not backward, factored=False, depth=d) for d in (256, 384)]
    for each, built in zip(jobs, build(jobs), strict=True):
        assert built.stack == 0, each
        assert built.shared <= configs.SHARED_LIMIT["sm90"], each


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4096, 512, 1536), (128 * 31, 384, 640), (384, 256, 128)])
@pytest.mark.parametrize("transposed", [False, True])
def test_as_exact_as_torch(shape, dtype, transposed, device, poison):
    """Both weights stored either way round."""

    def through(op):
        return lambda x, u, d: op(x, u.t(), d.t(), 0.5) if transposed else op(x, u, d, 0.5)

    x, up, down = weights(*shape, dtype, device)
    if transposed:
        up, down = up.t().contiguous(), down.t().contiguous()
    assert mlp_hopper.takes(x, up.t() if transposed else up)
    with forced():
        assert_as_exact_as_torch(through(mlp), through(reference.mlp), [x, up, down])


def both_products(x: Tensor, up: Tensor, down: Tensor, inverse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The activation, its signs, and the gradient of a random x taken as that of y."""
    a, signs = module._mlp_up(x, up, inverse, 0.7, 0.5)
    return a, signs, module._mlp_down_backward(x, down, a, signs, inverse, 0.7, 0.5)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_of_rows(factored, dtype, device):
    """Against float64, no worse than the Triton kernel, whose own tests hold it against PyTorch."""
    x, up, down = weights(4096, 512, 1536, dtype, device)
    inverse = torch.rand(4096, device=device) + 0.5 if factored else None
    with forced():
        a, signs, du = both_products(x, up, down, inverse)
    with by_triton():
        other_a, other_signs, other_du = both_products(x, up, down, inverse)
    factor = 1.0 if inverse is None else 0.7 * inverse.double()[:, None]
    u = x.double() @ up.double().t() * factor
    exact_a = reference.leaky_relu_squared(u, 0.5)
    exact_du = (x.double() @ down.double()) * factor * 2 * a.double().sqrt() * torch.where(u < 0, -0.5, 1.0)
    for ours, theirs, exact in ((a, other_a, exact_a), (du, other_du, exact_du)):
        assert (ours.double() - exact).norm() <= 1.001 * (theirs.double() - exact).norm()
    assert (signs != other_signs).double().mean() < 1e-3  # sums next to 0


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("rows", [128, 256, 128 * 12, 128 * 133])
@pytest.mark.parametrize("programs", [None, 1, 40, 500])
def test_any_share_of_tiles(rows, programs, device, poison, monkeypatch):
    """Programs with no tile, one, some of a block, several blocks: every one of them ends, and every tile is done."""
    if programs is not None:
        monkeypatch.setattr(mlp_hopper, "persistent_programs", lambda *_: programs)
    inputs = weights(rows, 512, 1536, torch.bfloat16, device)
    with forced():
        found = both_products(*inputs, None)
    with by_triton():
        expected = both_products(*inputs, None)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs.double()).norm() <= 2e-3 * theirs.double().norm()


@pytest.mark.gpu
@hopper
def test_same_bits_every_time(device):
    with forced():
        assert_same_bits(lambda *i: mlp(*i, 0.5), weights(128 * 100, 512, 1536, torch.bfloat16, device))


@pytest.mark.gpu
@hopper
def test_more_than_two_to_the_31_activations(device):
    rows = 2**31 // 1536 // 128 * 128 + 256
    x, up, down = weights(rows, 512, 1536, torch.bfloat16, device)
    with forced():
        found = both_products(x, up, down, None)
        end = both_products(x[-256:], up, down, None)
    assert found[0].numel() > 2**31
    for whole, alone in zip(found, end, strict=True):
        assert torch.equal(whole[-256:], alone)
