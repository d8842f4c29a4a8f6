"""benchmarks/adaptation.py: each row of its table has the predictions that its name says."""

from collections.abc import Callable
from types import ModuleType

import numpy as np

from parbank.eval.methods import make_method


def test_factors_without_temperatures_are_those_of_every_rate(benchmark: Callable[[str], ModuleType]) -> None:
    method = make_method("adaptive", rates=(0.1, 0.2, 0.3), temperatures=(0.5, 1.0))
    unlearnt, adapted = np.array([[50, 100]]), np.array([[51, 101, 52, 102, 53, 103]])
    found = benchmark("adaptation").variants(method, unlearnt, adapted + 10, adapted)
    assert found["factors of each document"].adapted.tolist() == [[101, 102, 103]]
    assert found["factors that start anew"].adapted.tolist() == [[111, 112, 113]]
    assert found["each document alone"].adapted.tolist() == [[100]]
    assert found["everything"].adapted is adapted
    assert found["temperatures"].adapted is unlearnt
