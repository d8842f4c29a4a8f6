"""The MLP with its activation inside the products: cases for ops.py and candidates for tune.py.

The bound counts the FLOP of the products (two forward, four backward). The fused kernels save the elementwise passes that
compiled PyTorch makes on top: 604 MB forward and 906 MB backward at golf size.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Case
from ops_pointwise import SLOPE, TOKENS, both_ways, random
from torch import Tensor

from parbank import ops
from parbank.ops import configs, mlp_hopper, reference

fused = importlib.import_module("parbank.ops.mlp")  # the package's attribute of that name is the function
WIDTH, HIDDEN = 512, 1536


def inputs() -> list[Tensor]:
    up, down = random(HIDDEN, WIDTH) / WIDTH**0.5, random(WIDTH, HIDDEN) / HIDDEN**0.5
    return [random(TOKENS, WIDTH), up, down]


def banked() -> list[Tensor]:
    """The down matrix stored transposed, as in a bank that has one orientation for both."""
    x, up, down = inputs()
    return [x, up, down.t().contiguous()]


def cases(quick: bool) -> Iterator[Case]:
    product = 2.0 * TOKENS * WIDTH * HIDDEN
    label = f"({TOKENS}, {WIDTH} -> {HIDDEN} -> {WIDTH})"
    yield from both_ways(
        "mlp",
        label,
        (lambda x, u, d: ops.mlp(x, u, d, SLOPE), lambda x, u, d: reference.mlp(x, u, d, SLOPE)),
        inputs,
        (0.0, 0.0),
        (2 * product, 6 * product),
    )
    yield from both_ways(
        "mlp",
        f"{label} stored transposed",
        (lambda x, u, d: ops.mlp(x, u, d.t(), SLOPE), lambda x, u, d: reference.mlp(x, u, d.t(), SLOPE)),
        banked,
        (0.0, 0.0),
        (2 * product, 6 * product),
    )
    yield one_product("up", product)
    yield one_product("down, backward", product)


def one_product(which: str, flops: float) -> Case:
    """A single product with its epilogue, beside the same product of cuBLAS without one."""

    def ours() -> Callable[[], Any]:
        return up_call() if which == "up" else down_call(False)()

    def cublas() -> Callable[[], Any]:
        x, up, _ = inputs()
        out = torch.empty(TOKENS, HIDDEN, device="cuda", dtype=x.dtype)
        return lambda: torch.mm(x, up.t(), out=out)

    return Case("mlp", f"mlp, the product {which}", {"cublas alone": cublas, "ours": ours}, flops=flops, graph=True)


def up_call() -> Callable[[], Any]:
    x, up, _ = inputs()
    a = torch.empty(TOKENS, HIDDEN, device="cuda", dtype=x.dtype)
    signs = torch.empty(TOKENS, HIDDEN // 8, device="cuda", dtype=torch.uint8)
    return lambda: fused._product(x, up, None, a, signs, SLOPE) or (a, signs)


def down_call(transposed: bool) -> Callable[[], Callable[[], Any]]:
    def build() -> Callable[[], Any]:
        dy, _, down = inputs()
        if transposed:
            down = down.t().contiguous().t()
        a, du = random(TOKENS, HIDDEN).square(), torch.empty(TOKENS, HIDDEN, device="cuda", dtype=dy.dtype)
        signs = torch.randint(256, (TOKENS, HIDDEN // 8), device="cuda", dtype=torch.uint8)
        return lambda: fused._product(dy, down.t(), a, du, signs, SLOPE) or du

    return build


BITS = 1 << torch.arange(8, dtype=torch.int32)[:, None]  # bit i of byte c is column 8 i + c of its 64


def up_exact() -> list[Tensor]:
    x, up, _ = inputs()
    u = x.float() @ up.float().t()
    signs = ((u < 0).view(TOKENS, -1, 8, 8) * BITS.to(u.device)).sum(2).to(torch.uint8)
    return [reference.leaky_relu_squared(u, SLOPE), signs.view(TOKENS, -1)]


def down_exact() -> Tensor:
    dy, _, down = inputs()
    a = random(TOKENS, HIDDEN).square()
    signs = torch.randint(256, (TOKENS, HIDDEN // 8), device="cuda", dtype=torch.uint8)
    negative = (signs.view(TOKENS, -1, 1, 8) & BITS.to(a.device).to(torch.uint8)).bool().view(TOKENS, HIDDEN)
    return (dy.float() @ down.float()) * 2 * a.float().sqrt() * torch.where(negative, -SLOPE, 1.0)


def candidates(backward: bool = False) -> list[configs.Launch]:
    make = fused.launch_config
    found = [make(128, 256, 64, 8, stages, tma=True, split=2, per_sm=1) for stages in (3, 4)]
    found += [make(128, 256, 64, 8, 3, tma=tma, split=split) for tma in (True, False) for split in (1, 2)]
    found += [make(256, 128, 64, 8, 3, tma=True, per_sm=1)]
    # Two and more programs on a multiprocessor: one's products beside the other's epilogue.
    for per_sm in (0, 2):
        found += [make(128, 128, 64, warps, 3, tma=True, split=2, per_sm=per_sm) for warps in (4, 8)]
        found += [make(128, 128, 32, 4, 4, tma=True, split=2, per_sm=per_sm)]
        found += [make(64, 256, 64, 4, 2, tma=True, split=2, per_sm=per_sm)]
    found += [make(128, 128, 64, 8, stages, tma=True, split=split) for stages in (2, 4) for split in (1, 2)]
    found += [make(128, 128, 128, 8, 2, tma=True, split=2), make(64, 256, 64, 8, 3, tma=True, split=2)]
    # Eight warps take some 150 registers a thread unless told otherwise, which is one program a multiprocessor. With 128 it is two.
    for early in (False, True) if backward else (False,):
        for k, stages, split in ((64, 3, 2), (64, 2, 1), (64, 2, 2), (32, 4, 1), (32, 5, 2)):
            found += [make(128, 128, k, 8, stages, tma=True, split=split, early=early, registers=128)]
        found += [make(*tile, 64, 4, 2, tma=True, early=early, registers=168) for tile in ((64, 128), (128, 64))]
        found += [make(64, 128, 64, 4, 3, tma=True, early=early, registers=160)]
        found += [make(64, 256, 64, 4, 2, tma=True, split=2, early=early, registers=255)]
    found += [make(128, 128, 64, 8, 2, tma=True, split=2, per_sm=2, registers=128)]
    if backward:
        found += [
            make(128, 256, 64, 8, 3, tma=True, split=2, early=True),
            make(256, 128, 64, 8, 3, tma=True, early=True),
        ]
        found += [make(128, 128, 64, warps, 3, tma=True, split=2, early=True) for warps in (4, 8)]
        found += [make(128, 128, 32, 4, stages, tma=True, split=2, early=True) for stages in (4, 5, 6)]
        found += [make(128, 128, 64, 4, stages, tma=True, split=2, early=True, per_sm=2) for stages in (2, 3)]
    return found + hopper_candidates(backward)


def hopper_candidates(backward: bool) -> list[configs.Launch]:
    """All the shared memory there is, as ring or as buffers; on other GPUs these are the table's own Triton launch."""
    make = mlp_hopper.launch_config
    found = []
    for bufs in (1, 2) if backward else (1,):
        for step in (64, 128):
            places = WIDTH // step
            stages = (14 - 2 * bufs) * 64 // step
            for turn in (0, places // 2 + 1, places):
                for ask in {places // 2, places} if backward and bufs > 1 else {places}:
                    found += [
                        make(step, stages, bufs, turn=turn, lag=lag, ask=ask)
                        for lag in ((1, 2) if step == 64 else (1,))
                    ]
    return found


def tunables() -> list[Any]:
    from tune import Tunable

    flops = 2.0 * TOKENS * WIDTH * HIDDEN
    back = {"plain": down_call(False), "stored transposed": down_call(True)}
    return [
        Tunable("mlp_up", candidates(), {"golf": up_call}, 4, {"golf": flops}, exact={"golf": up_exact}),
        Tunable(
            "mlp_down_backward",
            candidates(backward=True),
            back,
            calls=4,
            flops=dict.fromkeys(back, flops),
            exact=dict.fromkeys(back, down_exact),
        ),
    ]
