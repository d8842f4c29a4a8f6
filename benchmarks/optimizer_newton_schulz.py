"""Newton-Schulz in effective TFLOP/s against the size of the matrices, beside public kernels, with a plot.

    python benchmarks/optimizer_newton_schulz.py [--quick] [--claim NAME] [--out DIR]

Effective: the FLOP of five plain steps (X X^T, the polynomial in it, the product with X, all dense) over the time, for every
provider. A provider that computes half of a symmetric product, or iterates on the Gram matrix, does less work, so it may
exceed the rate of a large product. Inputs are float32. Every provider converts them, divides by the norm and iterates: ours and
dion's Gram iteration in float16, the others in bfloat16. Stacks have about 2^24 numbers. Times are those of a CUDA graph, without
the host.

Bound of the dense providers: the rate of a large product, which the result holds. Writes
benchmarks/results/newton_schulz_sizes, or the folder of --claim, with a plot.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import torch
from harness import Case, Row, Settings
from torch import Tensor

from parbank.optim.newton_schulz import count_products, orthogonalize

MEASURED = (
    "parbank/optim/newton_schulz.py", "parbank/ops/symmetric.py", "parbank/ops/configs.py",
    "benchmarks/optimizer_newton_schulz.py",
)  # fmt: skip
STEPS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)
SIZES = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
QUICK_SIZES = (512, 1024, 2048, 4096)
ASPECTS = {1: "square", 4: "1 : 4"}
NUMBERS = 2**24  # in a stack
OURS, DION, GRAM = "parbank", "dion, Triton", "dion, Gram"


def plain(G: Tensor) -> Tensor:
    """As usually written."""
    a, b, c = QUINTIC
    X = G.bfloat16()
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


def ours(method: str) -> Callable[[Tensor], Tensor]:
    return lambda G: orthogonalize(G, method=method, graphed=True)


def dion(gram: bool) -> Callable[[Tensor], Tensor]:
    from peers import dion as peer

    return peer.newton_schulz(gram)


PROVIDERS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "PyTorch, eager": lambda: plain,
    "PyTorch, compiled": lambda: torch.compile(plain, dynamic=False),
    DION: lambda: dion(gram=False),
    GRAM: lambda: dion(gram=True),
    OURS: lambda: ours("auto"),
    f"{OURS}, symmetric": lambda: ours("symmetric"),
    f"{OURS}, Gram": lambda: ours("gram"),
    f"{OURS}, plain": lambda: ours("plain"),
}


def find_shape(size: int, aspect: int) -> tuple[int, int, int]:
    return max(1, NUMBERS // (size * size * aspect)), size, size * aspect


def count_flops(shape: tuple[int, int, int]) -> float:
    """Of five plain steps on a stack."""
    batch, rows, cols = shape
    return batch * count_products(rows, cols, STEPS, "plain", False) * 2 * rows**3


def list_cases(quick: bool) -> Iterator[tuple[Case, tuple[int, int, int]]]:
    for aspect, words in ASPECTS.items():
        for size in QUICK_SIZES if quick else SIZES:
            shape = find_shape(size, aspect)
            names = [name for name in PROVIDERS if not (quick and name == "PyTorch, compiled")]
            builders = {name: lambda name=name, shape=shape: _bind(PROVIDERS[name](), shape) for name in names}
            flops = count_flops(shape)
            yield Case("newton_schulz", f"{words}, {size}", builders, flops=flops, graph=True), shape


def _bind(function: Callable[[Tensor], Tensor], shape: tuple[int, int, int]) -> Callable[[], Any]:
    G = torch.randn(shape, device="cuda")
    return lambda: function(G)


def to_rates(rows: list[Row], shape: tuple[int, int, int]) -> list[Row]:
    """Milliseconds as effective TFLOP/s."""
    flops = count_flops(shape)
    return [
        Row(row.case, row.provider, row.value and flops / row.value / 1e9, "TFLOP/s", None, row.note) for row in rows
    ]


def describe_peers() -> list[dict[str, Any]]:
    from peers import dion as peer

    return [peer.PEER.describe("its Triton iteration computes in bfloat16, ours in float16", *peer.describe_gram())]


def draw(about: dict[str, Any], path: Path) -> None:
    """One panel for each shape: effective TFLOP/s against the shorter side, one line a provider."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = list(dict.fromkeys(row["case"].rpartition(", ")[0] for row in about["rows"]))
    figure, axes = plt.subplots(1, len(shapes), figsize=(5.5 * len(shapes), 4.2), sharey=True, squeeze=False)
    for panel, shape in zip(axes[0], shapes):
        rows = [row for row in about["rows"] if row["case"].rpartition(", ")[0] == shape and row["value"] is not None]
        for provider in dict.fromkeys(row["provider"] for row in rows):
            mine = [row for row in rows if row["provider"] == provider]
            sides = [int(row["case"].rpartition(", ")[2]) for row in mine]
            style = {"linewidth": 2.2, "color": "black"} if provider == OURS else {"linewidth": 1.1}
            panel.plot(sides, [row["value"] for row in mine], marker="o", markersize=3, label=provider, **style)
        if rate := about.get("rates", {}).get("bf16_product_TFLOP_per_s"):
            panel.axhline(rate, color="grey", linestyle="--", linewidth=1, label="a large bfloat16 product")
        panel.set_xscale("log", base=2)
        panel.set_title(shape, fontsize=10)
        panel.set_xlabel("shorter side")
    axes[0][0].set_ylabel("effective TFLOP/s, five steps")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"Newton-Schulz on {about['machine'].get('gpu', 'a CPU')}", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats, without torch.compile")
    parser.add_argument("--claim", default="newton_schulz_sizes", help="the result's folder")
    arguments = harness.start(parser)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch sees none")
    torch.manual_seed(0)
    settings, rows = Settings(quick=arguments.quick), []
    for case, shape in list_cases(arguments.quick):
        rows += to_rates(harness.run_case(case, settings), shape)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        options = {"settings": harness.settings_of(arguments), "measured": MEASURED, "peers": describe_peers()}
        path = harness.write(arguments.claim, rows, out=arguments.out, **options)  # a run may be cut off
    print(path)


if __name__ == "__main__":
    main()
