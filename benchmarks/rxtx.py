"""RXTX (Rybin, Zhang and Luo 2025) for X X^T on a CPU: 26 general and 8 symmetric products of blocks, by count and by clock.

    python benchmarks/rxtx.py [--sizes 1024 2048] [--levels 1 2] [--out DIR]

X is cut into 4 x 4 blocks X1 ... X16, row by row. One level takes 26 products of two different sums of blocks and 8 products
of a block with its own transpose, which may be computed by RXTX again. The diagonal and the upper half of X X^T cost n^3 / 2
multiplications directly (BLAS calls it syrk), and (26 + 8 / 2) / 64 n^3 by one level: 6.25% fewer, for additions of blocks
that the memory's bandwidth pays for. NumPy computes `X @ X.T` by syrk, which is the incumbent here.

Bound: the share of syrk's multiplications, a row of its own. Writes benchmarks/results/rxtx: CPU time and relative error.
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable

import numpy as np
from harness import Row, settings_of, start, write

Array = np.ndarray
REPEATS = 7

# The two factors of each general product, as sums of blocks. Facts of the paper's Algorithm 1.
PRODUCTS = [
    "-2+3-4+8 | 8+11", "1-5-6+7 | 15+5", "-2+12 | -10+16+12", "9-6 | 13+9-14", "2+11 | -6+15-7", "6+11 | 6+7-11",
    "11 | 6+7", "2 | -14-10+6-15+7+16+12", "6 | 13+9-14-10+6+7-11", "2-3+7+11+4-8 | 11", "5+6-7 | 5", "2-3+4 | 8",
    "-1+5+6+3-7+11 | 15", "-1+5+6 | 13+9+15", "2+4-8 | 11+16+12", "1-8 | 9-16", "12 | 10-12", "9 | 13-14",
    "-2+3 | -15+7+8", "5+9-8 | 9", "8 | 9-8+12", "-6+7 | 5+7-11", "1 | 13-5+16", "-1+4+12 | 16", "9+2+10 | 14",
    "6+10+12 | 10",
]  # fmt: skip
SQUARES = (1, 2, 3, 4, 13, 14, 15, 16)
# The upper blocks of the result, as sums of products: 1 to 26 are those above, and the squares are named s1 ... s8.
RESULTS = {
    (0, 0): "s1+s2+s3+s4", (0, 1): "2-5-7+11+12+13+19", (0, 2): "1+3+12+15+16+17+21-24",
    (0, 3): "2-3-5-7-8+11+13-17+23+24", (1, 1): "1+6-7+10+11+12+22", (1, 2): "1-4+6-7-9+10+12+18+20+21",
    (1, 3): "2+4+11+14+16-18-20+23", (2, 2): "4-6+7+9-17-18+26", (2, 3): "3+5+7+8+17+18+25", (3, 3): "s5+s6+s7+s8",
}  # fmt: skip


def combine(text: str, terms: dict[str, Array]) -> Array:
    """A signed sum such as "-2+3" of named terms."""
    found = re.findall(r"([+-]?)(s?\d+)", text)
    total = -terms[found[0][1]] if found[0][0] == "-" else terms[found[0][1]]
    if len(found) == 1:
        return total
    total = total.copy()
    for sign, name in found[1:]:
        np.subtract(total, terms[name], out=total) if sign == "-" else np.add(total, terms[name], out=total)
    return total


def rxtx(X: Array, levels: int = 1) -> Array:
    """X X^T, both halves. Sides must be multiples of 4^levels."""
    if levels == 0:
        return X @ X.T
    rows, cols = X.shape[0] // 4, X.shape[1] // 4
    blocks = {
        str(4 * r + c + 1): X[r * rows : (r + 1) * rows, c * cols : (c + 1) * cols] for r in range(4) for c in range(4)
    }
    products = {}
    for number, text in enumerate(PRODUCTS, 1):
        left, right = (combine(side.strip(), blocks) for side in text.split("|"))
        products[str(number)] = left @ right.T
    for number, block in enumerate(SQUARES, 1):
        products[f"s{number}"] = rxtx(blocks[str(block)], levels - 1)
    out = np.empty((X.shape[0], X.shape[0]), X.dtype)
    for (r, c), text in RESULTS.items():
        block = combine(text, products)
        out[r * rows : (r + 1) * rows, c * rows : (c + 1) * rows] = block
        if r != c:
            out[c * rows : (c + 1) * rows, r * rows : (r + 1) * rows] = block.T
    return out


def count_multiplications(n: int, levels: int) -> float:
    """Of an n x n matrix, for one half of the result."""
    if levels == 0:
        return n * n * (n + 1) / 2
    return 26 * (n / 4) ** 3 + 8 * count_multiplications(n // 4, levels - 1)


def take_turns(calls: dict[str, Callable[[], Array]]) -> dict[str, float]:
    """The median CPU time of each over all threads, in milliseconds: other work on the machine then matters less."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(REPEATS + 1):
        for name, call in calls.items():
            began = time.process_time()
            call()
            if turn:
                times[name].append(1e3 * (time.process_time() - began))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", type=int, default=[1024, 2048])
    parser.add_argument("--levels", nargs="*", type=int, default=[1, 2])
    arguments = start(parser)
    rows: list[Row] = []
    for size in arguments.sizes:
        for dtype in (np.float32, np.float64):
            X = np.random.default_rng(0).standard_normal((size, size)).astype(dtype)
            exact = X.astype(np.float64) @ X.astype(np.float64).T
            calls: dict[str, Callable[[], Array]] = {"X @ X.T": lambda X=X: X @ X.T}
            calls |= {f"RXTX, {n} levels": lambda X=X, n=n: rxtx(X, n) for n in arguments.levels}
            case = f"{size} x {size}, {np.dtype(dtype).name}"
            for name, milliseconds in take_turns(calls).items():
                error = np.linalg.norm(calls[name]() - exact) / np.linalg.norm(exact)
                levels = int(name.split()[1]) if name.startswith("RXTX") else 0
                count = count_multiplications(size, levels) / count_multiplications(size, 0)
                rows.append(Row(case, name, milliseconds, note=f"relative error {error:.1e}"))
                rows.append(Row(f"{case}: multiplications, as a share of syrk's", name, count, "share"))
                print(
                    f"{case:24} {name:16} {milliseconds:8.1f} ms  {count:.3f} of the multiplications, error {error:.1e}"
                )
    print(write("rxtx", rows, out=arguments.out, settings=settings_of(arguments), measured=["benchmarks/rxtx.py"]))


if __name__ == "__main__":
    main()
