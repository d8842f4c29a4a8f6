"""The symmetric products and Newton-Schulz on them: cases for ops.py and candidates for tune.py.

Everything is timed in a CUDA graph, so that no provider pays for its host code. Bounds count the FLOP that symmetry
leaves: m (m + 1) k for X X^T.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Case, Row, forward_backward
from torch import Tensor

from parbank import ops
from parbank.ops import configs, reference
from parbank.ops.symmetric import _launch_config

QUINTIC = (3.4445, -4.7750, 2.0315)
STEPS = 5
# Part A's banks, the two MLP ones in the one orientation in which they share a bank.
BANKS = [(22, 512, 512), (22, 256, 512), (22, 512, 1536)]
PUBLISHED_BANKS = [(22, 512, 512), (22, 256, 512), (11, 512, 1536), (11, 512, 1536)]
DTYPE = torch.bfloat16
DION = "dion's kernels"


def make_x(shape: tuple[int, ...], dtype: torch.dtype = DTYPE) -> Tensor:
    """Random, of Frobenius norm 1 per matrix: what the iteration starts from."""
    x = torch.randn(shape, device="cuda")
    return (x / x.norm(dim=(-2, -1), keepdim=True)).to(dtype)


def make_a(shape: tuple[int, int, int], dtype: torch.dtype = DTYPE) -> Tensor:
    return reference.xxt(make_x((shape[0], shape[1], shape[1])).float()).to(dtype)


def xxt_flops(batch: int, m: int, k: int) -> float:
    return batch * m * (m + 1) * k


def dense_flops(batch: int, m: int, k: int) -> float:
    return 2.0 * batch * m * m * k


# --- Newton-Schulz, written as a user would --------------------------------------------------------------------------


def plain(x: Tensor) -> Tensor:
    a, b, c = QUINTIC
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def symmetric(x: Tensor) -> Tensor:
    a, b, c = QUINTIC
    for _ in range(STEPS):
        x = ops.ax_plus_bx(x, ops.ba_plus_caa(ops.xxt(x), b, c), a)
    return x


def method(name: str) -> Callable[[Tensor], Tensor]:
    """The package's own iteration, choosing as it does for a graph."""
    from parbank.optim.newton_schulz import iterate

    return lambda x: iterate(x, [QUINTIC] * STEPS, name, graphed=True)


def describe_peers(rows: list[Row]) -> list[dict[str, Any]]:
    """Where dion's kernels came from, and how they differ from ours here, if these rows time them."""
    from peers import dion

    timed = any(row.provider == DION for row in rows)
    differs = (
        "in bfloat16, as it always is; ours in float16",
        "it also divides by the norm; our input has norm 1",
        "without its optional Gram iteration, which optimizer_newton_schulz.py times",
    )
    return [dion.PEER.describe(*differs)] if timed else []


def public_kernels() -> Callable[[Tensor], Tensor]:
    """microsoft/dion's Newton-Schulz on symmetric products in Triton. It normalises its input, which ours is here already."""
    from peers import dion

    return dion.newton_schulz()


def over(function: Callable[[Tensor], Tensor], banks: list[Tensor]) -> Callable[[], Any]:
    return lambda: [function(x) for x in banks]


def iteration_flops(batch: int, m: int, k: int) -> float:
    """Both symmetric products at half, the dense one in full."""
    return STEPS * (xxt_flops(batch, m, k) + xxt_flops(batch, m, m) + 2 * batch * m * m * k)


def bank_case() -> Case:
    def banks(shapes: list[tuple[int, int, int]], dtype: torch.dtype = DTYPE) -> list[Tensor]:
        return [make_x(shape, dtype) for shape in shapes]

    half = torch.float16  # what ParallelMuon iterates in
    providers = {
        "eager": lambda: over(plain, banks(BANKS)),
        "compile": lambda: over(torch.compile(plain), banks(BANKS)),
        "compile, 4 banks": lambda: over(torch.compile(plain), banks(PUBLISHED_BANKS)),
        DION: lambda: over(public_kernels(), banks(BANKS)),
        "ours": lambda: over(method("auto"), banks(BANKS, half)),
        "ours, 4 banks": lambda: over(method("auto"), banks(PUBLISHED_BANKS, half)),
        "ours, plain": lambda: over(method("plain"), banks(BANKS, half)),
        "ours, symmetric": lambda: over(method("symmetric"), banks(BANKS, half)),
        "ours, gram": lambda: over(method("gram"), banks(BANKS, half)),
    }
    flops = sum(iteration_flops(*shape) for shape in BANKS)
    return Case("newton_schulz", "NS, 5 steps, the golf banks", providers, flops=flops, graph=True)


def square_case(d: int) -> Case:
    shape = (4, d, d)
    providers = {
        "eager": lambda: over(plain, [make_x(shape)]),
        "compile": lambda: over(torch.compile(plain), [make_x(shape)]),
        "ours": lambda: over(symmetric, [make_x(shape)]),
    }
    return Case("newton_schulz", f"NS, 5 steps, (4, {d}, {d})", providers, flops=iteration_flops(*shape), graph=True)


# --- single ops ------------------------------------------------------------------------------------------------------


def op_cases(
    op: str,
    label: str,
    calls: tuple[Callable[..., Tensor], Callable[..., Tensor]],
    inputs: Callable[[], list[Tensor]],
    flops: tuple[float, float],
) -> Iterator[Case]:
    """Forward, and forward with backward, for (ours, the reference) and the FLOP of both."""
    ours, theirs = calls
    forward, both = flops

    def bind(function: Callable[..., Tensor]) -> Callable[[], Any]:
        made = inputs()
        return lambda: function(*made)

    yield Case(
        op,
        f"{op} {label} forward",
        {
            "eager": lambda: bind(theirs),
            "compile": lambda: bind(torch.compile(theirs)),
            "ours": lambda: bind(ours),
        },
        flops=forward,
        graph=True,
    )
    yield Case(
        op,
        f"{op} {label} forward+backward",
        {
            "eager": lambda: forward_backward(theirs, inputs()),
            "compile": lambda: forward_backward(torch.compile(theirs), inputs()),
            "ours": lambda: forward_backward(ours, inputs()),
        },
        flops=both,
        graph=True,
    )


