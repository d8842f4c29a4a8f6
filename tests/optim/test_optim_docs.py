"""The pages on the optimizer: every example runs on two ranks, and the figures they state are those of the code."""

import re
from pathlib import Path
from typing import Any

import torch

from parbank.optim.coefficients import resolve_coefficients
from parbank.optim.newton_schulz import count_products
from tests.distributed import run_distributed_test

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guide" / "muon.md"
DESIGN = ROOT / "docs" / "design" / "optimizer.md"


def _blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def _run_blocks() -> int:
    """All of them in order, in one namespace, as a reader would paste them."""
    namespace: dict[str, Any] = {}
    torch.manual_seed(0)
    for number, block in enumerate(_blocks(), 1):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), namespace)
    return number


def test_examples_run() -> None:
    assert run_distributed_test(_run_blocks, 2) == [len(_blocks())] * 2


def test_costs_and_ends_as_stated() -> None:
    text = " ".join(DESIGN.read_text().split())
    assert "plain 10 p + 5; symmetric kernels 7.5 p + 2.5; the Gram iteration with symmetric kernels 3 p + 7" in text
    assert "from 1.5e-3 of the norm up end between 0.68 and 1.21" in text
    assert "end between 0.86 and 1.14, from 1e-3 up" in text
    for p in (1, 2, 4):
        assert count_products(64, 64 * p, 5, "plain", True) == 10 * p + 5
        assert count_products(64, 64 * p, 5, "symmetric", True) == 7.5 * p + 2.5
        assert count_products(64, 64 * p, 5, "gram", True) == 3 * p + 7
    ends = {"quintic": (1.5e-3, 0.675, 1.21), "polar_express": (1e-3, 0.86, 1.14)}
    for name, (start, low, high) in ends.items():
        values = torch.logspace(torch.tensor(start).log10().item(), 0, 100_001, dtype=torch.float64)
        for a, b, c in resolve_coefficients(name, 5):
            values = values * (a + values**2 * (b + values**2 * c))
        assert low <= values.min() < low + 0.01
        assert high - 0.01 < values.max() <= high
