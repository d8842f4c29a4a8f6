"""What the parts of a pass cost under a power limit: milliseconds and joules of each, held until the clock has settled.

    python benchmarks/energy.py [--seconds 1.5] [--candidates] [--only NAME] [--out DIR]

A card at its power limit lowers its clock until its draw fits. A part of the pass that draws little power lets the other parts
run faster, so milliseconds measured apart do not add up. Joules do: at a limit of P watts a pass that takes E joules takes E / P
seconds. Every part of the golf recipe's layers, over 98,304 tokens, is queued without a pause, as a graph, and read out after
its clock has settled: the time of a call, the clock, the power, and joules = power * time * calls in a pass.

--candidates times every algorithm that cuBLASLt proposes for the products, under sustained load, beside the algorithm that a
short run would choose. Bound: none; `step.py` has the floor. Writes benchmarks/results/energy.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from clocks import Watch
from harness import Row, capture, settings_of, start, write
from step import attention_backends, attention_both_ways, random
from torch import Tensor

from parbank.model import ModelConfig
from parbank.ops import flash, mix, norm, product, qkv
from parbank.ops.exclusive import _remove_own_value, _remove_own_value_backward
from parbank.ops.mlp import _mlp_down_backward, _mlp_up
from parbank.recipes import get_recipe

MEASURED = ("parbank/ops", "benchmarks/energy.py")
TOKENS, LENGTH = 98_304, 2048
Build3 = Callable[[], tuple[Tensor, Tensor, Tensor | None]]


@dataclass(frozen=True)
class Part:
    name: str
    provider: str
    calls: int
    """How often in a pass."""
    build: Callable[[], Callable[[], Any]]


def wide(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def products(
    width: int, hidden: int, row: int
) -> Iterator[tuple[str, Callable[[], tuple[Tensor, Tensor, Tensor | None]]]]:
    """Every product that is not a weight's gradient and not the MLP's own: its name and its operands."""
    yield "queries, keys, values", lambda: (random(TOKENS, width), random(row, width).t(), None)
    yield "out, and the sum", lambda: (random(TOKENS, width), random(width, width).t(), random(TOKENS, width))
    yield "down, and the sum", lambda: (random(TOKENS, hidden), random(hidden, width), random(TOKENS, width))
    yield "back through up", lambda: (random(TOKENS, hidden), random(hidden, width), None)
    yield "back through queries, keys, values", lambda: (random(TOKENS, row), random(row, width), None)
    yield "back through out", lambda: (random(TOKENS, width), random(width, width), None)


def algorithm(build: Build3, index: int) -> Callable[[], Any]:
    """One of cuBLASLt's for a product, by its place in the library's order."""
    a, b, c = build()
    out = product.product(a, b, c)
    plan = list(product._plans.values())[-1]
    assert plan is not None
    return lambda: product._run(plan.matmul, index % len(plan.matmul), (a, b, c), out)


def ours(build: Build3) -> Callable[[], Any]:
    a, b, c = build()
    return lambda: product._product(a, b, c)


def plain(build: Build3) -> Callable[[], Any]:
    """What PyTorch would run, without the sum, which it makes by another pass."""
    a, b, _ = build()
    return lambda: torch.mm(a, b)


def weight_gradient(outputs: int, inputs: int) -> Callable[[], Any]:
    g, x = random(TOKENS, outputs), random(TOKENS, inputs)
    return lambda: torch.mm(g.t(), x)


def mlp(c: ModelConfig, backward: bool) -> Callable[[], Any]:
    x, inverse = random(TOKENS, c.width), torch.rand(TOKENS, device="cuda") + 0.5
    up, down = random(c.hidden, c.width) / c.width**0.5, random(c.hidden, c.width).t() / c.hidden**0.5
    a, signs = _mlp_up(x, up, inverse, 1.0, 0.5)
    if backward:
        return lambda: _mlp_down_backward(x, down, a, signs, inverse, 1.0, 0.5)
    return lambda: _mlp_up(x, up, inverse, 1.0, 0.5)


def mixed(c: ModelConfig, backward: bool, skipped: bool) -> Callable[[], Any]:
    x, x0, dm, g = (random(TOKENS, c.width) for _ in range(4))
    skip, gain = (random(TOKENS, c.width), wide(c.width)) if skipped else (None, None)
    a, b, inverse = wide(c.width), wide(c.width), wide(TOKENS)
    if backward:
        return lambda: mix._mix_rms_norm_backward(None, dm, g, x, skip, x0, gain, a, b, inverse, 1.0, True)
    return lambda: mix._mix_rms_norm(x, None, skip, x0, gain, a, b, 1.0, 1e-6, True)


def norms(c: ModelConfig, backward: bool) -> Callable[[], Any]:
    x, g, straight, inverse = (*(random(TOKENS, c.width) for _ in range(3)), wide(TOKENS))
    return lambda: norm._row_norms_backward(straight, g, x, inverse) if backward else norm._row_norms(x, 1e-6)


def rotation(c: ModelConfig, backward: bool) -> Callable[[], Any]:
    batch = TOKENS // LENGTH
    row, gain, inverse = random(batch, LENGTH, c.width + 2 * c.kv_width), wide(c.heads), wide(batch, LENGTH)
    angles = torch.rand(LENGTH, c.rope_dims // 2, device="cuda")
    rest = (row, c.heads, c.kv_heads, gain, angles.cos(), angles.sin(), inverse, None, 1.0, 1e-6)
    if not backward:
        return lambda: qkv._split_qkv(*rest)
    dq = random(batch, LENGTH, c.heads, c.head_width)
    dk, dv = (random(2 if flash.AVAILABLE else 1, batch, LENGTH, c.kv_heads, c.head_width) for _ in range(2))
    return lambda: qkv._split_qkv_backward(dq, dk, dv, None, *rest)


def exclusive(c: ModelConfig, backward: bool) -> Callable[[], Any]:
    dz, y, v = (random(TOKENS // LENGTH, LENGTH, h, c.head_width) for h in (c.heads, c.heads, c.kv_heads))
    return lambda: _remove_own_value_backward(dz, y, v, True, True) if backward else _remove_own_value(y, v)


def parts(candidates: bool) -> Iterator[Part]:
    c = get_recipe("golf").model
    layers, row = c.layers, c.width + 2 * c.kv_width
    for name, build in products(c.width, c.hidden, row):
        yield Part(name, "ours", layers, partial(ours, build))
        for index in range(product.CANDIDATES if candidates else 0):
            yield Part(name, f"#{index}", layers, partial(algorithm, build, index))
        yield Part(name, "torch, without the sum", layers, partial(plain, build))
    sizes = {"up": (c.hidden, c.width), "down": (c.width, c.hidden), "queries, keys, values": (row, c.width)}
    for name, size in (sizes | {"out": (c.width, c.width)}).items():
        yield Part(f"weight gradient: {name}", "torch", layers, partial(weight_gradient, *size))
    for name, attend in attention_backends(LENGTH).items():
        if name in ("cudnn_attention", "flash_attention_3"):
            yield Part("attention", name, layers, partial(attention_both_ways, c, TOKENS // LENGTH, LENGTH, attend))
    skips = layers // 2
    for backward in (False, True):
        way = "backward" if backward else "forward"
        yield Part(f"MLP's own product, {way}", "ours", layers, partial(mlp, c, backward))
        yield Part(f"mix, {way}", "ours", layers - skips, partial(mixed, c, backward, False))
        yield Part(f"mix with a skip, {way}", "ours", skips, partial(mixed, c, backward, True))
        yield Part(f"row norms, {way}", "ours", layers, partial(norms, c, backward))
        yield Part(f"rotation, {way}", "ours", layers, partial(rotation, c, backward))
        yield Part(f"exclusive attention, {way}", "ours", c.xsa_layers, partial(exclusive, c, backward))


def hold(call: Callable[[], Any], seconds: float) -> tuple[float, float | None, float | None]:
    """Milliseconds of a call at the end of so many seconds of it, the clock and the power."""
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    replay = capture(lambda: [call() for _ in range(10)] and None)
    start.record()
    replay()
    end.record()
    torch.cuda.synchronize()
    repeats = max(2, round(1e3 * seconds / 2 / start.elapsed_time(end)))
    with Watch() as watch:
        for _ in range(repeats):
            replay()
        middle.record()
        for _ in range(repeats):
            replay()
        end.record()
        torch.cuda.synchronize()
    return middle.elapsed_time(end) / repeats / 10, watch.clock, watch.power


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.5, help="how long each part is held")
    parser.add_argument("--candidates", action="store_true", help="all of cuBLASLt's algorithms for the products")
    parser.add_argument("--only", default="", help="parts whose names have this in them")
    arguments = start(parser)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch sees none")
    rows: list[Row] = []
    for part in parts(arguments.candidates):
        if arguments.only not in part.name:
            continue
        ms, clock, power = hold(part.build(), arguments.seconds)
        joules = None if power is None else part.calls * ms * power / 1e3
        note = "" if power is not None else "nvidia-smi does not tell"
        case = f"{part.name} ({part.calls} in a pass)"
        rows += [
            Row(f"{case}: a call", part.provider, ms, "ms"),
            Row(f"{case}: clock", part.provider, clock, "MHz", note=note),
        ]
        rows += [
            Row(f"{case}: power", part.provider, power, "W", note=note),
            Row(f"{case}: in a pass", part.provider, joules, "J", note=note),
        ]
        print(
            f"{case:56} {part.provider:18} {ms:8.4f} ms  {clock or 0:6.0f} MHz  {power or 0:5.0f} W  {joules or 0:7.3f} J",
            flush=True,
        )
        torch.cuda.empty_cache()
    path = write("energy", rows, out=arguments.out, settings=settings_of(arguments), measured=MEASURED)
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
