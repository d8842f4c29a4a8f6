"""The measures of a text's difficulty are probabilities, and see what is easy."""

from collections.abc import Callable
from types import ModuleType

import numpy as np


def test_counts_predict_with_probabilities_that_sum_to_one(benchmark: Callable[[str], ModuleType]) -> None:
    difficulty = benchmark("text_difficulty")
    counted = np.random.default_rng(0).integers(0, 5, 400).astype(np.uint8)
    for context in ([], [0, 1, 2, 3, 4, 0, 1], [4, 4], [200, 0, 1]):
        last = [difficulty.predict(counted, np.array([*context, byte], np.uint8))[-1] for byte in range(256)]
        np.testing.assert_allclose(sum(last), 1, rtol=1e-9)


def test_an_easy_text_has_a_low_measure(benchmark: Callable[[str], ModuleType]) -> None:
    difficulty = benchmark("text_difficulty")
    rng = np.random.default_rng(0)
    easy = [f"line {number} of the same words again\n".encode() * 20 for number in range(60)]
    hard = [rng.integers(97, 123, 600).astype(np.uint8).tobytes() for _ in range(60)]
    there, here = difficulty.measure(easy), difficulty.measure(hard)
    assert all(there[name] < here[name] / 3 for name in there), (there, here)
    assert 4.6 < here["n-grams"] < 6, "26 letters at random have 4.70 bits"
