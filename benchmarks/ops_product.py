"""Products of the golf model by cuBLASLt's fastest algorithm beside torch.mm, and with a matrix added beside torch.addmm: cases
for ops.py.

They are the forward products and the gradients of inputs, from weights as they are stored. Gradients of weights are torch.mm's
in the model too. The bound is the larger of the FLOP at the rate of a large product and of the bytes at that of a copy. The last
rows are the choices made, with the times of that choice: without a cold cache, so shorter than those of the rows.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Case
from ops_pointwise import TOKENS, random

from parbank.ops.product import plans, product

# name: depth, columns, and whether the weight lies by columns
PRODUCTS = {
    "qkv": (512, 1024, True),
    "out": (512, 512, True),
    "down": (1536, 512, True),
    "down, stored transposed": (1536, 512, False),
    "dX of qkv": (1024, 512, False),
    "dX of out": (512, 512, False),
    "dX of up": (1536, 512, False),
}
ADDED = ("out", "down", "down, stored transposed", "dX of up")


def cases(quick: bool) -> Iterator[Case]:
    for name, (depth, columns, by_columns) in PRODUCTS.items():
        for added in (False, True) if name in ADDED else (False,):
            yield one(name, depth, columns, by_columns, added)
    for row in plans():
        a, b, choice = row.problem.a, row.problem.b, row.choice
        what = f"({a.rows}, {a.cols}, {b.cols}){', by columns' * b.by_columns}{' + c' * (row.problem.c is not None)}"
        print(f"product {what}: of {row.candidates} algorithms {choice}", flush=True)


def one(name: str, depth: int, columns: int, by_columns: bool, added: bool) -> Case:
    def build(multiply: Callable[..., Any]) -> Callable[[], Callable[[], Any]]:
        def made() -> Callable[[], Any]:
            a, c = random(TOKENS, depth), random(TOKENS, columns) if added else None
            b = random(columns, depth).t() if by_columns else random(depth, columns)
            return lambda: multiply(a, b, c)

        return made

    return Case(
        "product",
        f"product {name} ({TOKENS}, {depth}, {columns}){' + c' * added}",
        {"torch.addmm" if added else "torch.mm": build(by_torch), "ours": build(product)},
        flops=2.0 * TOKENS * depth * columns,
        bytes=2.0 * TOKENS * (depth + columns * (1 + added)),
        graph=True,
    )


def by_torch(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(a, b) if c is None else torch.addmm(c, a, b)