def cases(quick: bool) -> Iterator[Case]:
    _, b, c = QUINTIC
    for shape in BANKS:
        batch, m, k = shape
        flops = (xxt_flops(*shape), xxt_flops(*shape) + 2.0 * batch * m * m * k)
        yield from op_cases(
            "xxt", str(shape), (ops.xxt, reference.xxt), functools.partial(_inputs, make_x, shape), flops
        )
    for shape in ((22, 512, 512), (22, 256, 256)):
        batch, m, _ = shape
        flops = (xxt_flops(*shape), xxt_flops(*shape) + 4.0 * batch * m**3)
        calls = (lambda a: ops.ba_plus_caa(a, b, c), lambda a: reference.ba_plus_caa(a, b, c))
        yield from op_cases("ba_plus_caa", str(shape), calls, functools.partial(_inputs, make_a, shape), flops)
    yield bank_case()
    for d in (1024,) if quick else (512, 1024, 2048, 4096):
        yield square_case(d)


def _inputs(make: Callable[[tuple[int, int, int]], Tensor], shape: tuple[int, int, int]) -> list[Tensor]:
    return [make(shape)]


# --- candidates ------------------------------------------------------------------------------------------------------


def tunables() -> list[Any]:
    from tune import Tunable

    squares = [(4, 512, 512), (4, 1024, 1024), (4, 2048, 2048), (4, 4096, 4096)]
    shapes = BANKS + squares
    odd = [(22, 511, 511), (3, 1023, 130)]  # whose rows do not start on 16 bytes
    _, b, c = QUINTIC

    def xxt_call(shape: tuple[int, int, int], dtype: torch.dtype = DTYPE) -> Callable[[], Callable[[], Any]]:
        def build() -> Callable[[], Any]:
            x = make_x(shape, dtype)
            return lambda: ops.xxt(x)

        return build

    def sum_call(shape: tuple[int, int, int]) -> Callable[[], Callable[[], Any]]:
        def build() -> Callable[[], Any]:
            x = make_a(shape)
            return lambda: ops.ba_plus_caa(x, b, c)

        return build

    def dense_call(shape: tuple[int, int, int], dtype: torch.dtype = DTYPE) -> Callable[[], Callable[[], Any]]:
        def build() -> Callable[[], Any]:
            x, y = make_x(shape, dtype), make_a(shape, dtype)
            return lambda: ops.ax_plus_bx(x, y, 3.4)

        return build

    sums = [(22, 512, 512), (22, 256, 256), *squares]
    symmetric_cases = {f"xxt {s}": (xxt_call(s), xxt_flops(*s)) for s in shapes}
    symmetric_cases |= {f"ba_plus_caa {s}": (sum_call(s), xxt_flops(*s)) for s in sums}
    dense_cases = {f"ax_plus_bx {s}": (dense_call(s), dense_flops(*s)) for s in shapes}
    # What the `plain` tables serve: odd sizes, and float32, whose bound is still that of bfloat16's products.
    wide = torch.float32
    symmetric_plain = {f"xxt {s}": (xxt_call(s), xxt_flops(*s)) for s in odd}
    symmetric_plain |= {f"xxt {s} float32": (xxt_call(s, wide), xxt_flops(*s)) for s in BANKS}
    dense_plain = {f"ax_plus_bx {s}": (dense_call(s), dense_flops(*s)) for s in odd}
    dense_plain |= {f"ax_plus_bx {s} float32": (dense_call(s, wide), dense_flops(*s)) for s in BANKS}
    return [
        Tunable(
            op,
            tiles,
            {name: pair[0] for name, pair in found.items()},
            flops={name: pair[1] for name, pair in found.items()},
            calls=6,
        )
        for op, tiles, found in (
            ("symmetric", candidates(), symmetric_cases),
            ("product", candidates(), dense_cases),
            ("symmetric_plain", plain_candidates(), symmetric_plain),
            ("product_plain", plain_candidates(), dense_plain),
        )
    ]


def candidates() -> list[configs.Launch]:
    """Tiles and depths that fit into shared memory, then each tile without one of the options."""
    tiles = [(64, 64, 4), (64, 128, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8)]
    limit = configs.SHARED_LIMIT["sm90"]
    found = []
    for m, n, warps in tiles:
        for k, stages in ((64, 3), (64, 4), (64, 5), (64, 6), (128, 2), (128, 3)):
            if (m + n) * k * 2 * stages + 1024 <= limit:
                found.append(_launch_config(m, n, k, warps, stages, "tma", "pdl"))
        found += [
            _launch_config(m, n, 64, warps, 4, *options) for options in (("tma", "pdl", "early_c"), ("tma",), ("pdl",))
        ]
    return found


def plain_candidates() -> list[configs.Launch]:
    """Small tiles, which leave registers for masks, narrow loads and float32 operands: none of these spills on 9.0."""
    tiles = [(32, 64, 4), (64, 64, 4), (64, 128, 4), (64, 128, 8)]
    depths = [(16, 2), (16, 3), (32, 2), (32, 3)]
    spilling = [(32, 16, 3)]
    return [
        _launch_config(m, n, k, warps, stages)
        for m, n, warps in tiles
        for k, stages in depths
        if (m, k, stages) not in spilling
    ]
