"""Products in 8 bits beside products in 16 bits: cases for ops.py.

Alone, to see what a product gains at these depths, and what a scale for each row costs over one for the whole matrix; the pass
that rounds; and MLP and head, forward and backward, with everything that rounding adds. Products in 8 bits are bounded by twice
the run's bfloat16 rate, MLP and head by the mean over their products.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from harness import Case, forward_backward
from ops_mlp import HIDDEN, WIDTH, banked
from ops_pointwise import SLOPE, TOKENS, Build, random
from torch import Tensor

from parbank import ops
from parbank.ops import fp8, reference

VOCAB, CAP = 1024, 30.0


def cases(quick: bool) -> Iterator[Case]:
    if torch.cuda.get_device_capability() < fp8.MIN_CAPABILITY:
        return
    for depth, cols in ((WIDTH, HIDDEN), (HIDDEN, WIDTH), (WIDTH, VOCAB)):
        flops = TOKENS * depth * cols  # half of what there is, at twice the rate
        yield Case("fp8", f"fp8: product ({TOKENS}, {depth} -> {cols})", products(depth, cols), flops=flops, graph=True)
    for width in (WIDTH, HIDDEN):
        providers = {"compile": rounding(width)}
        yield Case("fp8", f"fp8: round ({TOKENS}, {width})", providers, bytes=3.0 * TOKENS * width, graph=True)
    product = 2.0 * TOKENS * WIDTH * HIDDEN
    # the gradients of the weights, a third of the products, are in 16 bits
    yield Case("fp8", "fp8: mlp both ways", mlps(), flops=6 * product * (1 / 3 + 1 / 3), graph=True)
    product = 2.0 * TOKENS * WIDTH * VOCAB
    yield Case("fp8", "fp8: head and loss both ways", heads(), flops=3 * product * (1 / 3 + 1 / 3), graph=True)


def products(depth: int, cols: int) -> dict[str, Build]:
    def bfloat16() -> Callable[[], Any]:
        x, w = random(TOKENS, depth), random(cols, depth)
        return lambda: torch.mm(x, w.t())

    def by_row() -> Callable[[], Any]:
        a, b = fp8.quantise(random(TOKENS, depth)), fp8.quantise(random(cols, depth))
        return lambda: fp8.multiply(a, b, torch.bfloat16)

    def whole() -> Callable[[], Any]:
        a, b = (random(n, depth).mul(60).clamp(-448, 448).to(fp8.DTYPE) for n in (TOKENS, cols))
        one = torch.ones((), device="cuda")
        kinds: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, **kinds)

    return {"bfloat16": bfloat16, "8 bits, a scale a row": by_row, "8 bits, one scale": whole}


def rounding(width: int) -> Build:
    def build() -> Callable[[], Any]:
        x, call = random(TOKENS, width), torch.compile(fp8.quantise, dynamic=False)
        return lambda: call(x)

    return build


def mlps() -> dict[str, Build]:
    """The down matrix stored transposed, as in the model's bank."""

    def of(function: Callable[..., Tensor]) -> Build:
        def call(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
            return function(x, up, down.t(), SLOPE)

        return lambda: forward_backward(torch.compile(call, dynamic=False), banked())

    return {"compile": of(reference.mlp), "ours": of(ops.mlp), "8 bits": of(fp8.mlp)}


def heads() -> dict[str, Build]:
    def of(linear: Callable[[Tensor, Tensor], Tensor]) -> Build:
        def build() -> Callable[[], Any]:
            targets = torch.randint(VOCAB, (TOKENS,), device="cuda")

            def call(x: Tensor, w: Tensor) -> Tensor:
                return ops.softcap_cross_entropy(linear(x, w), targets, CAP)

            return forward_backward(torch.compile(call, dynamic=False), [random(TOKENS, WIDTH), random(VOCAB, WIDTH)])

        return build

    return {"ours": of(F.linear), "8 bits": of(fp8.linear)}
